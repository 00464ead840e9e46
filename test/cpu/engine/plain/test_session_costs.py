"""Sessions cost those who gain nothing little, and keep no aborted request and no cache of older weights."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from plain_world import forget, serving, world_with_sessions
from server_fixture import device_memory, weight_updater
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

from sglang_dsv4.engine.plain import resume, sessions
from sglang_dsv4.engine.plain.serving import plain_of
from sglang_dsv4.engine.retract.stale import changing_weights
from sglang_dsv4.engine.state import request_state


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_SESSIONS", "auto")


def test_a_long_queue_is_not_searched_in_each_pass() -> None:
    """Of 30,000 that wait, none may ask for its session: a search of them took 19 ms in each pass."""

    class Queue(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("searched")

    world, _ = world_with_sessions()
    world.scheduler.waiting_queue = Queue([object()] * 3)
    plan = SimpleNamespace(batch_to_run=None)
    assert resume.get_new_batch_prefill(lambda *_: plan, world.scheduler, world.scheduler.running_batch) is plan


def test_a_request_that_left_the_queue_is_not_loaded() -> None:
    """It asked for its session; before its turn it was admitted, or aborted in between."""
    world, store = world_with_sessions()
    first = world.submit(range(1300), max_new=4)
    world.run()
    for _ in range(2):
        world.second_turn(first, range(40), max_new=3, hints={"kv.prefetch": {}})
    plain, running = plain_of(world.allocator), world.requests[1]
    world.step()
    assert plain is not None and running.kv.holds_kv
    world.run()
    forget(world)
    plain.to_prefetch.extend([running, world.requests[2]])
    world.step()
    assert not plain.to_prefetch and not store.counters.hits


@pytest.mark.parametrize("left", ["aborted", "never queued"])
def test_the_session_of_one_that_waits_no_more_is_not_loaded(left: str) -> None:
    """A client would pay nothing for it, and the tree loses what it takes."""
    world, store = world_with_sessions()
    first = world.submit(range(1300), max_new=4)
    world.run()
    forget(world)
    if left == "never queued":
        world.scheduler.max_queued_requests = 0
    again = world.second_turn(first, range(40), max_new=3, hints={"kv.prefetch": {}})
    world.abort(again)
    assert not world.waiting
    world.step()
    assert not store.counters.hits and not serving(world).to_prefetch


def test_a_session_is_loaded_once_the_transfer_is_ready() -> None:
    """A prefill server's requests wait for their decode server first."""
    world, store = world_with_sessions()
    first = world.submit(range(1300), max_new=4)
    world.run()
    forget(world)
    world.second_turn(first, range(40), max_new=3, hints={"kv.prefetch": {}})
    queue = world.scheduler.waiting_queue
    world.scheduler.disagg_prefill_bootstrap_queue = SimpleNamespace(queue=queue[:])
    world.scheduler.waiting_queue = []
    world.step()
    assert not store.counters.hits and len(serving(world).to_prefetch) == 1
    world.scheduler.disagg_prefill_bootstrap_queue.queue, world.scheduler.waiting_queue = [], queue
    world.step()
    assert store.counters.hits == {"pages": 1}


def decoding_across_an_update(world: Any, max_new: int = 60) -> Any:
    """Returns a request that has decoded under the weights before an update, and runs on."""
    req = world.submit(range(1300), max_new=max_new)
    for _ in range(20):
        world.step()
    with changing_weights():
        pass
    return req


@pytest.mark.parametrize("flushed", ["before the update", "with the update", "behind the update"])
def test_what_was_computed_across_an_update_is_not_kept_until_a_flush(flushed: str) -> None:
    """A trainer that pauses in place: requests go on with cache of older weights, and so would their next turns."""
    world, store = world_with_sessions()
    world.submit(range(1300), max_new=60)
    for _ in range(20):
        world.step()
    assert not world.flush(), "the engine refuses"
    with changing_weights():
        pass
    world.run(check=False)
    assert (store.points, store.kept.held_bytes) == (0, 0)
    if flushed == "before the update":
        assert world.flush()
        world.submit(range(9000, 9100), max_new=3)
        world.run()
        with changing_weights():
            pass
    elif flushed == "with the update":
        with changing_weights():
            assert world.flush()
    else:
        assert world.flush()
    world.submit(range(3000, 4300), max_new=3)
    world.run()
    assert store.points == (flushed != "before the update")


