"""The copier moves no wrong byte on a pretended device whose streams run late and in any allowed order."""

from __future__ import annotations

import oracle
import pytest
import torch
from builders import DEVICE, POISON, Served, served
from pretended_device import Device, Event

from sglang_dsv4.errors import AnotherRank, CopyEngineError, IndexMismatch
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import FLASH_RATIOS, PoolSpec, make_pool
from sglang_dsv4.transfer import copier as copier_module
from sglang_dsv4.transfer import copy_engine
from sglang_dsv4.transfer import locate as locate_module
from sglang_dsv4.transfer.copier import Copier
from sglang_dsv4.transfer.locate import Request
from sglang_dsv4.transfer.pages_in_use import PagesInUse
from sglang_dsv4.transfer.reference import ReferenceCopier, pieces, tail_image

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a real device is tested in test/gpu")

SIZES = {"one a slot": (1, 1), "three a slot": (3, 2), "all in one": (100, 40)}
# Every size in every order of the streams; lateness alternates so that all pairs occur.
CASES = [
    (order, (row + column) % 2 == 0, size)
    for row, order in enumerate(["engine", "kernels", "main", "forward", 1, 2])
    for column, size in enumerate(SIZES)
]
TOKENS = (1_900, 130, 1_000, 257, 2_047)
OPS = ("copy_pages", "copy_rows", "copy_to_host", "copy_to_device")
PART = 5  # units that are registered together


def sized(monkeypatch, world: Served, units_a_slot: int, short: int) -> None:
    nbytes = world.memory.units.nbytes
    monkeypatch.setattr(copier_module, "SLOT_BYTES", units_a_slot * nbytes + 5)
    monkeypatch.setattr(copier_module, "SHORT_BYTES", short * nbytes + 5)


def device_of(monkeypatch, world: Served, *how) -> Device:
    """A device that copies within one registered part of the arena, as a driver does."""
    device = Device(monkeypatch, *how)
    base, part = world.memory.arena.region.data_ptr(), PART * world.memory.units.nbytes
    for number, name in enumerate(("copy_to_host", "copy_to_device")):
        move = getattr(copier_module, name)

        def within(*copy: int, move=move, number=number) -> None:
            first, last = copy[number] - base, copy[number] - base + copy[2] - 1
            assert 0 <= first <= last < world.memory.arena.nbytes and first // part == last // part, (
                "a copy over two parts"
            )
            move(*copy)

        monkeypatch.setattr(copier_module, name, within)
    return device


