"""StagingRing: a table is written again only after the transfer that reads it."""

from __future__ import annotations

import pytest
import torch
from builders import FakeEvent

from sglang_dsv4.transfer.paths import StagingRing

pytestmark = pytest.mark.cpu


def test_a_table_is_reused_only_after_its_event():
    ring, events, tables = StagingRing(pin=False), [], []
    for _ in range(StagingRing.SLOTS):
        tables.append(ring.take(10))
        events.append(FakeEvent())
        ring.guard(events[-1])
    assert len({table.data_ptr() for table in tables}) == StagingRing.SLOTS
    assert [event.waits for event in events] == [0] * StagingRing.SLOTS
    for number in range(StagingRing.SLOTS):
        again = ring.take(10)
        assert again.data_ptr() == tables[number].data_ptr()
        assert [event.waits for event in events] == [1] * (number + 1) + [0] * (StagingRing.SLOTS - number - 1)
        ring.guard(None)


def test_an_event_is_waited_for_once():
    ring, event = StagingRing(pin=False), FakeEvent()
    ring.take(1)
    ring.guard(event)
    for _ in range(3 * StagingRing.SLOTS):
        ring.take(1)
        ring.guard(None)
    assert event.waits == 1


def test_the_last_guard_counts():
    ring, first, second = StagingRing(pin=False), FakeEvent(), FakeEvent()
    ring.take(1)
    ring.guard(first)
    ring.guard(second)
    for _ in range(StagingRing.SLOTS):
        ring.take(1)
        ring.guard(None)
    assert (first.waits, second.waits) == (0, 1)


@pytest.mark.parametrize("size", [1, 4096, 4097, 8192, 10_000])
def test_a_table_grows_to_any_size(size):
    ring = StagingRing(pin=False)
    for _ in range(StagingRing.SLOTS + 1):
        table = ring.take(size)
        assert table.dtype == torch.int64
        assert table.numel() >= size
        table[:size] = 1
        ring.guard(None)


def test_growing_waits_for_the_event_first():
    ring, event = StagingRing(pin=False), FakeEvent()
    ring.take(1)
    ring.guard(event)
    for _ in range(StagingRing.SLOTS - 1):
        ring.take(1)
        ring.guard(None)
    assert ring.take(100_000).numel() >= 100_000
    assert event.waits == 1


def test_nothing_to_stage():
    ring = StagingRing(pin=False)
    assert ring.take(0).dtype == torch.int64
