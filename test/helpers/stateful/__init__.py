"""Runs random lives of requests: the pool, the model of them, and the rules of a life."""

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

pytest.register_assert_rewrite(*(f"stateful.{name}" for name in (
    "pool", "model", "steps", "refusals", "accounts", "plain", "hisparse", "store", "sessions",
)))  # fmt: skip

ROUNDS = 8


def examples(
    variable: str, usual: int, machine: type[RuleBasedStateMachine], steps: int, done: Counter[str], *wanted: str
) -> int:
    """Runs lives until ``done``, in which they count, has each of ``wanted``, and returns how many a round has.

    ``variable`` names the setting of that number, ``usual`` without it. The first round always has the same lives, up
    to the usual number; what a round of lives meets is luck, so that the next ones have others.
    """
    count = int(os.environ.get(variable, usual))
    done.clear()
    for number in range(ROUNDS):
        chosen = settings(
            max_examples=count, stateful_step_count=steps, deadline=None, database=None, derandomize=False,
            suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
        )  # fmt: skip
        lives = type(machine.__name__, (machine,), {})  # a seed stays with its class
        run_state_machine_as_test(seed(number)(lives) if count <= usual else lives, settings=chosen)
        if count < usual or not (missing := [what for what in wanted if not done[what]]):
            break
    else:
        raise AssertionError(f"{ROUNDS * count} lives had no {', '.join(missing)}")
    print(dict(done))
    return count
