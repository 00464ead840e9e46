"""HostMemory allocates all or nothing, accounts to the byte, and loses no block with a handle."""

from __future__ import annotations

import gc

import pytest
from builders import FakeEvent, host_memory
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dsv4.cache.family import Group
from sglang_dsv4.errors import CopyConsumed, HostMemoryExhausted
from sglang_dsv4.hostmem import regions
from sglang_dsv4.hostmem.board import Board
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.transfer.copier import _runs

# builders.SMALL_RATIOS = (0, 4, 128, 4): bytes of a block, rounded up to 4096 by hand
BLOCK = 94_208  # 2 * (37,440 + 8,448) + 1,728 and padding
WINDOW = 462_848  # 4 * 74,752 + 2 * (65,536 + 16,384)
REQUEST = 524_288


def totals(memory: HostMemory) -> dict[str, tuple[int, int]]:
    return {group.value: (pool.available, pool.held) for group, pool in memory.pools.items()}


def test_regions_cover_the_arena_one_after_the_other():
    memory, _ = host_memory(blocks=8, copies=3)
    starts = (0, 8 * BLOCK), (8 * BLOCK, 3 * WINDOW), (8 * BLOCK + 3 * WINDOW, 3 * REQUEST)
    assert tuple((r.start, r.nbytes) for r in memory.regions.values()) == starts
    assert memory.arena.nbytes == 8 * BLOCK + 3 * (WINDOW + REQUEST)
    for group, region in memory.regions.items():
        tensor = memory.region_tensor(group)
        assert tensor.numel() == region.nbytes
        assert tensor.data_ptr() == memory.arena.region.data_ptr() + region.start
    memory.check_integrity()
    memory.arena.nbytes -= 4096
    with pytest.raises(AssertionError, match=r"regions cover \d+ bytes, the arena has"):
        memory.check_integrity()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (1025, 5)])
def test_accounting_to_the_byte(tokens, blocks):
    memory, geometry = host_memory()
    copy = memory.allocate(tokens, geometry, weight_version="w1")
    assert {group: len(numbers) for group, numbers in copy.blocks.items()} == {
        Group.PAGED: blocks, Group.WINDOW: 1, Group.REQUEST: 1,
    }  # fmt: skip
    assert copy.nbytes == memory.held_bytes == blocks * BLOCK + WINDOW + REQUEST
    assert (copy.tokens, copy.weight_version, memory.copies, copy.released) == (tokens, "w1", 1, False)
    assert totals(memory) == {"paged": (8 - blocks, blocks), "window": (2, 1), "request": (2, 1)}
    memory.check_integrity()
    copy.release()
    assert (memory.held_bytes, memory.copies, memory.leaks) == (0, 0, 0)
    memory.check_integrity()
    with pytest.raises(CopyConsumed, match=f"{tokens} tokens"):
        _ = copy.blocks


@pytest.mark.parametrize("lacking", list(Group))
def test_without_room_nothing_is_taken_and_the_setting_is_named(lacking):
    memory, geometry = host_memory(blocks=3, copies=2)
    pool = memory.pools[lacking]
    blocks = pool.take(pool.available - 1)
    before = totals(memory)
    kept = memory.allocate(256, geometry)
    setting = "raise DSV4_HOST_GB" if lacking is Group.PAGED else "DSV4_HOST_COPIES"
    with pytest.raises(HostMemoryExhausted, match=rf"{lacking.value} blocks .*0 of \d .*{setting}"):
        memory.allocate(256, geometry)
    kept.release()
    assert totals(memory) == before
    pool.give_back(blocks)
    memory.check_integrity()


@pytest.mark.parametrize("failing", list(Group))
def test_a_failure_in_the_middle_takes_nothing(monkeypatch, failing):
    memory, geometry = host_memory()

    def take(count, now):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(memory.pools[failing], "take", take)
        memory.allocate(600, geometry)
    assert totals(memory) == {"paged": (8, 0), "window": (3, 0), "request": (3, 0)}
    assert memory.copies == 0
    memory.check_integrity()


def test_blocks_of_a_released_copy_wait_for_its_last_transfer():
    memory, geometry = host_memory(blocks=4, copies=2)
    copy, event = memory.allocate(512, geometry), FakeEvent()
    busy = {group: set(numbers) for group, numbers in copy.blocks.items()}
    copy.lease.used_by = event
    memory.touched(copy)
    copy.release()
    memory.check_integrity()
    other = memory.allocate(512, geometry)
    assert event.waits == 0
    assert all(not busy[group] & set(numbers) for group, numbers in other.blocks.items())
    last = memory.allocate(512, geometry)  # only the busy blocks are left
    assert event.waits > 0
    assert {group: set(numbers) for group, numbers in last.blocks.items()} == busy
    memory.check_integrity()


@pytest.mark.parametrize("shared", (False, True))
def test_no_handle_outlives_the_arena(shared: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A live one cannot be used, and a dead one is counted, also where other ranks would have been asked first."""
    memory, geometry = host_memory()
    if shared:
        memory.arena.board = Board(bytearray(Board.bytes_for(2)), 0, 2)
    alive, dies = memory.allocate(600, geometry), memory.allocate(300, geometry)
    dies.lease.used_by = event = FakeEvent()
    memory.touched(dies)
    del dies
    gc.collect()
    if not shared:
        assert (memory.leaks, memory.copies) == (1, 1)
        memory.allocate(1_280, geometry).release()  # five blocks, of which the dead copy had two
        assert event.waits == 1, "a transfer still read them"
    memory.close()
    assert caplog.text.count("died without release") == 1
    assert (memory.leaks, memory.copies, memory.held_bytes) == (1, 0, 0)
    with pytest.raises(CopyConsumed):
        _ = alive.blocks
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
    ranks = [host_memory(blocks=14, copies=5)[0] for _ in range(2)]
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
        first, second = (copy.blocks for copy in copies)
        assert first == second
        held.append(copies)
    for copies in held:
        for copy in copies:
            copy.release()


def test_registered_chunks_begin_at_blocks_and_no_copy_crosses_one(monkeypatch):
    monkeypatch.setattr(regions, "CHUNK_BYTES", 3 * BLOCK + 5)
    memory, _ = host_memory(blocks=8, copies=9)
    paged = memory.regions[Group.PAGED]
    assert (paged.chunk, paged.chunk_starts) == (3, [0, 3 * BLOCK, 6 * BLOCK])
    assert memory.arena._parts[:3] == [(0, 3 * BLOCK), (3 * BLOCK, 6 * BLOCK), (6 * BLOCK, 8 * BLOCK)]
    assert [last for _, last in memory.arena._parts][-1] == memory.arena.nbytes
    for blocks, runs in (
        ([0, 1, 2, 3, 4], [(0, 3), (3, 5)]),
        ([1, 2], [(0, 2)]),
        ([2, 3], [(0, 1), (1, 2)]),
        ([0, 1, 4, 5, 6, 7], [(0, 2), (2, 4), (4, 6)]),
    ):
        assert list(_runs(blocks, paged.chunk)) == runs
