"""Saves that nobody waits for, on a card: a delayed one, and everybody who may write the pages that it reads."""

import oracle
import pytest
import torch
from pool_fixture import make_world

LONG = 500_000_000  # cycles: about a quarter of a second
TOKENS = 4001


@pytest.fixture
def streams():
    return torch.cuda.Stream(), torch.cuda.Stream()


def served(forward, **spec):
    """A filled world whose transfers wait for ``forward`` as for the engine's forward stream."""
    world = make_world(device="cuda", writers=(forward,), **spec)
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
