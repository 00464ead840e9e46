"""StagingRing: a table is written again only after the transfer that reads it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import FakeEvent

from sglang_dsv4.transfer.staging import StagingRing


def numbers(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**62), 2**62, size)


def test_a_table_is_reused_only_after_its_event():
    ring, events, tables = StagingRing(pin=False), [], []
    for number in range(StagingRing.SLOTS):
        tables += ring.put(numbers(10, number))
        events.append(FakeEvent())
        ring.guard(events[-1])
    assert len({table.data_ptr() for table in tables}) == StagingRing.SLOTS
    assert [event.waits for event in events] == [0] * StagingRing.SLOTS
    for number in range(StagingRing.SLOTS):
        assert tables[number].tolist() == numbers(10, number).tolist(), "written before its turn"
        (again,) = ring.put(numbers(10, 100 + number))
        assert again.data_ptr() == tables[number].data_ptr()
        assert [event.waits for event in events] == [1] * (number + 1) + [0] * (StagingRing.SLOTS - number - 1)
        ring.guard(None)


def test_a_table_is_not_written_before_its_event_has_passed():
    """What the reader still reads is there when the ring waits for it."""
    ring, seen = StagingRing(pin=False), []
    (table,) = ring.put(numbers(6))
    event = FakeEvent()
    event.synchronize = lambda: seen.append(table.tolist())
    ring.guard(event)
    for seed in range(1, StagingRing.SLOTS + 1):
        ring.put(numbers(6, seed))
        ring.guard(None)
    assert seen == [numbers(6).tolist()]
    assert table.tolist() == numbers(6, StagingRing.SLOTS).tolist()


def test_an_event_is_waited_for_once():
    ring, event = StagingRing(pin=False), FakeEvent()
    ring.put(numbers(1))
    ring.guard(event)
    for _ in range(3 * StagingRing.SLOTS):
        ring.put(numbers(1))
        ring.guard(None)
    assert event.waits == 1


def test_a_guard_covers_every_table_taken_since_the_last_one():
    ring, first, second = StagingRing(pin=False), FakeEvent(), FakeEvent()
    ring.put(numbers(1))
    ring.guard(first)
    ring.put(numbers(1))
    ring.put(numbers(1))
    ring.guard(second)
    ring.put(numbers(1))
    ring.guard(None)
    waits = []
    for _ in range(StagingRing.SLOTS):
        second.waits = 0
        ring.put(numbers(1))
        ring.guard(None)
        waits.append((first.waits, second.waits))
    assert waits == [(1, 0), (1, 1), (1, 1), (1, 0)]


def test_a_guard_leaves_older_tables_to_their_own_event():
    """A second event without a table between says nothing about the table that the first one guards."""
    ring, first, second = StagingRing(pin=False), FakeEvent(), FakeEvent()
    ring.put(numbers(1))
    ring.guard(first)
    ring.guard(second)
    ring.guard(None)
    for _ in range(StagingRing.SLOTS):
        ring.put(numbers(1))
        ring.guard(None)
    assert (first.waits, second.waits) == (1, 0)


@pytest.mark.parametrize("size", [1, 4096, 4097, 8192, 10_000])
def test_a_table_grows_to_any_size(size):
    ring = StagingRing(pin=False)
    for seed in range(StagingRing.SLOTS + 1):
        (table,) = ring.put(numbers(size, seed))
        assert table.dtype == torch.int64
        assert table.tolist() == numbers(size, seed).tolist()
        ring.guard(None)


def test_growing_waits_for_the_event_first():
    ring, event = StagingRing(pin=False), FakeEvent()
    ring.put(numbers(1))
    ring.guard(event)
    for _ in range(StagingRing.SLOTS - 1):
        ring.put(numbers(1))
        ring.guard(None)
    assert event.waits == 0
    (table,) = ring.put(numbers(100_000))
    assert table.tolist() == numbers(100_000).tolist()
    assert event.waits == 1


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (3, 5, 8), (2, 0, 7), (0, 1, 0, 1), (4095, 1, 1), (4095, 2), (1, 4096), (9, 8193, 3)]
)
def test_several_arrays_each_start_on_16_bytes(sizes):
    ring = StagingRing(pin=False)
    arrays = [numbers(size, seed) for seed, size in enumerate(sizes)]
    for _ in range(StagingRing.SLOTS + 1):
        tables = ring.put(*arrays)
        assert [table.tolist() for table in tables] == [array.tolist() for array in arrays]
        ring.guard(None)
        filled = [table for table in tables if len(table)]
        assert all(table.data_ptr() % 16 == 0 and table.is_contiguous() for table in filled)
        ends = [table.data_ptr() + 8 * len(table) for table in filled]
        starts = [table.data_ptr() for table in filled]
        assert all(end <= start for end, start in zip(ends[:-1], starts[1:], strict=True)), "two arrays overlap"


def test_nothing_to_stage():
    ring = StagingRing(pin=False)
    tables = ring.put(numbers(0), numbers(0))
    assert [(table.dtype, len(table)) for table in tables] == [(torch.int64, 0)] * 2
    ring.guard(None)
    assert ring.put() == []
