"""A plain server with the engine's hierarchical cache: requests come back from copies, the host tier beside them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hicache_world import hicache_world
from plain_world import ask, came_back, finish, forget, live, over, run_to, serving
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_dsv4.engine.coverage import Part, launch, refusal
from sglang_dsv4.engine.retract.stale import changing_weights

PROMPT, ON_HOST, SAVED = 1020, 768, 1030  # tokens; whole pages of the prompt are published, and written to the host


def away(saved: int = SAVED, first: int = 0, **way: Any) -> tuple[Any, Any]:
    """Returns a world and its request, which waits with a copy; of its prompt the host alone has whole pages.

    first: tokens of an earlier request with the same beginning, whose end can be matched, too.
    """
    world = hicache_world(**way)
    if first:
        world.submit(range(first), max_new=2)
        world.run()
    req = world.submit(range(PROMPT), max_new=saved - PROMPT + 12)
    run_to(world, req, saved)
    world.retract(req)
    forget(world)
    return world, req


def hits(req: Any) -> tuple[int, int, int]:
    """Returns the tokens matched on the device, those on the host, and window tokens there."""
    return req.prefix_len, req.host_hit_length, req.swa_host_hit_length


def ended(world: Any) -> None:
    """Runs to the end. Then no node is locked, on device or host, and every page has its owner."""
    over(world)
    for node in world.tree.tree_core._collect_all_nodes() if world.spec.tree == "python" else ():
        held = [(data.lock_ref, data.host_lock_ref) for data in node.component_data]
        assert node is world.tree.tree_core.root_node or not any(map(any, held)), f"node {node.id}: {held}"
    assert not world.tree.ongoing_load_back and not world.tree.ongoing_write_through
    forget(world)
    assert world.totals() == (world.spec.pages, world.spec.swa_pages, world.spec.requests)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_restored_request_takes_its_copy_and_not_its_host_hit(policy: str) -> None:
    world, req = away(policy=policy)
    came_back(world, req)
    counters = serving(world).host.counters
    assert (counters.loads, counters.spared_tokens, hits(req)) == (1, SAVED, (SAVED, 0, 0))
    assert not world.tree.cache_controller.ack_load_queue and world.tree.cache_controller.load_queue == []
    ended(world)


def test_in_one_pass_the_engine_loads_back_for_one_and_the_copy_is_loaded_for_the_other() -> None:
    """Their beginnings are the same: the pages just asked for from the host are the restored one's, too."""
    world, req = away(first=520)
    other = world.submit(range(600), max_new=40)
    world.scheduler.waiting_queue.reverse()
    batch = world.step()
    assert (batch.reqs, batch.extend_lens, other.host_loaded_length) == ([other, req], [600 - 512, 1], 512)
    assert req.kv.cache_protected_len == 512
    assert serving(world).host.counters.spared_tokens == SAVED - 512
    world.check_integrity()
    ended(world)


def test_turned_away_it_has_its_host_hit_again() -> None:
    """Here another rank of DP attention delays prefills."""
    world, req = away()
    before = world.totals()
    delayer = SimpleNamespace(negotiate_should_allow_prefill=lambda **_: False)
    adder, result = ask(world, req, SimpleNamespace(reqs=[], batch_size=lambda: 0), prefill_delayer_single_pass=delayer)
    assert (result, adder.can_run_list) == (AddReqResult.OTHER, [])
    assert (hits(req)[:2], world.totals()) == ((0, ON_HOST), before)
    assert hits(req)[2] > 0
    assert serving(world).count == 1
    came_back(world, req)
    ended(world)


