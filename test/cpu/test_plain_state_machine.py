"""Random lives of a plain server lose no page and read no wrong byte.

PLAIN_EXAMPLES=N runs N examples: fixed ones up to the usual number, others at every run where N is more. 100 of them
make ten thousand steps.
"""

from __future__ import annotations

import logging
import os

import pytest
from plain_world import naive_pages
from stateful import live
from stateful.plain import PlainLives, done

pytestmark = pytest.mark.both_layouts

EXAMPLES, STEPS_AN_EXAMPLE = 6, 25
LONG, LEAST_STEPS = 100, 10_000


def test_random_lives_of_a_plain_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    examples = int(os.environ.get("PLAIN_EXAMPLES", EXAMPLES))
    done.clear()
    with naive_pages():
        live(PlainLives, examples, STEPS_AN_EXAMPLE, fixed=examples <= EXAMPLES)
    print(dict(done))
    if examples < EXAMPLES:
        return
    for what in ("submit", "extend", "decode", "retract", "loads", "evict"):
        assert done[what], what
    if examples >= LONG:
        assert done["steps"] >= LEAST_STEPS
        for what in ("mixed", "second turn", "match", "abort", "pause", "flush", "weight update", "stale copy"):
            assert done[what], what
