"""Copies that are not loaded: their request was aborted, the memory handed back, or the weights changed meanwhile."""

from __future__ import annotations

from itertools import repeat
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
from retracting import is_503
from server_fixture import RECOMPUTES_FAKE_TRANSFERS, WEIGHT_SOURCES, World, only_new, update_weights

# --------------------------------------------------------------------------- aborts and dropped requests


def test_abort_releases_the_copy_at_once() -> None:
    world = World()
    reqs = [world.admit(n, rid) for n, rid in ((130, "a1"), (257, "b1"), (300, "a2"))]
    copies = [world.park(req) for req in reqs]
    world.abort("a")
    assert [copy.released for copy in copies] == [True, False, True]
    assert sorted(world.aborted) == ["a1", "a2"]
    assert world.queue.retracted_queue == [reqs[1]]
    assert world.host.memory.leaks == 0
    assert world.resume() == [reqs[1]]
    world.nothing_held()


@pytest.mark.parametrize("call", ["abort", "pause"])
def test_loads_are_written_before_their_pages_go_elsewhere(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was just resumed may be dropped while its load is queued."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput
    from sglang.srt.managers.scheduler import Scheduler

    world = World()
    req = world.admit(130, "a1")
    world.park(req)
    world.scheduler.waiting_queue = world.resume()
    free: list[int] = []
    monkeypatch.setattr(world.host, "wait_for_loads", lambda: free.append(world.allocator.full_available_size()))
    world.scheduler._pause_started_at = None
    world.scheduler.beam_coordinator = SimpleNamespace(retire_group=lambda req: None)
    world.scheduler._release_aborted_request = lambda req: None
    if call == "abort":
        world.abort("a1")
        assert world.scheduler.waiting_queue == [] and world.allocator.full_available_size() > free[0]
    else:
        Scheduler.pause_generation(world.scheduler, PauseGenerationReqInput(mode="in_place"))
    assert len(free) == 1


@only_new
def test_the_last_request_is_not_dropped_before_its_load_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborted in the pass that resumed it, without a save that would have waited."""
    world = World()
    req = world.admit(257, "last")
    world.park(req)
    world.resume()
    free: list[int] = []
    monkeypatch.setattr(world.host, "wait_for_loads", lambda: free.append(world.allocator.full_available_size()))
    _, _, aborted = world.retract_decode([req], repeat(False))
    assert aborted == [req] and len(free) == 1 and world.allocator.full_available_size() > free[0]


@pytest.mark.parametrize("aborted", [True, False])
def test_what_ends_right_after_its_resume_is_written_first(aborted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborted while it ran, retracted in the same pass: its end comes with its resume, and no forward between them."""
    from sglang.srt.managers.scheduler_components import batch_result_processor as module

    world = World()
    world.scheduler.running_batch.reqs = [req] = [world.admit(130, "a1")]
    req.sampling_params.normalize(None)
    world.scheduler.collect_inflight_reqs = lambda: {req}
    if aborted:
        world.abort("a1")
    world.park(req)
    world.scheduler.running_batch.reqs = []
    assert world.resume() == [req] and (req.to_finish is not None) is aborted
    held = world.allocator.full_available_size()
    free: list[int] = []
    monkeypatch.setattr(world.host, "wait_for_loads", lambda: free.append(world.allocator.full_available_size()))
    monkeypatch.setattr(module, "get_disagg", lambda: SimpleNamespace(disaggregation_decode_enable_radix_cache=False))
    monkeypatch.setattr(module, "get_memory", lambda: SimpleNamespace(enable_hisparse=False))
    req.time_stats = SimpleNamespace(set_decode_prebuilt_finish_time=lambda: None, set_quick_finish_time=lambda: None)
    processor = object.__new__(module.SchedulerBatchResultProcessor)
    for name, value in {
        "disaggregation_mode": world.scheduler.disaggregation_mode, "token_to_kv_pool_allocator": world.allocator,
        "tree_cache": world.tree, "output_streamer": world.scheduler.output_streamer,
    }.items():  # fmt: skip
        object.__setattr__(processor, name, value)
    beside = SimpleNamespace(  # another one that has just resumed, and goes on
        to_finish=None, time_stats=req.time_stats, update_finish_state=lambda: None, finished=lambda: False
    )
    processor.process_batch_result_prebuilt(SimpleNamespace(reqs=[req, beside], return_logprob=False))
    assert free == ([held] if aborted else []), "a resume alone waits for nothing"
    assert (world.allocator.full_available_size() > held) is aborted


def test_a_server_without_a_decode_queue_aborts_as_the_engine_does() -> None:
    from sglang_dsv4.engine.aborting import abort_request

    called: list[Any] = []
    for scheduler in (SimpleNamespace(), SimpleNamespace(disagg_decode_prealloc_queue=None)):
        abort_request(lambda *args: called.append(args), scheduler, "request")
        assert called.pop() == (scheduler, "request")


# ---------------------------------------------------------------------------------- weights, trap 14


def stale_world(source: str, fail: bool = False, **kwargs: Any) -> tuple[World, Any, Any]:
    world = World()
    req = world.admit(300, **kwargs)
    copy = world.park(req)
    update_weights(source, fail)
    return world, req, copy


@pytest.mark.parametrize("fail", (False, True))
@pytest.mark.parametrize("source", WEIGHT_SOURCES)
def test_a_copy_of_other_weights_is_recomputed(source: str, fail: bool) -> None:
    world, req, copy = stale_world(source, fail)
    last = req.output_ids[-1]
    assert world.resume() == []
    assert copy.released and world.copy_of(req) is None
    assert world.host.counters.loads == 0
    assert world.host.counters.fallbacks == {"StaleWeights": 1}
    assert world.rebootstrapped == [req] and world.queue.retracted_queue == []
    assert req.pd_rebootstrap_in_progress is True
    assert req.pd_rebootstrap_forced_output_id == last
    world.nothing_held()


@pytest.mark.parametrize("kind", ("multimodal", "fake"))
def test_a_stale_request_that_cannot_be_recomputed_is_answered_503(kind: str) -> None:
    world, req, copy = stale_world("disk", **{kind: True})
    assert world.resume() == [] and world.queue.retracted_queue == []
    assert copy.released
    assert world.host.counters.fallbacks == {"StaleWeights": 1}
    if kind == "fake" and RECOMPUTES_FAKE_TRANSFERS:
        assert world.rebootstrapped == [req]
    else:
        assert (world.streamed, world.rebootstrapped) == ([req], [])
        assert is_503(req.finished_reason)
    world.nothing_held()


def test_only_stale_copies_are_dropped() -> None:
    world = World()
    old, new = world.admit(130, "old"), world.admit(257, "new")
    world.park(old)
    update_weights("ipc")
    oracle.fill(world.pool, seed=1)
    expected = world.read(new)
    world.park(new)
    oracle.fill(world.pool, seed=2)
    assert world.resume() == [new]
    oracle.compare(expected, world.read(new))
    assert world.rebootstrapped == [old]
    world.nothing_held()
