"""Random lives of a plain server, on the engine's own scheduler: no byte is wrong, and no page is lost.

PLAIN_EXAMPLES=N runs N examples: fixed ones up to the usual number, others at every run where N is more. 100 of them
make ten thousand steps.
"""

from __future__ import annotations

import logging
import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from plain_world import naive_pages
from stateful.plain import PlainLives, done

EXAMPLES, STEPS_AN_EXAMPLE = 6, 25
LONG, LEAST_STEPS = 100, 10_000


def test_random_lives_of_a_plain_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    examples = int(os.environ.get("PLAIN_EXAMPLES", EXAMPLES))
    done.clear()
    with naive_pages():
        run_state_machine_as_test(
            PlainLives,
            settings=settings(
                max_examples=examples,
                stateful_step_count=STEPS_AN_EXAMPLE,
                deadline=None,
                database=None,
                derandomize=examples <= EXAMPLES,
                suppress_health_check=list(HealthCheck),
                phases=(Phase.generate, Phase.shrink),
            ),
        )
    print(dict(done))
    if examples < EXAMPLES:
        return
    for what in ("submit", "extend", "decode", "retract", "loads", "evict"):
        assert done[what], what
    if examples >= LONG:
        assert done["steps"] >= LEAST_STEPS
        for what in ("mixed", "second turn", "match", "abort", "pause", "flush", "weight update", "stale copy"):
            assert done[what], what
