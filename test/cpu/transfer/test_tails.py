"""Every byte of a tail survives, of any length, wherever its units lie, and whoever saves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import oracle
import pytest
from builders import DEVICE, POISON, Served, served
from pretended_device import Device

from sglang_dsv4.hostmem.memory import HostCopy, HostMemory
from sglang_dsv4.hostmem.sizing import ArenaSize
from sglang_dsv4.transfer import copier as copier_module
from sglang_dsv4.transfer import verify
from sglang_dsv4.transfer.reference import ReferenceCopier

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a real device is tested in test/gpu")

SPECS = {
    "V4": {},
    "window only": {"ratios": (0, 0)},
    "a draft": {"ratios": (0, 4, 128), "draft_tokens": 8, "draft": 128},
}
Transfer = Callable[[HostCopy, Any], None]


@pytest.fixture(params=["kernels", "torch"])
def fast(request) -> bool:
    return request.param == "kernels"


@pytest.fixture(params=SPECS.values(), ids=SPECS.keys())
def world(request) -> Served:
    return served(**{"units": 90, "requests": 8, **request.param})


def copier_of(monkeypatch, world: Served, memory: HostMemory, fast: bool) -> tuple[Transfer, Transfer]:
    """How ``memory`` saves and loads, each with everything done when it returns."""
    if not fast:
        reference = ReferenceCopier(world.side, lambda: ())
        return reference.save, reference.load
    world.side.__dict__.pop("residents", None)
    world.side.__dict__.pop("row_table", None)
    device = Device(monkeypatch)
    copier = device.copier(world.side, memory)

    def save(copy: HostCopy, request: Any) -> None:
        copier.save(copy, request).check()
        device.finish()

    def load(copy: HostCopy, request: Any) -> None:
        copier.load(copy, request)
        device.finish()

    return save, load


def scatter(memory: HostMemory) -> None:
    """Leaves no more than two neighbours free; other copies have the rest."""
    taken = memory.pool.take(memory.pool.total)
    memory.pool.give_back([unit for unit in taken if unit % 3])


def returns_whole(world: Served, load: Transfer, copy: HostCopy, wanted: Any) -> None:
    """A load into other pages and another slot gives ``wanted`` back, an empty ring, and changes nothing else."""
    oracle.poison(world.pool)
    again, before = world.resume(copy.tokens, 3), oracle.snapshot(world.pool)
    load(copy, world.request(again))
    oracle.compare(wanted, oracle.read(world.pool, again.slots, copy.tokens, 3))
    oracle.assert_only_changed(before, world.pool, oracle.may_change(world.pool, again.slots, copy.tokens, 3))
    assert oracle.cleared_ring_ok(world.pool, 3, copy.tokens)
    oracle.release(world.allocator, again.slots)


def filled(world: Served, tokens: int) -> tuple[oracle.Request, Any]:
    """A request, and every byte of it that must survive."""
    oracle.fill(world.pool, seed=tokens)
    request = world.start(tokens, slot=1)
    return request, oracle.read(world.pool, request.slots, tokens, 1)


@pytest.mark.parametrize("longer", [0, 3])
def test_any_length_even_none_and_with_the_longer_tails_of_another_stage(monkeypatch, world, fast, longer):
    """Of no token nothing is taken, and a load empties the rings all the same. Units behind a stage's own tail are
    neither written nor read."""
    own = world.memory.units
    agreed = dataclasses.replace(own, tails=tuple(tail + longer for tail in own.tails))
    memory = HostMemory(world.side.families, ArenaSize(agreed, 90), pin=False)
    save, load = copier_of(monkeypatch, world, memory, fast)
    scatter(memory)
    for tokens in (0, 1, 3, 126, 127, 129, 255, 256, 257, 383, 700):
        memory.arena.region.fill_(POISON)
        request, wanted = filled(world, tokens)
        copy = memory.allocate(tokens, world.side.geometry)
        assert len(copy.units) == -(-tokens // 256) + own.tail(tokens) + longer
        save(copy, world.request(request))
        oracle.release(world.allocator, request.slots)
        left = set(range(90)) - set(copy.units[: len(copy.units) - longer])
        assert all(bool((memory.bytes_of(unit) == POISON).all()) for unit in left), "a unit of others, or behind"
        copy.checksums = verify.checksums(copy)
        assert len(copy.checksums) == len(copy.units)
        verify.check_host(copy)
        returns_whole(world, load, copy, wanted)
        copy.release()


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_each_rank_writes_its_own_units_and_all_make_the_whole(monkeypatch, world, fast, ranks):
    """A rank sees nothing here that another one saved. One without units of the tail launches no kernel for rows."""
    tokens, parts = 389, {}
    memories = [HostMemory(world.side.families, ArenaSize(world.memory.units, 90), pin=False) for _ in range(ranks)]
    request, wanted = filled(world, tokens)
    for rank, memory in enumerate(memories):
        memory.arena, memory.rank, memory.ranks = memories[0].arena, rank, ranks
        save, load = copier_of(monkeypatch, world, memory, fast)
        rows, launched = copier_module.copy_rows, []
        monkeypatch.setattr(copier_module, "copy_rows", lambda *a, r=rows, n=launched: (n.append(1), r(*a)))
        scatter(memory)
        copy = memory.allocate(tokens, world.side.geometry)
        memory.arena.region.fill_(POISON)
        save(copy, world.request(request))
        own = {copy.units[index] for index in copy.share}
        assert not own & parts.keys()
        assert all(bool((memory.bytes_of(unit) == POISON).all()) for unit in set(range(90)) - own)
        assert bool(launched) is (fast and bool(own & {*copy.tail_units}))
        parts |= {unit: memory.bytes_of(unit).clone() for unit in own}
    assert parts.keys() == {*copy.units}
    for unit, part in parts.items():
        memory.bytes_of(unit).copy_(part)
    oracle.release(world.allocator, request.slots)
    returns_whole(world, load, copy, wanted)