def test_a_copy_across_an_update_gives_sessions_no_pages() -> None:
    world, store = world_with_sessions()
    req = decoding_across_an_update(world)
    world.retract(req)
    forget(world)
    world.step()
    assert store.kept.held_bytes == 0 and serving(world).host.counters.saves == 1


@pytest.mark.parametrize("way", ["by a trainer", "released, the cache first"])
def test_an_update_of_an_empty_cache_leaves_it_clean(way: str) -> None:
    """The weights of a release change once more behind its flush: sessions were never kept again."""
    world, store = world_with_sessions()
    world.submit(range(1300), max_new=3)
    world.run()
    manager = weight_updater(world=world)
    if way == "by a trainer":
        request = mock.MagicMock(flush_cache=True, selector="all", disable_draft_model=False)
        with mock.patch.object(torch.distributed, "barrier", lambda group=None: None):
            assert manager.begin_weight_update(request).success
            assert manager.update_weights_from_tensor(request).success
            assert manager.end_weight_update(request).success
    else:
        device_memory(world, "release_memory_occupation", "kv_cache")
        device_memory(world, "release_memory_occupation", "weights")
    world.submit(range(1300), max_new=3)
    world.run()
    assert store.points == 1


def test_a_copy_across_an_update_is_stale_behind_a_flush() -> None:
    """A paused server flushes while requests wait: one with cache of both weights would leave it to everybody."""
    world, store = world_with_sessions()
    req = decoding_across_an_update(world, max_new=300)
    for _ in range(5):
        world.step()
    world.retract(req)
    world.scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))
    assert serving(world).count == 1 and world.flush()
    world.scheduler.continue_generation(ContinueGenerationReqInput())
    world.run(check=False)
    assert req.finished() and serving(world).host.counters.fallbacks == {"StaleWeights": 1}
    assert store.points == 2, "it was computed again"


def test_a_cache_of_two_sets_of_weights_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world, _ = world_with_sessions()
    req = decoding_across_an_update(world)
    world.submit(range(3000, 4300), max_new=3)
    world.run(check=False)
    assert req.finished() and caplog.text.count("no session is kept until the cache is flushed") == 1


def test_nothing_is_saved_of_an_aborted_request() -> None:
    """A pause with mode abort, or a gateway that is gone: all of a batch at once."""
    world, store = world_with_sessions(pages=120, swa_pages=40)
    reqs = [world.submit(range(3000 * i, 3000 * i + 1500), max_new=600) for i in range(4)]
    while not all(len(req.output_ids) > 1536 - 1500 for req in reqs):
        world.step()
    made = store.kept._made
    for req in reqs:
        world.abort(req)
    world.run()
    assert all(req.finished() for req in reqs) and store.kept._made == made
    assert [point.tokens for point in store.order if point.tail is not None] == [1280] * 4, "their prompts' ends stay"


