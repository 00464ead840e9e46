"""Bad input gets a named error; nothing is changed, nothing leaks."""

import pytest
from pool_fixture import make_world, saved

from sglang_dsv4.errors import CopyConsumed, CopyMismatch, HostMemoryExhausted, IndexMismatch


@pytest.mark.parametrize(
    ("other", "tokens", "match"),
    [
        (None, 299, r"300 tokens .* 299"),
        (None, 301, r"300 tokens .* 301"),
        ({"fp4_indexer": True}, 300, "geometry"),
        ({}, 300, "not a copy of this pool"),
    ],
)
def test_a_copy_that_does_not_fit(other, tokens, match):
    world = make_world(pages=10)
    _, _, copy = saved(world, tokens=300)
    target = world if other is None else make_world(pages=10, **other)
    with pytest.raises(CopyMismatch, match=match):
        target.load(copy, target.start(2, tokens))
    with pytest.raises(CopyMismatch, match="not a copy"):
        target.pool.load_cpu_copy(object(), target.start(3, 300).slots, req_pool_index=3)
    copy.release()
    world.check_empty()


@pytest.mark.parametrize("aborted", [True, False])
def test_a_copy_is_used_once(aborted):
    world = make_world(pages=10)
    request, _, copy = saved(world, tokens=300)
    if aborted:
        copy.release()
    else:
        world.leave(request)
        request = world.resume(copy, 2)
    with pytest.raises(CopyConsumed):
        world.load(copy, request)
    world.check_empty()


@pytest.mark.parametrize("slot", [-1, 6, 1 << 40])
def test_a_request_slot_out_of_range(slot):
    world = make_world(pages=10)
    request = world.start(1, 300)
    with pytest.raises(IndexMismatch, match="slot"):
        world.pool.get_cpu_copy(request.slots, req_pool_index=slot)
    world.check_empty()


def test_more_copies_than_the_arena_keeps():
    world = make_world(pages=10, host_copies=1)
    request, _, copy = saved(world, tokens=300)
    with pytest.raises(HostMemoryExhausted, match="DSV4_HOST_COPIES"):
        world.save(request)
    copy.release()
    world.save(request).release()
    world.check_empty()


def test_a_transfer_that_fails_gives_the_blocks_back(monkeypatch):
    world = make_world(pages=10)
    request = world.start(1, 300)

    def broken(copy, request):
        raise RuntimeError("no transfer")

    monkeypatch.setattr(world.pool.host._copier, "save", broken)
    memory = world.pool.host.memory
    with pytest.raises(RuntimeError, match="no transfer"):
        world.save(request)
    assert (memory.copies, memory.leaks) == (0, 0), "at once, not when the copy is collected"
    world.check_empty()
