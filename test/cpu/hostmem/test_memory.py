"""HostMemory: all or nothing, accounted to the byte, and no block lost whatever happens to a handle."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest
from builders import FLASH_RATIOS, FakeEvent, host_memory

from sglang_dsv4.cache.families import Group
from sglang_dsv4.errors import CopyConsumed, HostMemoryExhausted
from sglang_dsv4.hostmem.memory import HostMemory

# builders.SMALL_RATIOS = (0, 4, 128, 4): bytes of a block, rounded up to 4096 by hand
BLOCK = 94_208  # 2 * (37,440 + 8,448) + 1,728 and padding
WINDOW = 462_848  # 4 * 74,752 + 2 * (65,536 + 16,384)
REQUEST = 524_288


def totals(memory: HostMemory) -> dict[str, tuple[int, int]]:
    return {group.value: (pool.available, pool.held) for group, pool in memory.pools.items()}


def test_strides():
    memory, _ = host_memory()
    assert {g: r.packed.block_stride for g, r in memory.regions.items()} == {
        Group.PAGED: BLOCK, Group.WINDOW: WINDOW, Group.REQUEST: REQUEST,
    }  # fmt: skip


def test_regions_cover_the_arena_one_after_the_other():
    memory, _ = host_memory(blocks=8, copies=3)
    assert [(r.start, r.nbytes) for r in memory.regions.values()] == [
        (0, 8 * BLOCK),
        (8 * BLOCK, 3 * WINDOW),
        (8 * BLOCK + 3 * WINDOW, 3 * REQUEST),
    ]
    assert memory.arena.nbytes == 8 * BLOCK + 3 * (WINDOW + REQUEST)
    for group, region in memory.regions.items():
        tensor = memory.region_tensor(group)
        assert tensor.numel() == region.nbytes
        assert tensor.data_ptr() == memory.arena.region.data_ptr() + region.start
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


def test_many_copies_hold_different_blocks():
    memory, geometry = host_memory()
    copies = [memory.allocate(tokens, geometry) for tokens in (256, 700, 1000)]
    for group in Group:
        numbers = np.concatenate([copy.blocks[group] for copy in copies])
        assert len(set(numbers.tolist())) == len(numbers)
    assert memory.held_bytes == 8 * BLOCK + 3 * (WINDOW + REQUEST)
    for number in (1, 0, 2):
        copies[number].release()
        memory.check_integrity()
    assert totals(memory) == {"paged": (8, 0), "window": (3, 0), "request": (3, 0)}


def test_no_blocks_of_tokens_names_the_arena_size():
    memory, geometry = host_memory(blocks=3)
    kept = memory.allocate(300, geometry)
    with pytest.raises(
        HostMemoryExhausted,
        match=rf"512 tokens need 2 paged blocks of {BLOCK} bytes, 1 of 3 are free: raise DSV4_HOST_GB \(short",
    ):
        memory.allocate(512, geometry)
    assert totals(memory) == {"paged": (1, 2), "window": (2, 1), "request": (2, 1)}
    memory.check_integrity()
    kept.release()
    memory.allocate(512, geometry).release()


@pytest.mark.parametrize("group", [Group.WINDOW, Group.REQUEST])
def test_no_room_for_another_copy_names_the_copies(group):
    memory, geometry = host_memory(copies=2)
    lacking = memory.pools[group].take(1)  # this group has one block less than the other
    kept = memory.allocate(1, geometry)
    with pytest.raises(HostMemoryExhausted, match=f"1 {group.value} blocks .* 0 of 2 .* DSV4_HOST_COPIES"):
        memory.allocate(1, geometry)
    kept.release()
    memory.pools[group].give_back(lacking, None)
    memory.check_integrity()


def test_the_shortage_is_told_in_gib():
    memory, geometry = host_memory(blocks=2)
    with pytest.raises(HostMemoryExhausted, match=rf"short of {9_998 * BLOCK / 2**30:.3f} GiB"):
        memory.allocate(10_000 * 256, geometry)


@pytest.mark.parametrize("failing", list(Group))
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_in_the_middle_takes_nothing(monkeypatch, failing, error):
    memory, geometry = host_memory()

    def take(count):
        raise error("while taking")

    monkeypatch.setattr(memory.pools[failing], "take", take)
    with pytest.raises(error, match="while taking"):
        memory.allocate(600, geometry)
    monkeypatch.undo()
    assert totals(memory) == {"paged": (8, 0), "window": (3, 0), "request": (3, 0)}
    assert memory.copies == 0
    memory.check_integrity()
    copies = [memory.allocate(tokens, geometry) for tokens in (1024, 768, 256)]
    assert len(copies) == 3


def test_releasing_twice_is_harmless():
    memory, geometry = host_memory()
    first = memory.allocate(300, geometry)
    first.release()
    second = memory.allocate(300, geometry)
    first.release()
    assert memory.copies == 1
    assert totals(memory) == {"paged": (6, 2), "window": (2, 1), "request": (2, 1)}
    memory.check_integrity()
    assert not second.released
    second.release()


def test_a_released_copy_cannot_be_used():
    memory, geometry = host_memory()
    copy = memory.allocate(300, geometry)
    copy.require_held()
    copy.release()
    assert copy.released
    with pytest.raises(CopyConsumed, match="300 tokens"):
        _ = copy.blocks
    with pytest.raises(CopyConsumed):
        copy.require_held()


def test_blocks_of_a_released_copy_wait_for_its_last_transfer():
    memory, geometry = host_memory(blocks=4, copies=2)
    copy, event = memory.allocate(512, geometry), FakeEvent()
    busy = {group: set(numbers.tolist()) for group, numbers in copy.blocks.items()}
    copy.lease.used_by = event
    copy.release()
    assert [pool.returning for pool in memory.pools.values()] == [2, 1, 1]
    memory.check_integrity()
    other = memory.allocate(512, geometry)
    assert event.waits == 0
    assert all(not busy[group] & set(numbers.tolist()) for group, numbers in other.blocks.items())
    last = memory.allocate(512, geometry)  # only the busy blocks are left
    assert event.waits > 0
    assert {group: set(numbers.tolist()) for group, numbers in last.blocks.items()} == busy
    memory.check_integrity()


def test_a_dropped_handle_is_a_leak_and_its_blocks_come_back(caplog):
    memory, geometry = host_memory()
    copy = memory.allocate(600, geometry)
    event = FakeEvent()
    copy.lease.used_by = event
    with caplog.at_level(logging.WARNING):
        del copy
        gc.collect()
    assert memory.leaks == 1
    assert "died without release" in caplog.text
    assert (memory.copies, memory.held_bytes) == (0, 0)
    assert totals(memory) == {"paged": (8, 0), "window": (3, 0), "request": (3, 0)}
    assert memory.pools[Group.PAGED].returning == 3, "a transfer may still read them"
    memory.check_integrity()


def test_dropping_a_released_handle_is_no_leak(caplog):
    memory, geometry = host_memory()
    copy = memory.allocate(600, geometry)
    copy.release()
    del copy
    gc.collect()
    assert memory.leaks == 0
    assert not caplog.records
    memory.check_integrity()


def test_a_stage_without_c128_takes_no_request_block():
    memory, geometry = host_memory(ratios=(0, 4, 4), copies=2)
    copy = memory.allocate(300, geometry)
    assert len(copy.blocks[Group.REQUEST]) == 0
    assert len(copy.blocks[Group.PAGED]) == 2
    assert memory.regions[Group.REQUEST].nbytes == 0
    memory.check_integrity()


def test_flash_bytes():
    """4097 tokens of the Flash model, in blocks of 256."""
    memory, geometry = host_memory(ratios=FLASH_RATIOS, blocks=17, copies=1)
    copy = memory.allocate(4097, geometry)
    assert copy.nbytes == 17 * 999_424 + 4_935_680 + 10_485_760
    copy.release()


def lose_a_block(memory):
    pool = memory.pools[Group.WINDOW]
    pool._free[np.flatnonzero(pool._free)[0]] = False


def double_a_block(memory):
    lease = next(iter(memory._leases))
    memory.pools[Group.PAGED]._free[lease.blocks[Group.PAGED][0]] = True


def give_two_copies_one_block(memory):
    first, second = list(memory._leases)[:2]
    first.blocks[Group.REQUEST][0] = second.blocks[Group.REQUEST][0]


def forget_a_lease(memory):
    memory._leases.pop()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lose_a_block, r"window blocks: free 0 \(counted 1\) \+ held 2 \(counted 2\) \+ returning 0 != total 3"),
        (double_a_block, r"paged blocks: free 5 \(counted 4\) \+ held 4 \(counted 4\) \+ returning 0 != total 8"),
        (give_two_copies_one_block, r"request blocks: free 1 \(counted 1\) \+ held 2 \(counted 2\).*two places"),
        (forget_a_lease, r"paged blocks: free 4 \(counted 4\) \+ held 2 \(counted 4\) \+ returning 0 != total 8"),
    ],
)
def test_integrity_finds_what_is_wrong(corrupt, message):
    memory, geometry = host_memory()
    copies = [memory.allocate(512, geometry) for _ in range(2)]
    memory.check_integrity()
    corrupt(memory)
    with pytest.raises(AssertionError, match=message):
        memory.check_integrity()
    for copy in copies:
        copy.lease.held = False  # past repair: keep the finalizers quiet


def test_integrity_compares_the_regions_with_the_arena():
    memory, _ = host_memory()
    memory.arena.nbytes -= 4096
    wanted = 8 * BLOCK + 3 * (WINDOW + REQUEST)
    with pytest.raises(AssertionError, match=f"regions cover {wanted} bytes, the arena has {wanted - 4096}"):
        memory.check_integrity()
