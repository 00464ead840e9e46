"""Small pinned tables that a kernel reads, reused only once nothing reads them any more."""

from __future__ import annotations

import torch

from sglang_dsv4.cache.rows import Int64s
from sglang_dsv4.hostmem.blocks import Event

ALIGNMENT = 2  # entries: every array starts 16-byte aligned, so that a kernel is compiled for one alignment only


class StagingRing:
    """Pinned int64 tables in rotation, each guarded by the event of the transfer that reads it."""

    SLOTS = 4
    SMALLEST = 4096

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._tables: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)] * self.SLOTS
        self._events: list[Event | None] = [None] * self.SLOTS
        self._current = 0
        self._open: list[int] = []  # taken since the last guard

    def put(self, *arrays: Int64s) -> list[torch.Tensor]:
        """Copies of ``arrays`` in the next table, valid until that table's turn comes again.

        May wait for the transfer that still reads it. Call ``guard`` once this call's readers are enqueued.
        """
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-len(array) // ALIGNMENT) * ALIGNMENT
        table = self._take(end)
        flat = table.numpy()
        for start, array in zip(starts, arrays, strict=True):
            flat[start : start + len(array)] = array
        return [table[start : start + len(array)] for start, array in zip(starts, arrays, strict=True)]

    def _take(self, size: int) -> torch.Tensor:
        self._current = (self._current + 1) % self.SLOTS
        self._open.append(self._current)
        event = self._events[self._current]
        if event is not None:
            event.synchronize()
            self._events[self._current] = None
        if self._tables[self._current].numel() < size:
            grown = max(self.SMALLEST, 1 << (size - 1).bit_length())
            self._tables[self._current] = torch.empty(grown, dtype=torch.int64, pin_memory=self._pin)
        return self._tables[self._current]

    def guard(self, event: Event | None) -> None:
        """The tables taken since the last call are being read until ``event``."""
        for table in self._open:
            self._events[table] = event
        self._open.clear()
