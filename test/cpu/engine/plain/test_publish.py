"""The prefix tree and a restored request: what it takes from it, what it gives back to it."""

from __future__ import annotations

from typing import Any

import pytest
from plain_world import came_back, finish, forget, full, over, retracted, run_to, serving, small_world
from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.engine.plain import publish
from sglang_dsv4.testing.integrity import branches

PAGE = 256


def restored(tokens: int, more: int, **way: Any) -> tuple[Any, Any]:
    """A world, and its request in its first step after a restore with ``tokens`` tokens; it will make ``more``."""
    world, req = retracted(tokens, 6 + more, **way)
    came_back(world, req)
    return world, req


def away(world: Any, req: Any, tokens: int) -> None:
    """Retracted with so many tokens, none of which the tree has."""
    run_to(world, req, tokens)
    world.retract(req)
    forget(world)


@pytest.mark.parametrize("tokens", [513, 578, 638, 639, 640, 760])
def test_trap_5_no_half_loaded_page_is_published(tokens: int) -> None:
    """The engine publishes behind an extend. After each step the world reads what the tree gives a new request."""
    world, req = retracted(tokens, 9)
    world.submit(range(9000, 9300), max_new=4)
    assert world.step().extend_lens == [1, 300]
    world.check_integrity()
    world.submit([*world.tokens(req, 512), *range(5)], max_new=2)
    over(world)


@pytest.mark.parametrize("tokens", [513, 638, 700])
def test_trap_6_the_half_loaded_page_is_given_back_at_the_finish(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """... before the insert: every page has one owner after it, and the next turn finds what was computed whole.

    The engine frees what leaves a window only now and then (SGLANG_SWA_EVICTION_INTERVAL): here not in time.
    """
    world, req = restored(tokens, more=768 - tokens + 10)
    monkeypatch.setattr(ScheduleBatch, "maybe_evict_swa", lambda _: None)
    finish(world)
    world.second_turn(req, [1, 2, 3], max_new=2)
    assert world.step().prefix_lens == [768]
    over(world)
    forget(world)
    assert world.totals() == (world.spec.pages, world.spec.swa_pages, world.spec.requests)


@pytest.mark.parametrize(("tokens", "half"), [(512, None), (513, 256), (638, 256), (639, None), (767, None), (300, 0)])
def test_which_page_is_half_loaded(tokens: int, half: int | None) -> None:
    assert publish.half_loaded_page(Geometry((0, 4, 128)), tokens) == half


def test_a_finish_that_publishes_no_window_publishes_nothing() -> None:
    """The engine never makes a leaf without SWA, which nobody could match."""
    world, req = restored(640, more=3)
    world.run()
    assert req.finished()
    assert all(any(branch.live) for branch in branches(world))


def test_trap_7_a_long_restore_leaves_other_windows_in_the_tree() -> None:
    """Three cached prompts keep their matches: the window pool is asked for a window, not for the whole request."""
    world = small_world(pages=24, swa_pages=8)
    req = world.submit(range(2000), max_new=30)
    away(world, req, 2010)
    cached = [world.submit(range(5000 * i, 5000 * i + 520), max_new=2) for i in (1, 2, 3)]
    world.scheduler.waiting_queue.remove(req)
    world.scheduler.waiting_queue.append(req)
    plain = serving(world)
    for _ in range(50):
        world.step()
        world.check_integrity()
        if plain.host.counters.loads:
            break
    assert plain.host.counters.loads == 1
    assert [len(world.match([*other.origin_input_ids[:512], 1, 2])) for other in cached] == [512] * 3


def test_trap_8_pages_of_the_tree_are_not_written() -> None:
    """The copy's own bytes of the shared pages are spoilt: nobody must ever see them."""
    world = small_world()
    req = world.submit(range(1270), max_new=30)
    run_to(world, req, 1290)
    world.retract(req)
    plain = serving(world)
    copy = plain.saved_of(req).copy
    for unit in copy.pages(0, 1024 // PAGE):
        plain.host.memory.bytes_of(unit).bitwise_xor_(0xFF)
    came_back(world, req)
    assert req.kv.cache_protected_len == 1024
    world.run()


def test_trap_15_a_mark_ends_with_the_next_retract(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is full at the second retract, the engine prefills again, and the request publishes as any other."""
    world, req = restored(600, more=60)
    run_to(world, req, 620)

    monkeypatch.setattr(serving(world).host.memory, "allocate", full)
    world.retract(req)
    world.run()
    world.second_turn(req, [1, 2, 3], max_new=2)
    assert world.step().prefix_lens == [512]


def test_what_the_engine_keeps_from_the_tree_stays_out() -> None:
    world = small_world()
    req = world.submit(range(500), max_new=40)
    req.skip_radix_cache_insert = True
    run_to(world, req, 520)
    world.retract(req)
    came_back(world, req)
    world.run()
    assert req.skip_radix_cache_insert
    assert len(world.match([*req.origin_input_ids, *req.output_ids, 1])) == 0
