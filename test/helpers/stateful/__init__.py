"""Runs random lives of requests: the pool, the model of them, and the rules of a life."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

pytest.register_assert_rewrite(*(f"stateful.{name}" for name in (
    "pool", "model", "steps", "refusals", "accounts", "plain", "hisparse", "store", "sessions",
)))  # fmt: skip


def live(machine: type[RuleBasedStateMachine], examples: int, steps: int, fixed: bool) -> None:
    """Runs ``examples`` lives of ``steps`` steps. fixed: the same ones at every run."""
    chosen = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None, derandomize=fixed,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=chosen)
