"""A waiting request leaves in many ways, and its copy goes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from plain_world import forget, nothing_is_held, over, retracted, serving
from sglang.srt.environ import envs

from sglang_dsv4.engine.retract.stale import changing_weights


def times_out(world: Any, req: Any) -> None:
    req.time_stats.wait_queue_entry_time = 1e-9
    with envs.SGLANG_REQ_WAITING_TIMEOUT.override(0.001):
        if hasattr(world.scheduler, "_abort_on_waiting_timeout"):
            world.scheduler._abort_on_waiting_timeout()
        else:
            for abort in world.scheduler._poll_timeout_aborts():
                world.scheduler.abort_request(abort)


LEAVES: dict[str, Callable[[Any, Any], Any]] = {
    "aborted": lambda world, req: world.abort(req),
    "timed out": times_out,
    "rejected for another": lambda world, _: world.submit(range(9000, 9100), max_new=2, priority=9),
    "lost by a preemption": lambda world, req: world.scheduler.waiting_queue.remove(req),
}


@pytest.mark.parametrize("way", LEAVES)
def test_traps_12_and_13_the_copy_goes_with_its_request(way: str) -> None:
    first = {"priority": True, "queue_limit": 1} if way == "rejected for another" else {}
    world, req = retracted(510, **first)
    assert serving(world).count == 1
    LEAVES[way](world, req)
    assert req not in world.waiting
    world.step()
    nothing_is_held(world)
    assert first or world.flush()


def test_trap_12_the_queues_limit_frees_the_copy() -> None:
    """A retracted request that finds the queue full is answered at once, with its copy made."""
    world, req = retracted(510, queue_limit=1, others=1)
    assert req not in world.waiting
    world.step()
    nothing_is_held(world)


def test_other_weights_make_a_copy_stale() -> None:
    world, _ = retracted(510)
    with changing_weights():
        pass
    assert world.step().extend_lens == [511]
    assert dict(serving(world).host.counters.fallbacks) == {"StaleWeights": 1}
    over(world)


@pytest.mark.parametrize("others", [0, 5])
def test_who_waits_keeps_its_copy_and_forbids_a_flush(others: int) -> None:
    world, req = retracted(510)
    assert not world.flush()
    for number in range(others):
        world.submit(range(9000 + 100 * number, 9050 + 100 * number), max_new=2)
    forget(world)
    over(world)
    assert serving(world).host.counters.loads == 1 and req.finished() and world.flush()