def test_what_the_host_drops_to_make_room_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no pages, and in the same pass the engine takes it: with no host hit, whose nodes are gone."""
    world, req = away()

    def no_room(*_: Any) -> None:
        for component in (ComponentType.FULL, ComponentType.SWA):
            world.tree.evict_host(1 << 20, component)

    with monkeypatch.context() as patch:
        patch.setattr(world.allocator, "alloc_extend_swa_tail", no_room)
        batch = world.step()
    assert (batch.reqs, batch.prefix_lens) == ([req], [0])
    assert dict(serving(world).host.counters.fallbacks) == {"NoRoom": 1}
    ended(world)


def stale(_: Any, __: Any) -> None:
    with changing_weights():
        pass


def lost(world: Any, req: Any) -> None:
    world.scheduler.waiting_queue.remove(req)
    req.finished_reason = "lost"


EXITS: dict[str, Callable[[Any, Any], Any]] = {
    "admitted": lambda *_: None,
    "aborted": lambda world, req: world.abort(req),
    "lost": lost,
    "copy stale": stale,
    "copy released": lambda world, req: serving(world).drop(serving(world).saved_of(req), "StaleWeights", ""),
    "retracted again": lambda world, req: (world.step(), world.retract(req)),
    "a new turn": lambda world, req: world.second_turn(req, range(300), max_new=3),
}


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("way", EXITS)
def test_every_way_out_leaves_no_lock(way: str, policy: str) -> None:
    world, req = away(policy=policy, chunk=512)  # without its copy it is prefilled in chunks, behind its host hit
    EXITS[way](world, req)
    ended(world)


@pytest.mark.parametrize("tokens", [1025, 1150, 1151, 1279, 1280])
def test_what_it_publishes_goes_to_the_host_and_comes_back_right(tokens: int) -> None:
    """Bytes are compared wherever a forward reads them; what was loaded in part must not come back as a window."""
    world, req = away(tokens)
    came_back(world, req)
    req.sampling_params.max_new_tokens = (tokens // 256 + 1) * 256 + 10 - PROMPT
    finish(world)
    forget(world)
    turn = world.second_turn(req, [1, 2, 3], max_new=3)
    world.step()
    assert turn.host_loaded_length > tokens
    ended(world)


def test_a_save_comes_after_load_backs_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of a request restored in this very pass may be those that the engine loads back for another."""
    world, req = away()
    came_back(world, req)
    order: list[str] = []
    done = SimpleNamespace(wait=lambda: order.append("load"), query=lambda: False)
    host, ack = serving(world).host, SimpleNamespace(finish_event=done)
    save = host.save
    monkeypatch.setattr(world.tree.cache_controller, "ack_load_queue", [ack])
    monkeypatch.setattr(host, "save", lambda *args, **named: order.append("save") or save(*args, **named))
    world.retract(req)
    assert order == ["load", "save"]
    monkeypatch.undo()
    ended(world)


def test_a_storage_backend_attached_later_leaves_requests_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    world = hicache_world()
    req = world.submit(range(PROMPT), max_new=60)
    run_to(world, req, SAVED)
    with monkeypatch.context() as patch:
        patch.setattr(world.tree, "check_hicache_events", lambda: None)  # it would look for the backend's queues
        patch.setattr(world.tree, "enable_storage", True)
        world.retract(req)
    assert dict(serving(world).host.counters.fallbacks) == {"StorageAttached": 1}
    ended(world)


@pytest.mark.parametrize(
    "way",
    [
        {"tree": "rust", "overlap": True}, {"policy": "write_back", "overlap": True, "mixed": True, "chunk": 512},
        {"server_args": {"hicache_ratio": 0.5}, "policy": "write_back"}, {"drafts": 4, "overlap": True},
    ],
    ids=str,
)  # fmt: skip
def test_random_lives(way: dict[str, Any]) -> None:
    world = hicache_world(**way)
    assert live(world, seed=1, retract_every=5)
    assert serving(world).host.counters.loads
    ended(world)


MEMORY = {
    "enable_hierarchical_cache": True, "hicache_storage_backend": None, "hicache_host_memory_mode": "cache",
    "enable_lmcache": False, "enable_flexkv": False, "enable_hisparse": False,
    "enable_unified_cache_external_linker": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, None), ({"enable_hierarchical_cache": False}, None), ({"enable_lmcache": True}, "LMCache"),
        ({"enable_flexkv": True}, "FlexKV"), ({"hicache_storage_backend": "file"}, "storage backend"),
        ({"hicache_host_memory_mode": "buffer_only"}, "buffer"), ({"enable_hisparse": True}, "HiSparse"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(change: dict[str, Any], named: str | None) -> None:
    memory = SimpleNamespace(**MEMORY | change)
    reason = refusal(launch(memory=memory, hisparse=memory.enable_hisparse), Part.PLAIN)
    assert (reason is None) == (named is None)
    assert named is None or named in str(reason)
