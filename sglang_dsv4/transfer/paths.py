"""The ways bytes can move. A path enqueues on the current stream and knows nothing of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from sglang_dsv4.cache.families import Group
from sglang_dsv4.cache.rows import Int64s
from sglang_dsv4.hostmem.blocks import Event
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.transfer.device import DeviceSide
from sglang_dsv4.transfer.jobs import Jobs
from triton_ops.clear_rings import clear_rings, clear_rings_torch
from triton_ops.copy_pages import copy_pages, copy_pages_torch
from triton_ops.copy_rows import copy_rows, copy_rows_torch


class Path(Protocol):
    """One way to move the bytes of ``jobs`` between a DeviceSide and a HostMemory."""

    name: str

    def move(self, jobs: Jobs, save: bool) -> None:
        """Enqueue the copies: to the host (save) or to the device."""

    def clear(self, slot: int) -> None:
        """Enqueue a reset of the request slot's state rings in every layer."""

    def guard(self, event: Event | None) -> None:
        """``event`` follows the last ``move``: whatever that call staged is reused only after it."""


class TorchPath:
    """Plain torch on any device. Reference and fallback: it may stage on the device what it moves."""

    name = "torch"

    def __init__(self, side: DeviceSide, memory: HostMemory) -> None:
        self._side, self._memory = side, memory
        self._pages = side.page_table(memory.regions[Group.BLOCK].packed)

    def move(self, jobs: Jobs, save: bool) -> None:
        """See Path."""
        if self._pages is not None and len(jobs.pages):
            region = self._memory.region_tensor(Group.BLOCK)
            copy_pages_torch(self._pages, region, torch.from_numpy(jobs.pages), torch.from_numpy(jobs.blocks), save)
        copy_rows_torch(self._side.row_table, self._memory.arena.region, torch.from_numpy(jobs.items), save)

    def clear(self, slot: int) -> None:
        """See Path."""
        _clear(self._side, slot, clear_rings_torch)

    def guard(self, event: Event | None) -> None:
        """Nothing is staged."""


class TritonPath:
    """Two launches a transfer, one more to clear, whatever the layers and pages; no device allocation.

    The kernels read and write the pinned arena directly. The small index arrays of a call lie in pinned memory
    too and are read from there.
    """

    name = "triton"

    def __init__(self, side: DeviceSide, memory: HostMemory) -> None:
        self._side, self._memory = side, memory
        self._pages = side.page_table(memory.regions[Group.BLOCK].packed)
        self._staging = StagingRing(pin=side.device.type == "cuda")

    def move(self, jobs: Jobs, save: bool) -> None:
        """See Path."""
        table = self._staging.take(2 * len(jobs.pages) + jobs.items.size)
        pages, blocks, items = _place(table, jobs.pages, jobs.blocks, jobs.items.reshape(-1))
        if self._pages is not None:
            copy_pages(self._pages, self._memory.region_tensor(Group.BLOCK), pages, blocks, save)
        copy_rows(self._side.row_table, self._memory.arena.region, items.view(-1, 4), save)

    def clear(self, slot: int) -> None:
        """See Path."""
        _clear(self._side, slot, clear_rings)

    def guard(self, event: Event | None) -> None:
        """See Path."""
        self._staging.guard(event)


def _clear(side: DeviceSide, slot: int, op) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    if side.ring_table is not None:
        family = side.family("c128_state")
        op(side.ring_table, slot, family.rows, family.row_bytes, side.c128_state_dtype)


def _place(table: torch.Tensor, *arrays: Int64s) -> list[torch.Tensor]:
    """Copy ``arrays`` one after the other into ``table`` and return the slices."""
    flat = table.numpy()
    slices, end = [], 0
    for array in arrays:
        flat[end : end + len(array)] = array
        slices.append(table[end : end + len(array)])
        end += len(array)
    return slices


class StagingRing:
    """Pinned int64 tables, each reused only after the event of the transfer that last read it has passed."""

    SLOTS = 4

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._tables: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)] * self.SLOTS
        self._events: list[Event | None] = [None] * self.SLOTS
        self._current = 0

    def take(self, size: int) -> torch.Tensor:
        """A table of at least ``size`` entries that nothing reads any more."""
        self._current = (self._current + 1) % self.SLOTS
        event = self._events[self._current]
        if event is not None:
            event.synchronize()
            self._events[self._current] = None
        if self._tables[self._current].numel() < size:
            grown = max(4096, 1 << int(np.ceil(np.log2(size))))
            self._tables[self._current] = torch.empty(grown, dtype=torch.int64, pin_memory=self._pin)
        return self._tables[self._current]

    def guard(self, event: Event | None) -> None:
        """The table taken last is being read until ``event``."""
        self._events[self._current] = event


def make_path(name: str, side: DeviceSide, memory: HostMemory) -> Path:
    """The path called ``name``; auto: triton where the buffers are on a GPU, else torch."""
    if name == "auto":
        name = "triton" if side.device.type == "cuda" else "torch"
    paths: dict[str, Callable[[DeviceSide, HostMemory], Path]] = {"triton": TritonPath, "torch": TorchPath}
    return paths[name](side, memory)
