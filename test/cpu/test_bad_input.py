"""Bad input gets a named error; nothing is changed, nothing leaks. stateful/refusals.py tries it at any time."""

from unittest import mock

import pytest
import torch
from pool_fixture import make_world, saved

from sglang_dsv4.errors import CopyMismatch, IndexMismatch
from sglang_dsv4.testing.standalone import PoolSpec, make_pool


@pytest.mark.parametrize(("other", "tokens"), [(None, 299), (None, 301), ({}, 300), ({"fp4_indexer": True}, 300)])
def test_a_copy_that_does_not_fit(other, tokens):
    world = make_world(pages=10)
    _, _, copy = saved(world, tokens=300)
    target = world if other is None else make_world(pages=10, **other)
    request = target.start(2, tokens)
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


def test_a_page_that_is_named_twice():
    world = make_world(pages=10)
    _, _, copy = saved(world, tokens=700)
    request = world.start(2, 700)
    twice = torch.cat([request.slots[:256], request.slots[:256], request.slots[512:]])
    with pytest.raises(IndexMismatch, match="one is named twice"):
        world.pool.load_cpu_copy(copy, twice, req_pool_index=2)
    with pytest.raises(IndexMismatch, match="one is named twice"):
        world.pool.get_cpu_copy(twice, req_pool_index=2)
    copy.release()
    world.check_empty()


def test_a_pool_without_a_map_is_refused():
    pool = make_pool(PoolSpec())
    pool.full_to_swa_index_mapping = None
    with pytest.raises(IndexMismatch, match="no map from full to SWA slots"):
        pool.get_cpu_copy(torch.arange(256, 300), req_pool_index=1)
    pool.host.memory.close()


def test_a_transfer_that_fails_gives_the_units_back(monkeypatch):
    world = make_world(pages=10)
    monkeypatch.setattr(world.pool.host._copier, "save", mock.Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        world.save(world.start(1, 300))
    memory = world.pool.host.memory
    assert (memory.copies, memory.leaks) == (0, 0), "at once, not when the copy is collected"
    world.check_empty()


def test_a_copy_whose_load_was_refused_is_gone_with_its_request():
    world = make_world(pages=10)
    _, _, copy = saved(world, tokens=700)
    with pytest.raises(IndexMismatch):
        world.pool.load_cpu_copy(copy, torch.full((700,), 256), req_pool_index=2)
    del copy  # no cycle of a traceback keeps its units until the next collection
    memory = world.pool.host.memory
    assert (memory.copies, memory.held_bytes) == (0, 0)


def test_a_second_attach_keeps_the_arena():
    """A server may build its queues again; reserving and pinning once more would double the memory."""
    world = make_world(pages=6)
    first = world.pool.host
    assert world.pool.attach_host(world.pool.host.settings) is first
