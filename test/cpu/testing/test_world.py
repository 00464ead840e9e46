"""Judges the plain world: it must pass the engine's own way, however it schedules, and fail wrong bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from plain_world import SMALL41, live, naive_pages, run_to, small_world

from sglang_dsv4.testing.forward import WrongRows
from sglang_dsv4.testing.integrity import POISON, LostPages
from sglang_dsv4.testing.ledger import locations, parts
from sglang_dsv4.testing.server import PAGE

WAYS = {
    "plain": {},
    "overlap": {"overlap": True},
    "chunks": {"chunk": 256},
    "mixed": {"chunk": 512, "mixed": True},
    "mixed_overlap": {"chunk": 512, "mixed": True, "overlap": True},
    "no_radix": {"radix": False, "overlap": True},
    "little_memory": {"pages": 10, "swa_pages": 7, "overlap": True},
    "rust_tree": {"tree": "rust", "overlap": True},
}


@pytest.fixture(autouse=True)
def _plain_pages() -> Iterator[None]:
    with naive_pages():
        yield


@pytest.mark.parametrize("way", WAYS)
def test_the_engines_own_life_is_right(way: str) -> None:
    world = small_world(**WAYS[way])
    assert live(world, seed=1) > 5
    world.evict(1 << 20, 1 << 20)
    world.check_integrity()
    assert world.totals() == (world.spec.pages, world.spec.swa_pages, world.spec.requests)


@pytest.mark.parametrize("family", ["swa_kv", "c4_kv", "c128_kv", "c4_indexer", "c4_state", "c128_state"])
def test_a_wrong_byte_of_a_running_request_is_found(family: str) -> None:
    world = small_world()
    req = world.submit(range(300), max_new=40)
    run_to(world, req, 310)
    part = next(part for part in parts(world.pool) if part.family == family)
    part.buffer[: len(part.buffer) - 1] ^= 1
    with pytest.raises(WrongRows, match=family):
        world.check_integrity()
    with pytest.raises(WrongRows, match=family):
        world.step()


@pytest.mark.parametrize("family", ["c1_kv", "c2_kv", "c1_indexer", "c2_indexer", "c2_state"])
def test_a_wrong_byte_of_v41_is_found(family: str) -> None:
    world = small_world(**SMALL41)
    req = world.submit(range(300), max_new=40)
    run_to(world, req, 311)  # its next step reads the pending half of a pair
    for part in parts(world.pool):
        if part.family == family:
            part.buffer[1:] ^= 1
    with pytest.raises(WrongRows, match=family):
        world.step()


def test_what_becomes_free_in_v41_holds_garbage() -> None:
    """Every entry of a page: its rows, and each of its tiles."""
    world = small_world(**SMALL41)
    req = world.submit(range(700), max_new=4)
    run_to(world, req, 701)
    slots = world.slots(req, 701)
    held = [(part, locations(part, world.pool, slots, 0, int(req.kv.req_pool_idx))[1]) for part in parts(world.pool)]
    world.run()
    world.evict(1 << 20, 1 << 20)
    for part, rows in held:
        assert len(rows) > 100
        assert bool((part.buffer[rows // part.rows] == POISON).all()), part.family


@pytest.mark.parametrize("family", ["swa_kv", "c4_kv", "c4_state"])
def test_a_wrong_byte_in_the_tree_is_found(family: str) -> None:
    world = small_world()
    world.submit(range(300), max_new=10)
    world.run()
    for part in parts(world.pool):
        if part.family == family:
            part.buffer[1:] ^= 1
    with pytest.raises(WrongRows, match=f"the tree.*{family}"):
        world.check_integrity()


def test_a_page_that_leaks_is_found() -> None:
    world = small_world()
    full = world.allocator.full_attn_allocator
    full.free_pages = full.free_pages[1:]
    with pytest.raises(LostPages, match="without an owner"):
        world.check_integrity()


def test_a_page_with_two_owners_is_found() -> None:
    world = small_world()
    req = world.submit(range(300), max_new=40)
    run_to(world, req, 310)
    world.allocator.full_attn_allocator.free(world.slots(req, PAGE))
    with pytest.raises(LostPages, match="with two"):
        world.check_integrity()


def test_window_pages_of_free_pages_are_found() -> None:
    world = small_world()
    world.pool.full_to_swa_index_mapping[3 * PAGE] = PAGE
    with pytest.raises(LostPages, match="still mapped"):
        world.check_integrity()


def test_a_second_turn_finds_its_prefix() -> None:
    world = small_world()
    first = world.submit(range(500), max_new=40)
    world.run()
    world.second_turn(first, [1, 2, 3], max_new=4)
    assert world.step().prefix_lens == [512]
    world.run()


def test_abort_and_flush() -> None:
    world = small_world()
    req = world.submit(range(400), max_new=60)
    run_to(world, req, 420)
    assert not world.flush()
    world.abort(req)
    world.run()
    assert world.flush()
    world.check_integrity()
    assert world.totals() == (world.spec.pages, world.spec.swa_pages, world.spec.requests)
