"""Requests resumed in one pass fit together, in pages: the engine asserts that what it admits can be allocated."""

from __future__ import annotations

import oracle
import pytest
from server_fixture import PAGE, SPEC, World, only_old

from sglang_dsv4.engine.standalone import PoolSpec

# Tokens of which the window's tail takes two pages, the second of them hardly used.
TAIL_OF_TWO = 300


def world_of(pages: int, swa_pages: int) -> World:
    return World(PoolSpec(pages=pages, swa_pages=swa_pages, requests=SPEC.requests))


def parked(world: World, lengths: tuple[int, ...]) -> list:
    """Requests of ``lengths``, retracted one by one, so that all of them together need not fit."""
    reqs = []
    for number, n in enumerate(lengths):
        req = world.admit(n, f"r{number}")
        oracle.fill(world.pool, seed=number)
        req.expected = world.read(req)
        world.park(req)
        reqs.append(req)
    return reqs


@pytest.mark.parametrize("short", ("swa", "full"))
def test_the_second_waits_where_only_its_tokens_would_fit(short: str) -> None:
    """Three pages are free: 300 + 300 tokens are less, and two pages each are more. The reserve is less than a page."""
    world = world_of(24, 3) if short == "swa" else world_of(3, 12)
    reqs = parked(world, (TAIL_OF_TWO, TAIL_OF_TWO))
    world.queue.num_reserved_decode_tokens = 16
    assert world.resume() == [reqs[0]]
    assert world.queue.retracted_queue == [reqs[1]]
    oracle.compare(reqs[0].expected, world.read(reqs[0]))
    world.retract(reqs[0], offload_kv=False)
    assert world.resume() == [reqs[1]]
    oracle.compare(reqs[1].expected, world.read(reqs[1]))
    world.nothing_held()


@only_old
@pytest.mark.parametrize("n", (1, 127, 128, 255, 256, 257, 383, 384, 385, 511, 512, 513, 1000))
@pytest.mark.parametrize("reserved", (0, 16, 512))
def test_the_estimate_is_no_less_than_the_allocator_takes(n: int, reserved: int) -> None:
    world = World()
    world.queue.num_reserved_decode_tokens = reserved
    req = world.admit(n)
    world.park(req)
    free = world.allocator.full_available_size(), world.allocator.swa_available_size()
    full, swa = world.queue._prealloc_required_tokens(req)
    assert world.resume() == [req]
    taken = free[0] - world.allocator.full_available_size(), free[1] - world.allocator.swa_available_size()
    assert (full, swa) == (max(taken[0], n + reserved), taken[1])
    assert taken[0] % PAGE == taken[1] % PAGE == 0


@only_old
def test_a_request_that_nearly_fills_the_pool_does_not_wait_for_ever() -> None:
    """Its pages and the reserve are more than there is, its tokens and the reserve are not: the engine admits it."""
    world = world_of(3, 12)
    world.queue.num_reserved_decode_tokens = 16
    (req,) = parked(world, (740,))
    assert world.resume() == [req]
