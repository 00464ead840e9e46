"""Saves that nobody waits for, on a card: a delayed one, and everybody who may write the pages that it reads."""

import random

import oracle
import pytest
import torch
from pool_fixture import make_world

from sglang_dsv4.errors import WindowNotMapped
from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.settings import Settings
from sglang_dsv4.transfer import locate

LONG = 500_000_000  # cycles: about a quarter of a second
TOKENS = 4001


@pytest.fixture
def streams():
    return torch.cuda.Stream(), torch.cuda.Stream()


def served(forward, **spec):
    """A filled world whose transfers wait for ``forward`` as for the engine's forward stream."""
    world = make_world(device="cuda", pages=40, **spec)
    world.pool.host.close()
    world.pool.host = None
    world.pool.attach_host(Settings(host_gb=0.25, host_copies=8), ServerContext(writer_streams=lambda: (forward,)))
    oracle.fill(world.pool, 1)
    torch.cuda.synchronize()
    return world


def save(world, request):
    """As the engine's hooks save: nobody waits, and the pages are given away."""
    slots = request.slots[: request.n].to(torch.int32)
    copy = world.pool.get_cpu_copy(slots, req_pool_index=request.req_slot, wait=False)
    world.pool.host.pages_in_use.record_writers()
    return copy


def overwrite(world, stream):
    """Somebody's bytes in every page, on ``stream``."""
    with torch.cuda.stream(stream):
        oracle.poison(world.pool)


def delayed_save(world, forward):
    """(request, its bytes, its copy): something holds the save's kernels up, and the host is long done."""
    request = world.start(1, TOKENS)
    expected = world.read(request)
    torch.cuda.synchronize()
    with torch.cuda.stream(world.pool.host._copier._kernels):
        torch.cuda._sleep(LONG)
    copy = save(world, request)
    assert not copy.lease.used_by.query(), "the save was waited for"
    return request, expected, copy


def came_back(world, request, expected, copy):
    torch.cuda.synchronize()
    world.leave(request)
    oracle.compare(expected, world.read(world.resume(copy, 2)))


@pytest.mark.parametrize("guarded", [True, False])
def test_a_transfer_that_writes_at_once(streams, guarded):
    """It is in no stream. Without the guard its bytes are those of the copy: so the delay is one that shows."""
    forward, transfer = streams
    world = served(forward)
    request, expected, copy = delayed_save(world, forward)
    if guarded:
        world.pool.host.pages_in_use.wait()
        assert copy.lease.used_by.query()
    overwrite(world, transfer)
    if guarded:
        came_back(world, request, expected, copy)
    else:
        with pytest.raises(AssertionError):
            came_back(world, request, expected, copy)


@pytest.mark.parametrize("writer", ["forward", "current"])
def test_what_is_launched_next(streams, writer):
    forward, _ = streams
    world = served(forward)
    request, expected, copy = delayed_save(world, forward)
    if writer == "forward":
        forward.wait_stream(torch.cuda.current_stream())
    overwrite(world, forward if writer == "forward" else torch.cuda.current_stream())
    assert not copy.lease.used_by.query(), "the host waited"
    came_back(world, request, expected, copy)


def test_a_save_beside_a_running_forward(streams):
    """The host waits for neither, and a transfer for both."""
    forward, _ = streams
    world = served(forward)
    request = world.start(1, TOKENS)
    expected = world.read(request)
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        torch.cuda._sleep(LONG)
    copy = save(world, request)
    assert not forward.query()
    copy.lease.used_by.synchronize()
    assert not forward.query(), "the save is not behind the forward"
    world.pool.host.pages_in_use.wait()
    assert forward.query()
    came_back(world, request, expected, copy)


@pytest.mark.parametrize("told", [True, False])
def test_a_restore_does_not_wait_for_the_running_forward(streams, told):
    """0.5.23 puts the current stream behind the forward between the allocation and the load."""
    forward, _ = streams
    world = served(forward)
    request = world.start(1, TOKENS)
    expected, copy = world.read(request), save(world, request)
    torch.cuda.synchronize()
    world.leave(request)
    oracle.poison(world.pool)
    again = oracle.Request(oracle.resume(world.allocator, TOKENS), 2, TOKENS)
    slots = again.slots.to(torch.int32)
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        torch.cuda._sleep(LONG)
    if told:
        world.pool.host.place_taken()
    torch.cuda.current_stream().wait_stream(forward)
    world.pool.load_cpu_copy(copy, slots, req_pool_index=2)
    assert forward.query() is not told
    oracle.compare(expected, world.read(again))


def test_saves_and_loads_in_flight(streams, monkeypatch):
    """More searches than are kept, pages overwritten behind each save, and loads among them."""
    monkeypatch.setattr(locate, "SEARCHES", 4)
    forward, _ = streams
    world, rng = served(forward), random.Random(1)
    for _ in range(20):
        requests = [world.start(slot, rng.choice([5, 130, 513, 700, 1900])) for slot in range(1, 4)]
        for buffer in oracle.buffers(world.pool).values():
            buffer.random_(0, 256)
        expected = [world.read(request) for request in requests]
        torch.cuda.synchronize()
        with torch.cuda.stream(world.pool.host._copier._kernels):
            torch.cuda._sleep(rng.choice([0, 1_000_000]))
        copies = [save(world, request) for request in requests]
        overwrite(world, torch.cuda.current_stream())
        for request in requests:
            world.leave(request)
        places = [world.resume(copy, slot) for copy, slot in zip(copies, (3, 1, 2), strict=True)]
        for wanted, place in zip(expected, places, strict=True):
            oracle.compare(wanted, world.read(place))
            world.leave(place)
    world.check_empty()


def test_a_wrong_request_is_told_late(streams):
    forward, _ = streams
    world = served(forward)
    request = world.start(1, 600)
    world.pool.full_to_swa_index_mapping[int(request.slots[500])] = 0
    copy = save(world, request)
    with pytest.raises(WindowNotMapped, match="position 500 of 600"):
        world.pool.host.check_search(copy)
    copy.release()
    torch.cuda.synchronize()
    world.check_empty()
