"""What stays the engine's own: its other backups, its answers elsewhere, and all of a server that is refused."""

from __future__ import annotations

from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import server_fixture as worlds
from retracting import crowded, is_503, outputs
from server_fixture import OLD, Recorder, World, only_new

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
    world.retract(other, offload_kv=False)
    world.queue.add(other, is_rebootstrap=True)
    world.park(req)
    assert answers == [True, False]
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
    assert world.host.context.min_over_ranks is server.min_over_ranks
    assert world.host.context.weight_version is server.weight_version
    assert world.host.context.writer_streams() == ()
    assert worlds.LINE in ("0.5.17", "0.5.23")
