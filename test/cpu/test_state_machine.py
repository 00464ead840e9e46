"""Random lives lose no page and read no wrong byte: over a pool, and of plain, session-keeping and HiSparse servers.

STATE_MACHINE_EXAMPLES=N, PLAIN_EXAMPLES=N, HISPARSE_EXAMPLES=N, SESSION_EXAMPLES=N run N examples: fixed ones up to the
usual number, others at every run where N is more. 300, 100, 150 and 160 of them make ten thousand steps.
"""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hisparse_world import on_cpu
from stateful import examples, hisparse, model, plain, sessions
from stateful.accounts import Accounts
from stateful.pool import SPEC, UNEVEN_SPEC, V41_SPEC, Device
from stateful.refusals import REFUSED_LOADS, REFUSED_SAVES, Refusals
from stateful.steps import Steps

from sglang_dsv4.engine.releases import engine_release
from sglang_dsv4.sessions.lookup import LookUp
from sglang_dsv4.testing.standalone import PoolSpec

LEAST_STEPS = 10_000
EXAMPLES = 300  # of requests over a pool: that many make LEAST_STEPS
USUAL, FEWER = 60, 20  # of them by default; fewer where only the families are others
AT_NODES = "windows at the node", "looked up behind a node", "looked up again"
REFUSED = (*(f"load {how}" for how in REFUSED_LOADS), *(f"save {how}" for how in REFUSED_SAVES))


class Lives(Steps, Refusals, Accounts):
    """Requests come, grow, are retracted, resumed, aborted; ``device`` is set by the test."""


@pytest.fixture(autouse=True)
def _without_a_gpu(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.CRITICAL)  # every dropped handle is a warning
    with on_cpu():
        yield


@pytest.mark.parametrize(
    ("spec", "layout"),
    [(SPEC, "stock"), (V41_SPEC, "stock"), (UNEVEN_SPEC, "page-major")],
    ids=["v4", "v41", "page-major"],
)
def test_random_lives_of_requests(monkeypatch: pytest.MonkeyPatch, spec: PoolSpec, layout: str) -> None:
    monkeypatch.setenv("DSV4_LAYOUT", layout)
    Lives.device = Device(spec)
    done, usual = model.done, USUAL if spec is SPEC else FEWER
    wanted = ("evict", "abort", "abort twice", "drop", "time passes", "exhausted", *REFUSED)
    count = examples("STATE_MACHINE_EXAMPLES", usual, Lives, 64, done, "retract", "resume", *wanted)
    assert done["steps"] >= LEAST_STEPS * count // EXAMPLES
    if count >= EXAMPLES:
        for what in ("admit", "extend", "finish", "scribble", "retract", "resume"):
            assert done[what] >= LEAST_STEPS // 50, what


@pytest.mark.both_layouts
def test_random_lives_of_a_plain_server() -> None:
    usually = ("submit", "extend", "decode", "retract", "loads", "evict", "drafts")
    if examples("PLAIN_EXAMPLES", 6, plain.PlainLives, 25, plain.done, *usually) >= 100:
        assert plain.done["steps"] >= LEAST_STEPS
        for what in (
            "mixed",
            "mixed with drafts",
            "second turn",
            "match",
            "abort",
            "pause",
            "flush",
            "weight update",
            "stale copy",
        ):
            assert plain.done[what], what


def test_random_lives_of_a_server_with_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_dsv4.engine.plain.sessions.FEWEST_TOKENS", sessions.FEWEST)
    has_window, longest = engine_release().has_window, LookUp.longest

    def both_ways(tree: Any, req: Any, first: int, end: int) -> bool:
        found = has_window(tree, req, first, end)
        if end == req.kv.cache_protected_len:
            gone = tree.tree_core.swa_tombstone_ranges(engine_release()._key(tree, req, end), first, end)
            assert found == (not gone)
            sessions.done["windows at the node"] += 1
        return found

    def longest_both_ways(store: LookUp, namespace: Any, tokens: Any, limit: int, node: Any, before: Any) -> Any:
        found = longest(store, namespace, tokens, limit, node, before)
        assert found.point is longest(store, namespace, tokens, limit).point
        sessions.done["looked up behind a node"] += node in store._at
        sessions.done["looked up again"] += before is not None
        return found

    monkeypatch.setattr(engine_release(), "has_window", both_ways)
    monkeypatch.setattr(LookUp, "longest", longest_both_ways)
    usually = ("submit", "extend", "decode", "turn", "hits", "most points", "evicted by retract", *AT_NODES)
    if examples("SESSION_EXAMPLES", 6, sessions.SessionLives, 25, sessions.done, *usually) >= 160:
        assert sessions.done["steps"] >= LEAST_STEPS
        for what in (
            "retract",
            "loads",
            "drafts",
            "windows alone",
            "flush",
            "weight update",
            "evicted by retract",
            "evicted by room",
        ):
            assert sessions.done[what], what


def test_random_lives_of_a_hisparse_server() -> None:
    usually = ("arrive", "decode", "retract", "resume", "abort", "finish", "pause")
    if examples("HISPARSE_EXAMPLES", 8, hisparse.HiSparseLives, 100, hisparse.done, *usually) >= 150:
        assert hisparse.done["steps"] >= LEAST_STEPS
        for what in ("other weights", "recompute", "HostMemoryExhausted", "StaleWeights"):
            assert hisparse.done[what], what
