"""DSV4_VERIFY finds what went wrong, and where."""

import dataclasses

import oracle
import pytest
from pool_fixture import make_world
from saved_request import saved

from sglang_dsv4.cache.families import Group
from sglang_dsv4.errors import VerifyMismatch
from sglang_dsv4.pools import copy_service as host_cache_module
from sglang_dsv4.transfer.jobs import Rows
from triton_ops.copy_rows import EMPTY, HOST_OFFSET


def test_a_load_that_misses_a_family(monkeypatch):
    world = make_world(pages=10, verify=True)
    request, _, copy = saved(world, tokens=700)
    world.leave(request)
    oracle.poison(world.pool)
    real = world.pool.host._mover._path.move
    first = world.pool.host.side.row_base["c128_state"]

    def forgetful(jobs, save):
        table = jobs.rows.table
        kept = table[(table[:, 0] != first) | (table[:, HOST_OFFSET] == EMPTY)]
        assert len(kept) < len(table)
        fewer = Rows(kept, jobs.rows.most_layers, jobs.rows.most_bytes)
        real(dataclasses.replace(jobs, rows=fewer), save)

    monkeypatch.setattr(world.pool.host._mover._path, "move", forgetful)
    with pytest.raises(VerifyMismatch, match=r"family c128_state, layer 3, position \d+, byte"):
        world.resume(copy, 2)


def test_a_host_block_overwritten_while_the_request_was_away():
    world = make_world(pages=10, verify=True)
    request, _, copy = saved(world, tokens=700)
    memory = world.pool.host.memory
    region = memory.regions[Group.PAGED]
    block = int(copy.blocks[Group.PAGED][2])
    memory.region_tensor(Group.PAGED)[block * region.packed.block_stride + 11] ^= 1
    with pytest.raises(VerifyMismatch, match="family c4_kv, layer 2, from position 515"):
        world.load(copy, request)
    copy.release()


def test_every_load_is_counted():
    world = make_world(pages=10, verify=True)
    request, expected, copy = saved(world, tokens=700)
    world.leave(request)
    oracle.compare(expected, world.read(world.resume(copy, 2)))
    assert world.pool.host.counters.verified == 1


def test_a_load_without_it_is_not_re_read(monkeypatch):
    world = make_world(pages=10)
    monkeypatch.setattr(host_cache_module.verify, "check_device", None)
    request, _, copy = saved(world, tokens=300)
    world.leave(request)
    world.resume(copy, 2)
