"""Bad input gets a named error; nothing is changed, nothing leaks. stateful/refusals.py tries it at any time."""

import pytest
from pool_fixture import make_world, saved

from sglang_dsv4.errors import CopyMismatch, HostMemoryExhausted, IndexMismatch


@pytest.mark.parametrize("other", [{}, {"fp4_indexer": True}])
def test_a_copy_of_another_pool_is_refused(other):
    world, target = make_world(pages=10), make_world(pages=10, **other)
    (_, _, copy), request = saved(world, tokens=300), target.start(2, 300)
    for wrong in (copy, object()):
        with pytest.raises(CopyMismatch):
            target.pool.load_cpu_copy(wrong, request.slots, req_pool_index=2)
    copy.release()
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
