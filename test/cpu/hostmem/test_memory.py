"""HostMemory allocates all or nothing, accounts to the byte, and loses no unit with a handle."""

from __future__ import annotations

import dataclasses
import gc

import pytest
from builders import SMALL_RATIOS, FakeEvent, host_memory
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.units import Units
from sglang_dsv4.errors import CopyConsumed, HostMemoryExhausted
from sglang_dsv4.hostmem import memory as memory_module
from sglang_dsv4.hostmem.board import Board
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.hostmem.pool import UnitPool
from sglang_dsv4.hostmem.sizing import ArenaSize

UNIT = 94_208  # of builders.SMALL_RATIOS (0, 4, 128, 4): 2 * (37,440 + 8,448) + 1,728, rounded up to 4,096 by hand


def tail_bytes(tokens: int) -> int:
    """Four layers of the window, two of ratio 4 and its indexer, one of ratio 128; each at 128, a family at 256."""
    window, open4 = min(tokens, 127), min(tokens, 4 + tokens % 4)
    at = 4 * -(-window * 584 // 128) * 128  # the others' rows are multiples of 128
    for nbytes in (2 * open4 * 8_192, 2 * open4 * 2_048, tokens % 128 * 4_096):
        at = -(-at // 256) * 256 + nbytes
    return at


def tail_units(tokens: int) -> int:
    return -(-tail_bytes(tokens) // UNIT)


def totals(memory: HostMemory) -> tuple[int, int]:
    return memory.pool.available, memory.pool.held


def test_units_cover_the_arena_one_after_the_other():
    memory, _ = host_memory(17)
    assert (memory.arena.nbytes, memory.units.nbytes, memory.pool.total) == (17 * UNIT, UNIT, 17)
    for unit in range(17):
        view = memory.bytes_of(unit)
        assert (memory.offset(unit), view.numel()) == (unit * UNIT, UNIT)
        assert view.data_ptr() == memory.arena.region.data_ptr() + unit * UNIT


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (127, 1), (255, 1), (256, 1), (257, 2), (1_025, 5)])
def test_accounting_to_the_byte(tokens, pages):
    memory, geometry = host_memory()
    copy = memory.allocate(tokens, geometry, weight_version="w1")
    tail = tail_units(tokens)
    assert (copy.in_pages, copy.in_tail, copy.tail_units) == (pages, tail, copy.units[pages:])
    assert len(set(copy.units)) == pages + tail and copy.pages(0) == copy.units[:pages]
    assert copy.nbytes == memory.held_bytes == (pages + tail) * UNIT
    assert (copy.tokens, copy.weight_version, memory.copies, copy.released) == (tokens, "w1", 1, False)
    assert totals(memory) == (64 - pages - tail, pages + tail)
    memory.check_integrity()
    copy.release()
    assert (memory.held_bytes, memory.copies, memory.leaks) == (0, 0, 0)
    memory.check_integrity()
    with pytest.raises(CopyConsumed, match=f"{tokens} tokens"):
        _ = copy.units


@pytest.mark.parametrize(("saved", "begins", "tail"), [(2, 0, True), (0, 3, True), (0, 3, False), (4, 0, True)])
def test_a_copy_of_the_pages_behind_others(saved, begins, tail):
    """Pages that another copy has, or that lie before the first one."""
    memory, geometry = host_memory()
    first = memory.allocate(1_024, geometry)
    held = memory.pool.held
    copy = memory.allocate(1_024, geometry, saved=first.pages(0)[:saved], begins=begins, tail=tail)
    new = 4 - begins - saved + (tail_units(1_024) if tail else 0)
    assert (memory.pool.held, copy.first_page, len(copy.units)) == (held + new, begins + saved, saved + new)
    assert copy.units[:saved] == first.units[:saved] and not set(copy.units[saved:]) & set(first.units)
    assert (copy.pages(begins + saved), copy.in_tail) == (copy.units[saved : 4 - begins], new - (4 - begins - saved))
    assert copy.share == range(saved, saved + new) and copy.saved_bytes == new * UNIT
    assert (copy.page_share, copy.tail_share) == (range(begins + saved, 4), range(copy.in_tail))
    memory.check_integrity()
    first.release()
    assert memory.pool.held == saved + new, "what the second holds, too, stays"
    copy.release()
    memory.check_integrity()


def test_the_bytes_of_a_tail_that_lies_in_pieces():
    """Neighbours go together, no run crosses a part's end, and behind the live rows nothing moves."""
    memory, geometry = host_memory(30)
    memory.chunk, free = 8, (3, 5, 6, 7, 8, 9, 11, 13, 14, 15, 16, 17, 18, 19, 20, 23, 24, 26)
    for tokens in (1_027, 127):
        others = [unit for unit in memory.pool.take(30) if unit not in free]
        memory.pool.give_back(list(free))
        copy, found, moved = memory.allocate(tokens, geometry), {}, 0
        for arena, start, nbytes in copy.tail_runs():
            assert arena % UNIT == start % UNIT == 0
            assert arena // UNIT // 8 == (arena + nbytes - 1) // UNIT // 8, "crosses a part's end"
            found |= {(start + byte) // UNIT: (arena + byte) // UNIT for byte in range(0, nbytes, UNIT)}
            moved += nbytes
        assert [found[index] for index in range(len(found))] == copy.tail_units
        assert moved == tail_bytes(tokens) and len(copy.tail_units) == tail_units(tokens)
        copy.release()
        memory.pool.give_back(others)
        memory.check_integrity()


@pytest.mark.parametrize("tokens", [256, 1_100])
def test_without_room_nothing_is_taken_and_the_setting_is_named(tokens):
    memory, geometry = host_memory()
    need = -(-tokens // 256) + tail_units(tokens)
    units = memory.pool.take(64 - 2 * need + 1)
    before = totals(memory)
    kept = memory.allocate(tokens, geometry)
    said = rf"^{tokens} tokens need {need} units of {UNIT} bytes, {need - 1} of 64 are free: raise DSV4_HOST_GB \(short"
    with pytest.raises(HostMemoryExhausted, match=said):
        memory.allocate(tokens, geometry)
    kept.release()
    assert totals(memory) == before
    memory.pool.give_back(units)
    memory.check_integrity()


@pytest.mark.parametrize("failing", ["pages", "tail"])
def test_a_failure_in_the_middle_takes_nothing(monkeypatch, failing):
    memory, geometry = host_memory()
    other = memory.allocate(600, geometry)
    before, counts = totals(memory), []

    def take(pool, count, now):
        counts.append(count)
        if len(counts) == (1 if failing == "pages" else 2):
            raise KeyboardInterrupt
        return real(pool, count, now)

    real = UnitPool.take
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(UnitPool, "take", take)
        memory.allocate(600, geometry, saved=other.pages(0)[:1])
    assert counts == [2, tail_units(600)][: len(counts)]
    assert totals(memory) == before and memory.copies == 1
    memory.check_integrity()
    other.release()


def test_units_of_a_released_copy_wait_for_its_last_transfer():
    need = 2 + tail_units(512)
    memory, geometry = host_memory(2 * need)
    copy, event = memory.allocate(512, geometry), FakeEvent()
    busy = set(copy.units)
    copy.lease.used_by = event
    memory.touched(copy)
    copy.release()
    memory.check_integrity()
    other = memory.allocate(512, geometry)
    assert event.waits == 0 and not busy & set(other.units)
    last = memory.allocate(512, geometry)  # only the busy units are left
    assert event.waits > 0 and set(last.units) == busy
    memory.check_integrity()


@pytest.mark.parametrize("shared", (False, True))
def test_no_handle_outlives_the_arena(shared: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A live one cannot be used, and a dead one is counted, also where other ranks would have been asked first."""
    memory, geometry = host_memory(10 + sum(map(tail_units, (600, 300, 1_280))) - 1)  # ten pages, one unit too few
    if shared:
        memory.arena.board = Board(bytearray(Board.bytes_for(2)), 0, 2)
    alive, dies = memory.allocate(600, geometry), memory.allocate(300, geometry)
    dies.lease.used_by = event = FakeEvent()
    memory.touched(dies)
    del dies
    gc.collect()
    if not shared:
        assert (memory.leaks, memory.copies) == (1, 1)
        memory.allocate(1_280, geometry).release()  # one unit is of the dead copy
        assert event.waits == 1, "a transfer still read them"
    memory.close()
    assert caplog.text.count("died without release") == 1
    assert (memory.leaks, memory.copies, memory.held_bytes) == (1, 0, 0)
    with pytest.raises(CopyConsumed):
        _ = alive.units
    alive.release()
    del alive
    gc.collect()
    memory.close()
    assert memory.leaks == 1
    memory.check_integrity()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1_500), st.integers(0, 5), st.booleans(), st.booleans()), max_size=40))
def test_one_history_gives_equal_numbers_however_far_the_streams_are(history):
    """Two ranks save and load the same requests; which of their transfers are over is each one's own."""
    ranks = [host_memory(60)[0] for _ in range(2)]
    _, geometry = host_memory()
    held = []
    for tokens, which, *over in history:
        if held and which < len(held):
            for copy in held.pop(which):
                copy.memory.touched(copy)  # a load
                copy.release()
        try:
            copies = [memory.allocate(tokens, geometry) for memory in ranks]
        except HostMemoryExhausted:
            continue
        for copy, passed in zip(copies, over, strict=True):
            copy.lease.used_by = event = FakeEvent()
            event.passed = passed
            copy.memory.touched(copy)
        first, second = (copy.units for copy in copies)
        assert first == second
        held.append(copies)
    for copies in held:
        for copy in copies:
            copy.release()


def test_registered_parts_begin_at_units_and_no_copy_crosses_one(monkeypatch):
    monkeypatch.setattr(memory_module, "CHUNK_BYTES", 3 * UNIT + 5)
    memory, _ = host_memory(20)
    assert memory.chunk == 3
    assert memory.arena._parts == [(at * UNIT, min(at + 3, 20) * UNIT) for at in range(0, 20, 3)]
    for units, runs in (
        ([], []),
        ([0, 1, 2, 3, 4], [(0, 3), (3, 5)]),
        ([1, 2], [(0, 2)]),
        ([2, 3], [(0, 1), (1, 2)]),
        ([0, 1, 4, 5, 6, 7], [(0, 2), (2, 4), (4, 6)]),
        ([5, 4, 3], [(0, 1), (1, 2), (2, 3)]),
    ):
        assert list(memory.runs(units)) == runs


def test_an_arena_too_small_for_the_tails_that_ranks_agreed_on_is_refused():
    """Each rank asked for enough; a request of one page must fit with the longest tail of any."""
    g = Geometry(SMALL_RATIOS)
    units = Units.of(g)
    longer = dataclasses.replace(units, tails=tuple(tail + 3 for tail in units.tails))
    size = ArenaSize(units, units.least).agreed([ArenaSize(units, units.least), ArenaSize(longer, 100)])
    assert (size.count, size.units.tails) == (units.least, longer.tails)
    with pytest.raises(HostMemoryExhausted, match="raise DSV4_HOST_GB"):
        HostMemory(families(g), size, pin=False)
