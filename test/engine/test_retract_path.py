"""The engine's own retraction, driven end to end: release_req, the queue, the resume, and every way out of it."""

from __future__ import annotations

from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from engine import world as worlds
from engine.world import ADAPTER, OLD, Recorder, World, only_new, only_old, update_weights

pytestmark = pytest.mark.cpu

LENGTHS = (3, 130, 257, 511, 1000)
SOURCES = ("disk", "distributed", "tensor", "ipc")
ONE_COPY = {"DSV4_HOST_COPIES": "1"}
FEW_BLOCKS = {"DSV4_HOST_GB": "0.002"}


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENABLED", "HOST_GB", "HOST_COPIES", "TRANSFER", "VERIFY"):
        monkeypatch.delenv(f"DSV4_{name}", raising=False)


def world_with(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], **kwargs: Any) -> World:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return World(**kwargs)


def crowded(monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> tuple[World, Any]:
    """A server whose only copy is taken, and a running request that will find no room."""
    world = world_with(monkeypatch, ONE_COPY)
    world.park(world.admit(100, "first"))
    return world, world.admit(300, "second", **kwargs)


def is_503(reason: Any) -> bool:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return isinstance(reason, FINISH_ABORT) and int(reason.status_code) == 503


def nothing(before: dict[oracle.BufferKey, torch.Tensor]) -> dict[oracle.BufferKey, torch.Tensor]:
    """Masks that allow no change."""
    return {key: torch.zeros_like(buffer, dtype=torch.bool) for key, buffer in before.items()}


# ------------------------------------------------------------------------------------------ round trip


@pytest.mark.parametrize("overlap", (False, True))
@pytest.mark.parametrize("n", LENGTHS)
def test_a_request_comes_back_exactly(n: int, overlap: bool) -> None:
    world = World()
    world.admit(40, "neighbour")  # so that neither the first page nor the first slot is used
    req = world.admit(n, overlap=overlap)
    oracle.fill(world.pool, seed=n)
    expected, old_slots, old_slot = world.read(req), world.slots(req), world.slot(req)
    before = oracle.snapshot(world.pool)
    world.retract(req)
    oracle.assert_only_changed(before, world.pool, nothing(before))
    assert world.copy_of(req).tokens == n

    taker = world.admit(n + 1, "taker")
    oracle.fill(world.pool, seed=n + 7)
    world.requeue(req)
    before = oracle.snapshot(world.pool)
    assert world.resume() == [req]

    assert world.slot(req) != old_slot
    assert set(world.slots(req).tolist()).isdisjoint(world.slots(taker).tolist())
    assert not torch.equal(world.slots(req), old_slots)
    oracle.compare(expected, world.read(req))
    allowed = oracle.may_change(world.pool, world.slots(req), n, world.slot(req))
    oracle.assert_only_changed(before, world.pool, allowed)
    assert world.copy_of(req) is None
    assert world.host.counters.saves == world.host.counters.loads == 1
    world.nothing_held()


@pytest.mark.parametrize("n", (127, 128, 255, 256, 512))
def test_seqlen_minus_one_is_saved_while_a_forward_is_in_flight(n: int) -> None:
    world = World()
    req = world.admit(n, overlap=True)
    oracle.fill(world.pool, seed=n)
    assert world.committed(req) == n + 1, "the trap: the committed length counts the token in flight"
    expected = world.read(req)
    copy = world.park(req)
    assert copy.tokens == n
    oracle.fill(world.pool, seed=n + 1)
    assert world.resume() == [req]
    assert len(world.slots(req)) == n == world.committed(req)
    oracle.compare(expected, world.read(req))


@pytest.mark.parametrize("order", ((4, 2, 0, 3, 1), (1, 0, 4, 3, 2)))
def test_several_requests_in_another_order(order: tuple[int, ...]) -> None:
    world = World()
    reqs = [world.admit(n, f"r{n}", overlap=bool(i % 2)) for i, n in enumerate(LENGTHS)]
    oracle.fill(world.pool, seed=5)
    expected = [world.read(req) for req in reqs]
    for i in reversed(order):
        world.retract(reqs[i])
    assert world.host.memory.copies == len(LENGTHS)
    world.admit(600, "taker")
    oracle.fill(world.pool, seed=6)
    for i in order:
        world.requeue(reqs[i])
    assert world.resume() == [reqs[i] for i in order]
    for req, rows in zip(reqs, expected, strict=True):
        oracle.compare(rows, world.read(req))
    world.nothing_held()


def test_a_request_without_memory_waits_with_its_copy() -> None:
    world = World()
    req = world.admit(1000)
    oracle.fill(world.pool, seed=1)
    expected = world.read(req)
    copy = world.park(req)
    takers = [world.admit(1000, f"t{i}") for i in range(5)]
    assert world.resume() == []
    assert world.queue.retracted_queue == [req]
    assert not copy.released
    oracle.fill(world.pool, seed=2)
    for taker in takers[:2]:
        world.retract(taker, offload_kv=False)
    assert world.resume() == [req]
    oracle.compare(expected, world.read(req))


def test_only_the_asked_requests_are_resumed() -> None:
    world = World()
    reqs = [world.admit(n, f"r{n}") for n in (130, 257)]
    copies = [world.park(req) for req in reqs]
    assert world.queue.resume_retracted_reqs(["r257"]) == [reqs[1]]
    assert (copies[0].released, copies[1].released) == (False, True)
    assert world.queue.resume_retracted_reqs(rids_to_check=["r130"]) == [reqs[0]]


def test_retracted_twice() -> None:
    world = World()
    req = world.admit(250)
    oracle.fill(world.pool, seed=1)
    world.park(req)
    world.admit(250, "taker")
    assert world.resume() == [req]
    for _ in range(10):
        world._decode(req, req.seqlen - 1, 1)
        req.output_ids.append(9)
    oracle.fill(world.pool, seed=2)
    expected = world.read(req)
    copy = world.park(req)
    assert copy.tokens == 260
    oracle.fill(world.pool, seed=3)
    assert world.resume() == [req]
    oracle.compare(expected, world.read(req))
    assert req.retraction_count == 2
    world.nothing_held()


def test_verify_setting_reads_back_through_the_engines_path(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with(monkeypatch, {"DSV4_VERIFY": "1"})
    req = world.admit(511, overlap=True)
    oracle.fill(world.pool, seed=1)
    world.park(req)
    world.admit(511, "taker")
    assert world.resume() == [req]
    assert world.host.counters.verified == 1


def test_recompute_by_the_operator_makes_no_copy() -> None:
    world = World()
    req = world.admit(300)
    world.retract(req, offload_kv=False)  # pause_generation(mode="retract")
    assert world.copy_of(req) is None
    assert world.host.counters.saves == 0


def test_a_copy_is_queued_without_rebootstrap() -> None:
    world = World()
    req = world.admit(300)
    tokens = req.output_ids.tolist()
    world.park(req)
    assert world.queue.retracted_queue == [req]
    assert req.output_ids.tolist() == tokens, "the boundary token was popped"
    assert not getattr(req, "pd_rebootstrap_in_progress", False)
    assert getattr(req, "pd_rebootstrap_forced_output_id", None) is None
    assert world.rebootstrapped == []


def test_a_held_rebootstrap_passes_through() -> None:
    world = World()
    req = world.admit(300)
    world.retract(req, offload_kv=False)
    req.pd_rebootstrap_forced_output_id = req.output_ids.pop()
    req.pd_rebootstrap_in_progress = True
    world.queue.hold_rebootstrap(req)
    world.queue.enqueue_held_rebootstrap()
    assert world.rebootstrapped == [req]
    assert req.seqlen == 300


@pytest.mark.parametrize("multimodal", (False, True))
def test_a_multimodal_request_resumes_from_its_copy(multimodal: bool) -> None:
    world = World()
    req = world.admit(257, multimodal=multimodal)
    oracle.fill(world.pool, seed=1)
    expected = world.read(req)
    assert world.retract(req) in (None, True)
    oracle.fill(world.pool, seed=2)
    world.requeue(req)
    assert world.resume() == [req]
    oracle.compare(expected, world.read(req))


def test_a_refused_request_gives_its_copy_back() -> None:
    world = World()
    req = world.admit(300)
    world.retract(req)
    world.queue.max_total_num_tokens = 10
    world.requeue(req)
    assert world.streamed == [req]
    assert world.queue.retracted_queue == []
    world.nothing_held()


def test_a_request_with_input_embeds_does_not_stop_the_server() -> None:
    world = World()
    req = world.admit(300, input_embeds=[[0.0]])
    world.retract(req)
    world.requeue(req)
    world.resume()


# ---------------------------------------------------------------------------------------- no room left


@pytest.mark.parametrize("settings", (ONE_COPY, FEW_BLOCKS))
def test_without_room_the_prefill_server_recomputes(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]) -> None:
    world = world_with(monkeypatch, settings)
    if settings is FEW_BLOCKS:
        assert world.host.memory.blocks_for(1000) != world.host.memory.blocks_for(3)
        first = world.admit(3, "first")
    else:
        first = world.admit(500, "first")
    copy = world.park(first)
    req = world.admit(1000, "second")
    tokens = req.output_ids.tolist()
    assert world.retract(req) in (None, True)
    assert world.copy_of(req) is None
    assert world.host.counters.fallbacks == {"HostMemoryExhausted": 1}

    world.requeue(req)
    assert world.rebootstrapped == [req]
    assert req.pd_rebootstrap_in_progress is True
    assert req.pd_rebootstrap_forced_output_id == tokens[-1]
    assert req.output_ids.tolist() == tokens[:-1]
    assert world.queue._pre_alloc_fill_len(req) == 1000
    assert world.queue.retracted_queue == [first]
    assert [entry.req for entry in world.queue.pending_reqs] == [req]
    assert not copy.released

    assert world.resume() == [first]
    world.nothing_held()
    third = world.admit(130, "third")
    world.park(third)
    assert world.host.counters.fallbacks == {"HostMemoryExhausted": 1}


def test_the_fallback_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    world, req = crowded(monkeypatch)
    world.retract(req)
    world.retract(world.admit(300, "third"))
    lines = [r.getMessage() for r in caplog.records if "no host copy" in r.getMessage()]
    assert len(lines) == 1
    assert "DSV4_HOST_COPIES" in lines[0]
    assert world.host.counters.fallbacks == {"HostMemoryExhausted": 2}


def test_a_copy_left_from_before_is_released_first(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with(monkeypatch, ONE_COPY)
    req = world.admit(300)
    if OLD:
        req.offload_kv_cache(world.table, world.allocator)
    else:
        from sglang.srt.mem_cache import common

        common.backup_kv_cache(req, world.tree, world.table, world.allocator, "cpu_tensor")
    old = world.copy_of(req)
    world.retract(req)
    assert old.released
    assert world.copy_of(req).tokens == 300
    assert world.host.memory.copies == 1
    assert not world.host.counters.fallbacks


@pytest.mark.parametrize("saved", (True, False))
def test_the_forward_in_flight_is_drained_either_way(monkeypatch: pytest.MonkeyPatch, saved: bool) -> None:
    from sglang_dsv4.engine import server

    drained = Recorder()
    monkeypatch.setattr(server, "drain", drained)
    world, req = crowded(monkeypatch)
    if saved:
        assert world.resume()
    before = len(drained.calls)
    world.retract(req)
    assert (world.copy_of(req) is not None) is saved
    assert len(drained.calls) == before + 1


# --------------------------------------------------------------------------------------- retract_decode


def outputs(world: World, lengths: tuple[int, ...], **kwargs: dict[str, Any]) -> list[Any]:
    """Running requests in the order in which the engine retracts them: fewest output tokens first."""
    return [world.admit(n, f"r{i}", prompt=n - 2 - i, **kwargs.get(f"r{i}", {})) for i, n in enumerate(lengths)]


def test_retract_decode_keeps_what_fits() -> None:
    world = World()
    reqs = outputs(world, (130, 257, 300))
    retracted, _, to_abort = world.retract_decode(reqs, chain([False], repeat(True)))
    assert retracted == reqs[:2]
    assert to_abort == []
    assert [world.copy_of(req).tokens for req in retracted] == [130, 257]


@pytest.mark.parametrize("kind", ("multimodal", "fake"))
def test_what_cannot_be_recomputed_is_answered_503(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "fake" and not OLD:
        pytest.skip("0.5.22 and later send it through their own rebootstrap")
    world = world_with(monkeypatch, ONE_COPY)
    reqs = outputs(world, (130, 257, 300, 310), r1={kind: True})
    retracted, ratio, to_abort = world.retract_decode(reqs, chain([False, False], repeat(True)))
    assert retracted == [reqs[0], reqs[2]]
    assert to_abort == [reqs[1]]
    assert 0 <= ratio <= 1
    assert is_503(reqs[1].to_finish)
    if OLD:
        assert "DSV4_HOST_GB" in reqs[1].to_finish.message
    assert reqs[0].to_finish is None
    assert reqs[2].to_finish is None
    for req in retracted:
        world.requeue(req)
    assert world.queue.retracted_queue == [reqs[0]]
    assert world.rebootstrapped == [reqs[2]]


@pytest.mark.parametrize("kind", ("multimodal", "fake"))
def test_with_room_nothing_is_aborted(kind: str) -> None:
    world = World()
    reqs = outputs(world, (130, 257, 300), r0={kind: True})
    retracted, _, to_abort = world.retract_decode(reqs, chain([False], repeat(True)))
    assert retracted == reqs[:2]
    assert to_abort == []


def test_the_copy_of_the_last_aborted_request_is_released() -> None:
    world = World()
    reqs = outputs(world, (130, 257))
    retracted, _, to_abort = world.retract_decode(reqs, repeat(False))
    assert retracted == reqs[:1]
    assert to_abort == reqs[1:]
    assert world.copy_of(reqs[1]) is None
    assert world.host.memory.copies == 1
    world.host.memory.check_integrity()
    world.requeue(reqs[0])
    world.resume()
    world.nothing_held()


@only_old
def test_retract_decode_outside_a_decode_server_is_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    world, req = crowded(monkeypatch, multimodal=True)
    args = SimpleNamespace(disaggregation_mode="null")
    assert ADAPTER.retract_decode(([req], 0.5, []), SimpleNamespace(), args) is None
    del world


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


def test_abort_of_another_request_keeps_the_copies() -> None:
    world = World()
    req = world.admit(130, "a1")
    copy = world.park(req)
    world.abort("zzz")
    assert not copy.released
    assert world.queue.retracted_queue == [req]


def test_abort_before_there_is_a_queue() -> None:
    world = World()
    world.scheduler.disagg_decode_prealloc_queue = SimpleNamespace(queue=[], retracted_queue=[])
    world.abort("r")
    if OLD:
        from sglang.srt.disaggregation.utils import DisaggregationMode

        del world.scheduler.disagg_decode_prealloc_queue
        world.scheduler.disaggregation_mode = DisaggregationMode.NULL
        world.abort("r")
    assert world.aborted == []


def test_release_memory_occupation_releases_copies() -> None:
    world = World()
    copies = [world.park(world.admit(n, f"r{n}")) for n in (130, 257)]
    world.queue.release_memory_occupation()
    assert all(copy.released for copy in copies)
    assert world.queue.retracted_queue == []
    world.nothing_held()


# ---------------------------------------------------------------------------------- weights, trap 14


def stale_world(source: str, fail: bool = False, **kwargs: Any) -> tuple[World, Any, Any]:
    world = World()
    req = world.admit(300, **kwargs)
    copy = world.park(req)
    update_weights(source, fail)
    return world, req, copy


@pytest.mark.parametrize("fail", (False, True))
@pytest.mark.parametrize("source", SOURCES)
def test_a_copy_of_other_weights_is_recomputed(source: str, fail: bool) -> None:
    world, req, copy = stale_world(source, fail)
    last = req.output_ids[-1]
    assert world.resume() == []
    assert copy.released
    assert world.copy_of(req) is None
    assert world.host.counters.loads == 0
    assert world.host.counters.fallbacks == {"StaleWeights": 1}
    assert world.rebootstrapped == [req]
    assert req.pd_rebootstrap_in_progress is True
    assert req.pd_rebootstrap_forced_output_id == last
    assert world.queue.retracted_queue == []
    world.nothing_held()


@only_new
def test_weights_written_by_rdma_make_copies_stale() -> None:
    world, req, copy = stale_world("rdma")
    world.resume()
    assert copy.released
    assert world.host.counters.fallbacks == {"StaleWeights": 1}
    assert world.rebootstrapped == [req]


@pytest.mark.parametrize("kind", ("multimodal", "fake"))
def test_a_stale_request_that_cannot_be_recomputed_is_answered_503(kind: str) -> None:
    world, req, copy = stale_world("disk", **{kind: True})
    assert world.resume() == []
    assert copy.released
    assert world.host.counters.fallbacks == {"StaleWeights": 1}
    if kind == "fake" and not OLD:
        assert world.rebootstrapped == [req]
    else:
        assert world.streamed == [req]
        assert is_503(req.finished_reason)
        assert world.rebootstrapped == []
    assert world.queue.retracted_queue == []
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


def test_a_stale_copy_is_not_loaded_even_past_the_queue() -> None:
    from sglang_dsv4.errors import StaleWeights

    world, req, copy = stale_world("tensor")
    req.is_retracted = False
    world.queue._pre_alloc(req)
    before = oracle.snapshot(world.pool)
    with pytest.raises(StaleWeights):
        req.load_kv_cache(world.table, world.allocator)
    oracle.assert_only_changed(before, world.pool, nothing(before))
    assert not copy.released


# ------------------------------------------------------------------------- 0.5.22 and later: the choice


@only_new
def test_backup_none_keeps_meaning_abort() -> None:
    world = World(backup="none")
    req = world.admit(300)
    assert world.retract(req) is False
    assert world.copy_of(req) is None
    assert world.host is None, "no host memory is reserved for a choice that makes no copies"
    reqs = outputs(world, (130, 257, 300))
    retracted, _, to_abort = world.retract_decode(reqs, chain([False], repeat(True)))
    assert (retracted, to_abort) == ([], reqs[:2])
    assert all(is_503(req.to_finish) for req in to_abort)


@only_new
def test_host_pool_is_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache import common

    world = World(backup="host_pool")
    req = world.admit(300)
    handle = common.RetractionBackup()
    tree = SimpleNamespace(backup_kv_cache=Recorder(handle), discard_kv_cache_backup=Recorder())
    with monkeypatch.context() as patch:
        patch.setattr(common, "dsv4_needs_rebootstrap", lambda allocator: False)
        assert common.backup_kv_cache(req, tree, world.table, world.allocator, "host_pool") is True
    assert tree.backup_kv_cache.calls == [((req,), {})]
    assert req.kv.retraction_backup is handle
    common.discard_kv_cache_backup(req, tree, "host_pool")
    assert tree.discard_kv_cache_backup.calls == [((handle,), {})]
    assert req.kv.retraction_backup is None
    assert world.retract(req) is True
    assert world.copy_of(req) is None
    assert world.host is None
    world.requeue(req)
    assert world.rebootstrapped == [req]


@only_new
def test_multimodal_without_a_copy_is_not_backed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world, req = crowded(monkeypatch, multimodal=True)
    assert world.retract(req) is False
    assert world.host.counters.fallbacks == {"HostMemoryExhausted": 1}


@only_new
def test_the_engines_question_has_its_own_answer_outside_add(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation import decode
    from sglang.srt.mem_cache import common

    world = World()
    req, other = world.admit(300), world.admit(130, "other")
    answers: list[bool] = []
    check = world.queue._check_if_req_exceed_kv_capacity

    def spy(asked: Any) -> bool:
        answers.append(decode.dsv4_needs_rebootstrap(world.allocator))
        return check(asked)

    world.queue._check_if_req_exceed_kv_capacity = spy
    world.park(req)
    world.retract(other, offload_kv=False)
    world.requeue(other)
    assert answers == [False, True]
    assert common.dsv4_needs_rebootstrap(world.allocator) is True

    def broken(asked: Any) -> bool:
        raise RuntimeError("broken")

    world.queue.retracted_queue.clear()
    world.queue._check_if_req_exceed_kv_capacity = broken
    with pytest.raises(RuntimeError, match="broken"):
        world.requeue(req)
    assert decode.dsv4_needs_rebootstrap(world.allocator) is True


# ------------------------------------------------------------------------------ a server that is refused


def test_a_refused_server_runs_the_engines_original() -> None:
    from sglang_dsv4.engine.server import host_of

    world = World(refuse="a layout from tomorrow")
    assert world.host is None
    assert world.pool.refusal == "a layout from tomorrow"
    assert host_of(world.allocator) is None
    req = world.admit(300)
    if OLD:
        with pytest.raises(NotImplementedError, match="a layout from tomorrow"):
            world.retract(req)
        with pytest.raises(NotImplementedError, match="a layout from tomorrow"):
            req.kv_cache_cpu = object()
            req.load_kv_cache(world.table, world.allocator)
        world.queue.retracted_queue.append(req)
        world.abort("r")
        assert world.aborted == ["r"]
        assert not hasattr(req, "kv_cache_cpu")
        return
    assert world.retract(req) is True
    assert world.copy_of(req) is None
    world.requeue(req)
    assert world.rebootstrapped == [req]
    assert world.retract(world.admit(130, "image", multimodal=True)) is False
    assert world.resume() == []
    world.queue.release_memory_occupation()


def test_another_kind_of_pool_is_left_alone() -> None:
    from sglang_dsv4.engine import server

    pool = SimpleNamespace()
    server.attach(None, SimpleNamespace(token_to_kv_pool=pool, scheduler=None))
    assert not vars(pool)
    assert server.host_of(SimpleNamespace(get_kvcache=lambda: pool)) is None


def test_the_attach_hook_ran_in_the_queues_constructor() -> None:
    from sglang_dsv4.engine import server

    world = World()
    assert world.queue.token_to_kv_pool is world.pool
    assert world.host.surroundings.agree is server.agree_over_ranks
    assert world.host.surroundings.weight_version is server.weight_version
    assert world.host.surroundings.fences() == ()
    assert worlds.LINE in ("0.5.17", "0.5.23")