def own_pages(world: Served, request: oracle.Request) -> dict[oracle.BufferKey, list[int]]:
    """Pages or state rows of each buffer that are the request's alone."""
    found = {}
    for key in oracle.buffers(world.pool):
        rows = [row for _, row in oracle.live_rows(world.pool, key, request.slots, request.n, request.req_slot)]
        if key[0] == "swa_kv":
            rows = [row // 256 for row in rows]
        elif not oracle.FAMILIES[key[0]].ring:
            rows = (request.slots[::256] // 256).tolist()
        found[key] = sorted(set(rows))
    return found


def overwrite(world: Served, pages: dict[oracle.BufferKey, list[int]]) -> None:
    for key, rows in pages.items():
        oracle.buffers(world.pool)[key][rows] = POISON


def save(copier: Copier, copy: HostCopy, request: Request) -> None:
    """A save that is waited for, and asked."""
    copier.save(copy, request).check()
    copy.lease.used_by.synchronize()


def wrong(world: Served, request: oracle.Request) -> Request:
    """``request`` with one slot off its page."""
    indices = world.request(request).indices.clone()
    indices[-1] += 1
    return world.request(request)._replace(indices=indices)


@pytest.fixture
def shared() -> Served:
    world = served((4, 128), units=300, pages=40, swa_pages=40, requests=8)
    world.memory.chunk = PART
    return world


def fresh(world: Served) -> Served:
    """The same pool; its tables may be uploaded anew."""
    world.side.__dict__.pop("residents", None)
    world.side.__dict__.pop("row_table", None)
    return world


@pytest.mark.both_layouts  # here alone and where pages are shared: a buffer's stride is all that the layout changes
@pytest.mark.parametrize(("order", "late", "size"), CASES)
def test_transfers_one_after_the_other(monkeypatch, shared, order, late, size):
    """Pages are somebody else's as soon as a save returns; some requests turn out to be wrong; units are scattered."""
    world = fresh(shared)
    sized(monkeypatch, world, *SIZES[size])
    device = device_of(monkeypatch, world, order, late)
    copier = device.copier(world.side, world.memory)
    oracle.fill(world.pool, seed=3)
    world.memory.arena.region.fill_(POISON)
    pool, copies, wanted = world.memory.pool, [], []
    everything = pool.take(pool.total)
    pool.give_back([unit for unit in everything if unit % 3])  # no more than two neighbours
    for number, tokens in enumerate(TOKENS):
        request, other = world.start(tokens, slot=number), world.start(600, slot=7)
        copy, spare = (world.memory.allocate(n, world.side.geometry) for n in (tokens, 600))
        wanted.append(oracle.read(world.pool, request.slots, tokens, number))
        if number % 2:
            with pytest.raises(IndexMismatch, match="position 599 of 600"):
                save(copier, spare, wrong(world, other))
        save(copier, copy, world.request(request))
        overwrite(world, own_pages(world, request))
        for one in (request, other):
            oracle.release(world.allocator, one.slots)
        spare.release()
        copies.append(copy)

    loaded, again = [], []
    for number in (3, 0, 4, 2, 1):
        tokens, slot = TOKENS[number], 6 - number
        request = world.resume(tokens, slot)
        before = oracle.snapshot(world.pool) if number == 3 else None
        if number % 2:
            with pytest.raises(IndexMismatch):
                copier.load(copies[number], wrong(world, request))
            if before is not None:
                device.finish()
                oracle.assert_only_changed(before, world.pool)
        copier.load(copies[number], world.request(request))
        loaded.append((number, request))
        if number in {0, 2}:  # and at once out again
            again.append((number, world.memory.allocate(tokens, world.side.geometry), request))
            copier.save(again[-1][1], world.request(request))
    device.finish()
    for number, request in loaded:
        oracle.compare(wanted[number], oracle.read(world.pool, request.slots, request.n, request.req_slot))
        assert oracle.cleared_ring_ok(world.pool, request.req_slot, request.n)
    for number, copy, request in again:
        spans = world.plan(request)
        pairs = zip(*(pieces(world.side, one, spans, tail_image(one)) for one in (copies[number], copy)), strict=True)
        for first, second in pairs:
            assert torch.equal(first.host, second.host), (number, first.spans.family.name, first.layer)
    device.finish()
    for _, request in loaded:
        oracle.release(world.allocator, request.slots)
    for copy in (*copies, *(copy for _, copy, _ in again)):
        copy.release()
    pool.give_back([unit for unit in everything if not unit % 3])
    world.memory.check_integrity()


@pytest.mark.parametrize(("order", "late", "size"), CASES)
def test_transfers_that_nobody_waits_for(monkeypatch, shared, order, late, size):
    """Saves in flight, loads behind them, more searches than are kept: whatever is handed on comes after its reader."""
    world = fresh(shared)
    sized(monkeypatch, world, *SIZES[size])
    monkeypatch.setattr(locate_module, "SEARCHES", 3)
    device = device_of(monkeypatch, world, order, late)
    copier = device.copier(world.side, world.memory)
    oracle.fill(world.pool, seed=3)
    requests = [world.start(tokens, slot=number) for number, tokens in enumerate(TOKENS)]
    wanted = [oracle.read(world.pool, one.slots, one.n, one.req_slot) for one in requests]
    copies = [world.memory.allocate(tokens, world.side.geometry) for tokens in TOKENS]
    searches = [copier.save(*one) for one in zip(copies, map(world.request, requests), strict=True)]
    bad = copier.save(spare := world.memory.allocate(TOKENS[1], world.side.geometry), wrong(world, requests[1]))
    places = [world.resume(TOKENS[number], slot) for slot, number in ((5, 1), (6, 3))]
    for place, number in zip(places, (1, 3), strict=True):
        searches[number].check(late=True)
        copier.load(copies[number], world.request(place))
    device.main.wait_event(copies[-1].lease.gathered)
    for one in requests:
        device.main.enqueue(lambda one=one: overwrite(world, own_pages(world, one)))
    device.finish()
    for place, number in zip(places, (1, 3), strict=True):
        oracle.compare(wanted[number], oracle.read(world.pool, place.slots, place.n, place.req_slot))
    for search in searches:
        search.check(late=True)
    with pytest.raises(IndexMismatch, match=r"position 129 of 130 has its full slot off its page"):
        bad.check(late=True)
    for one in (*requests, *places):
        oracle.release(world.allocator, one.slots)
    for number, copy in enumerate(copies):
        again = world.resume(TOKENS[number], number)
        copier.load(copy, world.request(again))
        device.finish()
        oracle.compare(wanted[number], oracle.read(world.pool, again.slots, again.n, number))
        oracle.release(world.allocator, again.slots)
    for copy in (*copies, spare):
        copy.release()
    world.memory.check_integrity()


@pytest.mark.parametrize(("size", "waits"), [("one a slot", True), ("three a slot", True), ("all in one", False)])
def test_who_gets_the_pages_of_a_save_does_not_wait_for_the_link(monkeypatch, shared, size, waits):
    """A long save gathers its last page when all but two slots of the ring have moved."""
    world = fresh(shared)
    sized(monkeypatch, world, *SIZES[size])
    device, opened = device_of(monkeypatch, world, "main"), Event(None)
    opened.recorded, move = 1, copier_module.copy_to_host

    def move_later(*copy: int) -> None:
        device.streams[copy[-1]].wait_event(opened)
        move(*copy)

    monkeypatch.setattr(copier_module, "copy_to_host", move_later)
    copier, in_use = device.copier(world.side, world.memory), PagesInUse(world.side.device, tuple, device)
    oracle.fill(world.pool, seed=3)
    request, copy = world.start(1_900, slot=1), world.memory.allocate(1_900, world.side.geometry)
    wanted, overwritten = oracle.read(world.pool, request.slots, 1_900, 1), []
    copier.save(copy, world.request(request))
    in_use.transferred(copy.lease.used_by, copy.lease.gathered)
    in_use.wait_on_the_stream()
    device.main.enqueue(lambda: overwritten.append(overwrite(world, own_pages(world, request))))
    while device.step():
        pass
    assert bool(overwritten) is not waits and not copy.lease.used_by.query()
    opened.passed = 1
    in_use.wait()
    assert copy.lease.used_by.query()
    device.finish()
    oracle.release(world.allocator, request.slots)
    again = world.resume(1_900, slot=2)
    copier.load(copy, world.request(again))
    device.finish()
    oracle.compare(wanted, oracle.read(world.pool, again.slots, 1_900, 2))
    oracle.release(world.allocator, again.slots)
    copy.release()


@pytest.mark.both_layouts
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("first_page", [1, 3, 4])
def test_pages_that_are_shared_are_not_written(monkeypatch, shared, size, first_page):
    """A plain server's prefix tree holds the first pages: others read them."""
    world = fresh(shared)
    sized(monkeypatch, world, *SIZES[size])
    device = device_of(monkeypatch, world, "engine", True)
    copier = device.copier(world.side, world.memory)
    oracle.fill(world.pool, seed=5)
    request, copy = world.start(1_000, slot=1), world.memory.allocate(1_000, world.side.geometry)
    wanted = oracle.read(world.pool, request.slots, 1_000, 1)
    save(copier, copy, world.request(request))
    oracle.release(world.allocator, request.slots)
    oracle.fill(world.pool, seed=6)
    again = world.resume(1_000, slot=2)
    before = oracle.read(world.pool, again.slots, 1_000, 2)
    copier.load(copy, world.request(again), first_page)
    device.finish()
    kept = {key for key in wanted if oracle.grows(key[0]) and key[2] < first_page * 256}
    assert kept
    oracle.compare(
        {key: (before if key in kept else wanted)[key] for key in wanted},
        oracle.read(world.pool, again.slots, 1_000, 2),
    )
    device.finish()
    copy.release()
    oracle.release(world.allocator, again.slots)


def test_a_load_that_another_rank_refuses_writes_nothing(monkeypatch, shared):
    def another_refuses(work):
        work()
        raise AnotherRank("another rank could not load the request")

    world = fresh(shared)
    device = device_of(monkeypatch, world)
    copier = Copier(world.side, world.memory, tuple, another_refuses, cuda=device)
    oracle.fill(world.pool, seed=5)
    request, copy = world.start(700, slot=1), world.memory.allocate(700, world.side.geometry)
    save(copier, copy, world.request(request))
    oracle.release(world.allocator, request.slots)
    again, before = world.resume(700, slot=2), oracle.snapshot(world.pool)
    with pytest.raises(AnotherRank):
        copier.load(copy, world.request(again))
    device.finish()
    oracle.assert_only_changed(before, world.pool)
    copy.release()
    oracle.release(world.allocator, again.slots)


@pytest.mark.parametrize("order", ["engine", "kernels", "main", "forward", 1, 2, 3])
def test_traps_4_and_5_what_comes_before_and_after(monkeypatch, shared, order):
    """A save sees what the caller's stream has queued. A load comes after the last forward of the pages' owner, on a
    stream of its own, and before whatever the caller's stream gets next."""
    world = fresh(shared)
    device = device_of(monkeypatch, world, order)
    copier = device.copier(world.side, world.memory)
    oracle.fill(world.pool, seed=5)
    request = world.start(700, slot=1)
    wanted = oracle.read(world.pool, request.slots, 700, 1)
    pages = own_pages(world, request)
    kept = {key: oracle.buffers(world.pool)[key][rows].clone() for key, rows in pages.items()}
    overwrite(world, pages)

    def write_late() -> None:
        for key, rows in pages.items():
            oracle.buffers(world.pool)[key][rows] = kept[key]

    device.main.enqueue(write_late)
    copy = world.memory.allocate(700, world.side.geometry)
    save(copier, copy, world.request(request))
    oracle.release(world.allocator, request.slots)
    again = world.resume(700, slot=2)
    device.forward.enqueue(lambda: overwrite(world, own_pages(world, again)))
    seen = []
    copier.load(copy, world.request(again))
    device.main.enqueue(lambda: seen.append(oracle.read(world.pool, again.slots, 700, 2)))
    device.finish()
    oracle.compare(wanted, seen[0])
    oracle.compare(wanted, oracle.read(world.pool, again.slots, 700, 2))
    assert oracle.cleared_ring_ok(world.pool, 2, 700)
    oracle.release(world.allocator, again.slots)
    copy.release()


@pytest.mark.parametrize(
    ("way", "step"),
    [
        (way, step)
        for way in ("save", "save of one chunk", "load")
        for step in ("copy_pages", "locate", "copy_rows", "copy_to_device" if way == "load" else "copy_to_host")
    ],
)
def test_traps_5_and_7_a_transfer_that_fails_half_way(monkeypatch, shared, way, step):
    """Copies already enqueued still touch the units: these come back, but nobody gets them before the event."""
    world, save = fresh(shared), way != "load"
    sized(monkeypatch, world, *SIZES["all in one" if way == "save of one chunk" else "one a slot"])
    device = device_of(monkeypatch, world)
    copier = device.copier(world.side, world.memory)
    request = world.start(300, slot=1)
    copy = world.memory.allocate(300, world.side.geometry)
    copier.save(copy, world.request(request))
    device.finish()

    def broken(*_):
        raise RuntimeError("no transfer")

    with monkeypatch.context() as patch:
        patch.setattr(f"sglang_dsv4.transfer.{'locate' if step == 'locate' else 'copier'}.{step}", broken)
        with pytest.raises(RuntimeError, match="no transfer"):
            (copier.save if save else copier.load)(copy, world.request(request))
    assert not copy.released
    world.memory.touched(copy)
    used_by = copy.lease.used_by
    copy.release()
    while device.main.step() or (way != "save of one chunk" and copier._kernels.step()):
        pass  # the stream that copies is behind
    other = world.memory.allocate(300, world.side.geometry)
    assert not used_by.query(), "there are others, so these were not waited for"
    other.release()
    device.finish()
    oracle.release(world.allocator, request.slots)
    world.memory.check_integrity()


@pytest.mark.parametrize("ratios", [(0, 4, 128), FLASH_RATIOS], ids=["3 layers", "43 layers"])
def test_a_transfer_sends_and_launches_the_same_whatever_the_layers(monkeypatch, ratios):
    """One launch to find it, one for the rows, one for the pages; no static byte goes to the card again."""
    world = served(ratios, pages=2, swa_pages=2, requests=1)
    device = Device(monkeypatch, lazy=False)
    copier = device.copier(world.side, world.memory)
    calls: list[str] = []
    for module, name in [(copier_module, name) for name in OPS] + [(locate_module, "locate")]:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real, name=name: (calls.append(name), real(*a)))
    request, copy = world.start(389, slot=0), world.memory.allocate(389, world.side.geometry)
    for transfer in (copier.save, copier.load):
        calls.clear()
        before = world.side.residents.sent_bytes
        transfer(copy, world.request(request))
        copies = ["copy_to_host" if transfer == copier.save else "copy_to_device"] * 2
        assert sorted(calls) == sorted(["locate", "copy_rows", "copy_pages", *copies])
        assert world.side.residents.sent_bytes == before
    device.finish()
    copy.release()


def test_without_the_driver_a_server_starts_and_torch_moves_its_copies(monkeypatch):
    """ROCm. Where the driver must be there, the error says what to set."""
    monkeypatch.setattr(copy_engine, "LIBRARY", "libnothing.so.1")
    copy_engine._driver.cache_clear()
    host = make_pool(PoolSpec()).attach_host(Settings(host_gb=0.05))
    assert isinstance(host._make_copier(fast=True), ReferenceCopier)
    with pytest.raises(CopyEngineError, match="DSV4_TRANSFER=torch"):
        copy_engine.require_driver()
    copy_engine._driver.cache_clear()
