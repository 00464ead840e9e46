"""Random lives of a HiSparse server lose no page and read no wrong row.

HISPARSE_EXAMPLES=N runs N examples: fixed ones up to the usual number, others at every run where N is more. 150 of them
make ten thousand steps.
"""

from __future__ import annotations

import logging
import os

import pytest
from hisparse_world import on_cpu
from stateful import live
from stateful.hisparse import HiSparseLives, done

EXAMPLES, STEPS_AN_EXAMPLE = 8, 100
LONG, LEAST_STEPS = 150, 10_000


def test_random_lives_of_a_hisparse_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    examples = int(os.environ.get("HISPARSE_EXAMPLES", EXAMPLES))
    done.clear()
    with on_cpu():
        live(HiSparseLives, examples, STEPS_AN_EXAMPLE, fixed=examples <= EXAMPLES)
    print(dict(done))
    if examples < EXAMPLES:
        return
    for what in ("arrive", "decode", "retract", "resume", "abort", "finish", "pause"):
        assert done[what], what
    if examples >= LONG:
        assert done["steps"] >= LEAST_STEPS
        for what in ("other weights", "recompute", "HostMemoryExhausted", "StaleWeights"):
            assert done[what], what
