"""Random lives of requests over the real allocator and pools lose, leak and share nothing.

STATE_MACHINE_EXAMPLES=N runs N examples: fixed ones up to the usual number, others at every run where N is more.
"""

from __future__ import annotations

import logging
import os

import pytest
from plain_world import naive_pages
from stateful import live
from stateful.accounts import Accounts
from stateful.model import done
from stateful.pool import SPEC, UNEVEN_SPEC, V41_SPEC, Device
from stateful.refusals import REFUSED_LOADS, REFUSED_SAVES, Refusals
from stateful.steps import Steps

from sglang_dsv4.testing.standalone import PoolSpec

LEAST_STEPS = 10_000
EXAMPLES, STEPS_AN_EXAMPLE = 280, 64
FEWER = 60  # examples where only the families are others


class Lives(Steps, Refusals, Accounts):
    """Requests come, grow, are retracted, resumed, aborted; ``device`` is set by the test."""


@pytest.mark.parametrize(
    ("spec", "layout"),
    [(SPEC, "stock"), (V41_SPEC, "stock"), (UNEVEN_SPEC, "page-major")],
    ids=["v4", "v41", "page-major"],
)
def test_random_lives_of_requests(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, spec: PoolSpec, layout: str
) -> None:
    monkeypatch.setenv("DSV4_LAYOUT", layout)
    caplog.set_level(logging.ERROR, "sglang_dsv4")  # every dropped handle is a warning
    examples = int(os.environ.get("STATE_MACHINE_EXAMPLES", EXAMPLES if spec is SPEC else FEWER))
    Lives.device = Device(spec)
    done.clear()
    with naive_pages():
        live(Lives, examples, STEPS_AN_EXAMPLE, fixed=examples <= EXAMPLES)
    print(dict(done))
    assert done["retract"] and done["resume"] and done["steps"] >= LEAST_STEPS * examples // EXAMPLES
    if examples < EXAMPLES:
        return
    assert done["steps"] >= LEAST_STEPS
    for what in ("admit", "extend", "finish", "scribble", "retract", "resume"):
        assert done[what] >= LEAST_STEPS // 50, what
    refused = [f"load {how}" for how in REFUSED_LOADS] + [f"save {how}" for how in REFUSED_SAVES]
    for what in ("evict", "abort", "abort twice", "drop", "time passes", "exhausted", *refused):
        assert done[what], what
