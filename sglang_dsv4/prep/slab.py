"""Rotates host slabs: each is written again only once the copy that reads it has ended."""

from __future__ import annotations

import torch

from sglang_dsv4.prep.plan import Int32s
from sglang_dsv4.streams import Event

SMALLEST = 4096  # entries


class Slabs:
    """Rotates int32 slabs, pinned where a GPU copies from them.

    ``take``, fill, enqueue the copy, ``guard``: in this order.
    """

    COUNT = 3

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._slabs = [self._make(SMALLEST) for _ in range(self.COUNT)]
        self._events: list[Event | None] = [None] * self.COUNT
        self._current = 0

    def _make(self, entries: int) -> tuple[torch.Tensor, Int32s]:
        slab = torch.empty(entries, dtype=torch.int32, pin_memory=self._pin)
        return slab, slab.numpy()

    def take(self, entries: int) -> tuple[torch.Tensor, Int32s]:
        """Takes the next slab; returns it and the same memory as an array, ``entries`` long.

        May wait for its reading copy.
        """
        self._current = (self._current + 1) % self.COUNT
        event = self._events[self._current]
        if event is not None:
            event.synchronize()
            self._events[self._current] = None
        if len(self._slabs[self._current][1]) < entries:
            self._slabs[self._current] = self._make(1 << (entries - 1).bit_length())
        slab, array = self._slabs[self._current]
        return slab[:entries], array[:entries]

    def guard(self, event: Event) -> None:
        """Marks the slab last taken as being read until ``event``."""
        self._events[self._current] = event
