"""Judges the plain world: it must pass the engine's own way, however it schedules, and fail wrong bytes."""

from collections.abc import Callable
from typing import Any

import pytest
from plain_world import SMALL41, run_to, small_world

from sglang_dsv4.testing.forward import WrongRows
from sglang_dsv4.testing.integrity import POISON, LostPages
from sglang_dsv4.testing.ledger import locations, parts
from sglang_dsv4.testing.server import PAGE

FAMILIES = {
    "v4": ("swa_kv", "c4_kv", "c128_kv", "c4_indexer", "c4_state", "c128_state"),
    "v41": ("c1_kv", "c2_kv", "c1_indexer", "c2_indexer", "c2_state"),
}


@pytest.mark.parametrize(("model", "family"), [(model, family) for model in FAMILIES for family in FAMILIES[model]])
def test_a_wrong_byte_of_a_running_request_is_found(model: str, family: str) -> None:
    world = small_world(**(SMALL41 if model == "v41" else {}))
    req = world.submit(range(300), max_new=40)
    run_to(world, req, 311)  # of V4.1, the next step reads the pending half of a pair
    for part in parts(world.pool):
        if part.family == family:
            part.buffer[1:] ^= 1
    with pytest.raises(WrongRows, match=family):
        world.check_integrity()
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


def leak(world: Any, _: Any) -> None:
    full = world.allocator.full_attn_allocator
    full.free_pages = full.free_pages[1:]


def map_a_free_page(world: Any, _: Any) -> None:
    (page, *_) = world.allocator.full_attn_allocator.get_all_free_pages().tolist()
    world.pool.full_to_swa_index_mapping[page * PAGE] = PAGE


LOST: dict[str, Callable[[Any, Any], None]] = {
    "without an owner": leak,
    "with two": lambda world, req: world.allocator.full_attn_allocator.free(world.slots(req, PAGE)),
    "still mapped": map_a_free_page,
}


@pytest.mark.parametrize("how", LOST)
def test_a_page_that_is_lost_is_found(how: str) -> None:
    world = small_world()
    req = world.submit(range(300), max_new=40)
    run_to(world, req, 310)
    LOST[how](world, req)
    with pytest.raises(LostPages, match=how):
        world.check_integrity()
