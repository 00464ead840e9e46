"""A waiting request leaves in many ways, and its copy goes with it."""

from __future__ import annotations

from typing import Any

import pytest
from plain_world import forget, nothing_is_held, run_to, serving, small_world
from sglang.srt.environ import envs

from sglang_dsv4.engine.weights import changing_weights


def waiting(**way: Any) -> tuple[Any, Any]:
    """A world, and its one request, which waits with a copy."""
    world = small_world(**way)
    req = world.submit(range(500), max_new=30, priority=1 if way.get("priority") else None)
    run_to(world, req, 510)
    world.retract(req)
    assert serving(world).count == 1
    return world, req


def test_trap_12_an_abort_frees_the_copy() -> None:
    world, req = waiting()
    world.abort(req)
    world.step()
    nothing_is_held(world)
    assert world.flush()


def test_trap_12_the_waiting_timeout_frees_the_copy() -> None:
    world, req = waiting()
    req.time_stats.wait_queue_entry_time = 1e-9
    with envs.SGLANG_REQ_WAITING_TIMEOUT.override(0.001):
        if hasattr(world.scheduler, "_abort_on_waiting_timeout"):
            world.scheduler._abort_on_waiting_timeout()
        else:
            for abort in world.scheduler._poll_timeout_aborts():
                world.scheduler.abort_request(abort)
    assert req not in world.waiting
    world.step()
    nothing_is_held(world)


def test_trap_12_the_queues_limit_frees_the_copy() -> None:
    """A retracted request that finds the queue full is answered at once, with its copy made."""
    world = small_world(queue_limit=1)
    req = world.submit(range(500), max_new=30)
    run_to(world, req, 510)
    world.submit(range(9000, 9100), max_new=2)
    world.retract(req)
    assert req not in world.waiting
    world.step()
    nothing_is_held(world)


def test_trap_12_a_rejection_by_priority_frees_the_copy() -> None:
    world, req = waiting(priority=True, queue_limit=1)
    world.submit(range(9000, 9100), max_new=2, priority=9)
    assert req not in world.waiting
    world.step()
    nothing_is_held(world)


def test_trap_13_whoever_is_lost_by_the_engine_leaves_no_copy() -> None:
    """A preempted request is not lost in a pass that admits nobody."""
    world, req = waiting()
    world.scheduler.waiting_queue.remove(req)
    world.step()
    nothing_is_held(world)


def test_other_weights_make_a_copy_stale() -> None:
    world, _ = waiting()
    forget(world)
    with changing_weights():
        pass
    batch = world.step()
    assert batch.extend_lens == [511]
    assert dict(serving(world).host.counters.fallbacks) == {"StaleWeights": 1}
    nothing_is_held(world)
    world.run()


def test_a_flush_is_refused_while_a_request_waits() -> None:
    world, _ = waiting()
    assert not world.flush()
    world.run()
    assert world.flush()
    nothing_is_held(world)


@pytest.mark.parametrize("others", [0, 5])
def test_the_sweep_keeps_those_who_wait(others: int) -> None:
    world, req = waiting()
    for number in range(others):
        world.submit(range(9000 + 100 * number, 9050 + 100 * number), max_new=2)
    forget(world)
    world.run()
    assert serving(world).host.counters.loads == 1
    nothing_is_held(world)
    assert req.finished()