def saves_of(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Returns (new pages, with a window) of each save to come."""
    found: list[tuple[int, bool]] = []
    real = store._host.save_point

    def save_point(slots: Any, swa_map: Any, first_page: int, window: bool = True) -> Any:
        copy = real(slots, swa_map, first_page, window)
        found.append((copy.in_pages, window))
        return copy

    monkeypatch.setattr(store._host, "save_point", save_point)
    return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("verify", ["0", "1"])
def test_a_long_prompt_is_kept_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch, overlap: bool, verify: str) -> None:
    """No save moves more than two chunks, so that no step of others waits for a gigabyte; one window is kept."""
    monkeypatch.setenv("DSV4_VERIFY", verify)
    world, store = world_with_sessions(overlap=overlap, chunk=512, pages=80)
    saves = saves_of(store, monkeypatch)
    req = world.submit(range(6000), max_new=4)
    while not req.output_ids:  # the world raises where a save reads what a forward in flight writes
        world.step()
        world.check_integrity()
        store.check_integrity()
    assert sum(pages for pages, _ in saves) == 23 and max(pages for pages, _ in saves) <= 4
    assert [window for _, window in saves] == [False] * (len(saves) - 1) + [True] and len(saves) >= 10
    world.run()
    assert [(point.tokens, point.tail is not None) for point in store.order] == [(5888, True)]
    forget(world)
    again = world.second_turn(req, range(40), max_new=3)
    world.run()
    assert again.finished() and store.counters.tokens == 5888


def test_a_prompt_whose_beginning_the_device_has_is_kept_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has lost it; the whole of it at once would be as long a save as ever."""
    monkeypatch.setattr(sessions, "MOST_PAGES", 3)
    world, store = world_with_sessions(chunk=512, pages=80)
    first = world.submit(range(4000), max_new=4)
    world.run()
    store.clear("flush")
    saves = saves_of(store, monkeypatch)
    world.second_turn(first, range(2500), max_new=2)
    world.run()
    assert [pages for pages, window in saves if not window] == [3] * 5
    store.check_integrity()
    assert request_state(world.requests[1]).partial is None and all(point.tail is not None for point in store.order)


@pytest.mark.parametrize("told", [False, True])
def test_a_load_is_a_line_of_the_log_where_each_request_is(told: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world, store = world_with_sessions()
    store.log_saves = told
    first = world.submit(range(1300), max_new=4)
    world.run()
    forget(world)
    world.second_turn(first, range(40), max_new=3)
    world.run()
    assert store.counters.hits == {"pages": 1} and (" goes on at 1280 of " in caplog.text) is told


def test_a_miss_is_looked_up_again_only_when_a_point_of_its_namespace_came() -> None:
    world, store = world_with_sessions()
    world.submit(range(1300), max_new=3)
    world.run()
    waits = world.submit(range(5000, 10_000), max_new=3)
    waits.init_next_round_input(world.tree)
    sessions._longest(store, waits, world.tree)
    found = request_state(waits).found
    assert found.point is None
    store.kept.let_go(next(iter(store.order)), "room")
    world.submit(range(20_000, 21_300), max_new=3, extra_key="other")
    sessions._longest(store, waits, world.tree)
    assert request_state(waits).found is found, "a point went, and one came elsewhere"


def test_a_long_look_up_goes_on_where_the_last_one_ended() -> None:
    """A prompt that waits while others come: its kept pages are compared once, not each time."""
    world, store = world_with_sessions(pages=80)
    first = world.submit(range(6000), max_new=3)
    world.run()
    forget(world)
    waits = world.second_turn(first, range(600), max_new=3)
    waits.init_next_round_input(world.tree)
    assert sessions._longest(store, waits, world.tree).tokens == 5888
    world.scheduler.waiting_queue.remove(waits)
    world.submit(range(20_000, 21_300), max_new=3)
    world.run()
    cut, keys = [], store.trie.keys
    store.trie.keys = lambda *arguments: (cut.append(key) or key for key in keys(*arguments))
    assert not store.lookup.is_current(sessions.namespace(waits), request_state(waits).found, 0)
    assert sessions._longest(store, waits, world.tree).tokens == 5888 and len(cut) <= 1
    found = request_state(waits).found
    assert store.lookup.is_current(sessions.namespace(waits), found, found.limit)
    assert not store.lookup.is_current(sessions.namespace(waits), found, found.limit + 1), "its prompt grew"


def test_all_points_go_in_a_moment() -> None:
    """A flush, or new weights: a hundred thousand pages took a sixth of a second of the scheduler."""
    world, store = world_with_sessions()
    for number in range(3):
        world.submit(range(3000 * number, 3000 * number + 1300), max_new=3)
    world.run()
    evicted = dict(store.counters.evicted)
    gc.collect()
    started = time.perf_counter()
    store.clear("flush")
    assert time.perf_counter() - started < 0.05
    assert store.points == store.kept.held_bytes == 0 and not list(store.order)
    assert dict(store.counters.evicted) == evicted | {"flush": 3}
    store.check_integrity()
