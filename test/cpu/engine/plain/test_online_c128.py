"""With online compression a step writes the one state row of a request in place.

A copy beside a step in flight is one token late, though its bytes are valid: only the next compressed row tells. Here
the row's bytes follow from all tokens in it, and each forward compares them before it reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from plain_world import came_back, nothing_is_held, serving, small_world
from sglang.srt.managers import scheduler as engine
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools

from sglang_dsv4.engine import memory
from sglang_dsv4.testing.forward import WrongRows

Loop = Callable[[Any], None]


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "ONLINE_C128", True)


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the engine retract a request every so many steps, as for its own tests; 0: no longer."""

    def set_interval(steps: int) -> None:
        monkeypatch.setattr(engine, "TEST_RETRACT", steps > 0)
        monkeypatch.setattr(engine, "TEST_RETRACT_INTERVAL", steps or 1)

    return set_interval


def in_the_loop(world: Any, passes: int, loop: Loop = Scheduler.event_loop_overlap) -> None:
    """Runs so many passes of the engine's own overlap loop."""
    scheduler, left = world.scheduler, iter(range(passes))

    def ingest() -> None:
        scheduler.gracefully_exit = next(left, None) is None
        if scheduler.gracefully_exit:
            scheduler._engine_paused = True  # the pass ends here

    vars(scheduler).update(
        gracefully_exit=False, ingest_requests=ingest, run_batch=lambda batch: run(world, batch), on_idle=lambda: None,
        _apply_war_barrier=lambda: None, launch_batch_sample_if_needed=lambda *_: None,
        _record_scheduler_state_for_paused_engine=lambda: None,
    )  # fmt: skip
    begun = scheduler.result_queue, scheduler.last_batch
    assert not begun[0] and begun[1] is None, "the engine's loop begins with nothing in flight"
    loop(scheduler)
    scheduler._engine_paused = False


def run(world: Any, batch: Any) -> Any:
    world.scheduler.forward_ct += 1
    return world._forward(batch)


def settle(world: Any) -> None:
    """Takes what is in flight, as a pass without a batch does."""
    while world.scheduler.result_queue:
        world.scheduler.process_batch_result(*world.scheduler.result_queue.popleft())
    world.scheduler.last_batch = None


def step_to(world: Any, req: Any, tokens: int) -> None:
    """Steps until so many tokens of ``req`` are known to be computed; each forward checks the rows that it reads."""
    while req.seqlen - 1 < tokens:
        world.step()


@pytest.mark.parametrize("tokens", [384, 385, 386, 510, 511])
def test_a_copy_has_the_row_of_its_own_tokens(force: Callable[[int], None], tokens: int) -> None:
    world = small_world(overlap=True, radix=False)
    world.submit(range(5000, 5010), max_new=12)
    req = world.submit(range(tokens - 4), max_new=10)
    step_to(world, req, tokens - 1)
    force(1)
    world.step()
    force(0)
    saved = serving(world).saved_of(req)
    assert saved is not None, dict(serving(world).host.counters.fallbacks)
    assert saved.copy.tokens == tokens, "the token in flight is kept"
    came_back(world, req)
    world.run(check=False)
    assert len(req.output_ids) == 10
    nothing_is_held(world)


def test_the_engines_loop_goes_on_after_each_retract(force: Callable[[int], None]) -> None:
    """It does not look for the result that was taken, and every request gets its tokens."""
    world = small_world(overlap=True, radix=False)
    reqs = [world.submit(range(1000 * i, 1000 * i + 100 + 90 * i), max_new=40) for i in range(3)]
    force(5)
    in_the_loop(world, 90)
    assert all(req.finished() for req in reqs)
    counters = serving(world).host.counters
    assert (counters.loads > 5, dict(counters.fallbacks)) == (True, {})
    nothing_is_held(world)


def test_the_loop_of_a_decode_server_goes_on_too(force: Callable[[int], None]) -> None:
    world = small_world(overlap=True, radix=False)
    reqs = [world.submit(range(1000 * i, 1000 * i + 300), max_new=40) for i in range(3)]
    step_to(world, reqs[-1], 303)
    settle(world)
    queue = SimpleNamespace(prefetch_prefill_dp_rank_queries=lambda: None)
    vars(world.scheduler).update(
        disagg_decode_prealloc_queue=queue, process_decode_queue=lambda: None, get_new_prebuilt_batch=lambda _: None
    )
    force(4)
    in_the_loop(world, 15, Scheduler.event_loop_overlap_disagg_decode)
    force(0)
    assert serving(world).host.counters.saves == 2, "the engine keeps one request"
    settle(world)
    world.run(check=False)
    assert all(len(req.output_ids) == 40 for req in reqs)
    nothing_is_held(world)


def test_a_request_that_ends_with_the_result_spares_the_retract(monkeypatch: pytest.MonkeyPatch) -> None:
    world = small_world(overlap=True)
    world.scheduler.enable_skip_finishing_decode = False  # as in a decode server's loop
    short, *others = (world.submit(range(1000 * i, 1000 * i + 300), max_new=(10, 14, 14)[i]) for i in range(3))
    step_to(world, short, 308)
    monkeypatch.setattr(ScheduleBatch, "check_decode_mem", lambda batch, selected_indices=None: len(batch.reqs) < 3)
    world.step()
    assert short.finished()
    monkeypatch.undo()
    monkeypatch.setattr(pools, "ONLINE_C128", True)
    world.run(check=False)
    assert [req.retraction_count for req in others] == [0, 0]


def test_the_last_request_may_end_with_the_result(force: Callable[[int], None]) -> None:
    world = small_world(overlap=True)
    world.scheduler.enable_skip_finishing_decode = False
    req = world.submit(range(300), max_new=10)
    step_to(world, req, 308)
    force(1)
    assert world.step() is None
    assert req.finished()
    nothing_is_held(world)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preemption_with_a_step_in_flight_makes_no_copy(overlap: bool) -> None:
    world = small_world(priority=True, running=1, overlap=overlap, radix=False)
    low = world.submit(range(400), max_new=20, priority=1)
    step_to(world, low, 405)
    high = world.submit(range(1000, 1200), max_new=5, priority=9)
    world.step()
    assert low.retraction_count == 1
    counters = serving(world).host.counters
    assert (counters.saves, dict(counters.fallbacks)) == ((0, {"StepInFlight": 1}) if overlap else (1, {}))
    world.run(check=False)
    assert high.finished()
    assert len(low.output_ids) == 20
    nothing_is_held(world)


def test_a_late_copy_is_found_though_its_bytes_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge of the tests above is shown a copy that is one token late."""
    monkeypatch.setenv("DSV4_VERIFY", "1")
    monkeypatch.setattr(memory, "steps_in_flight", lambda *_: 0)
    world = small_world(overlap=True, radix=False)
    req = world.submit(range(400), max_new=20)
    step_to(world, req, 405)
    world.retract(req)
    with pytest.raises(WrongRows, match=r"r0, 405 tokens: c128_online_state, buffer \d, position 404"):
        came_back(world, req)
    assert serving(world).host.counters.verified == 1
