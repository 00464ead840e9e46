"""The ways bytes can move. A path enqueues on the current stream and knows nothing of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from sglang_dsv4.cache.families import Group
from sglang_dsv4.cache.rows import Int64s
from sglang_dsv4.errors import SettingError
from sglang_dsv4.hostmem.blocks import Event
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.transfer.device import DeviceSide
from sglang_dsv4.transfer.jobs import Jobs, RowImage
from sglang_dsv4.transfer.staged import StagedPath
from sglang_dsv4.transfer.staging import StagingRing
from triton_ops.clear_rings import clear_rings, clear_rings_torch
from triton_ops.copy_pages import copy_pages, copy_pages_torch
from triton_ops.copy_rows import copy_rows, copy_rows_torch


class Path(Protocol):
    """One way to move the bytes of ``jobs`` between a DeviceSide and a HostMemory."""

    name: str

    def begin_save(self, pages: Int64s, blocks: Int64s) -> None:
        """What can start before the rows are planned; ``move`` does the rest (and all of it, without this)."""

    def begin_load(self, blocks: Int64s, image: RowImage) -> Event | None:
        """What can start before the request's new place is known: nothing that writes to the cache.

        Returns the event after which the host blocks are no longer read, should the load be given up.
        """

    def move(self, jobs: Jobs, save: bool) -> None:
        """Enqueue the copies: to the host (save) or to the device."""

    def clear(self, slot: int) -> None:
        """Enqueue a reset of the request slot's state rings in every layer."""

    def guard(self, event: Event | None) -> None:
        """``event`` follows the last ``move``: whatever that call staged is reused only after it."""


class _WithoutHeadStart:
    """A path that does everything in ``move``."""

    def begin_save(self, pages: Int64s, blocks: Int64s) -> None:
        """See Path."""

    def begin_load(self, blocks: Int64s, image: RowImage) -> Event | None:
        """See Path."""
        return None


class TorchPath(_WithoutHeadStart):
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
        rows = torch.from_numpy(jobs.rows_in_arena())
        copy_rows_torch(self._side.row_table, self._memory.arena.region, rows, jobs.most_layers, jobs.most_bytes, save)

    def clear(self, slot: int) -> None:
        """See Path."""
        self._side.clear(slot, clear_rings_torch)

    def guard(self, event: Event | None) -> None:
        """Nothing is staged."""


class TritonPath(_WithoutHeadStart):
    """Two launches a transfer, one more to clear, whatever the layers and pages; no device allocation.

    The kernels read and write the pinned arena directly: loads run near the speed of the link, saves far below it,
    because many programs then store to host memory at once. The small index arrays of a call lie in pinned memory
    too and are read from there.
    """

    name = "triton"

    def __init__(self, side: DeviceSide, memory: HostMemory) -> None:
        self._side, self._memory = side, memory
        self._pages = side.page_table(memory.regions[Group.BLOCK].packed)
        self._tables = StagingRing(pin=side.device.type == "cuda")

    def move(self, jobs: Jobs, save: bool) -> None:
        """See Path."""
        pages, blocks, rows = self._tables.put(jobs.pages, jobs.blocks, jobs.rows_in_arena().reshape(-1))
        if self._pages is not None:
            copy_pages(self._pages, self._memory.region_tensor(Group.BLOCK), pages, blocks, save)
        copy_rows(
            self._side.row_table, self._memory.arena.region, rows.view(-1, 8), jobs.most_layers, jobs.most_bytes, save
        )

    def clear(self, slot: int) -> None:
        """See Path."""
        self._side.clear(slot, clear_rings)

    def guard(self, event: Event | None) -> None:
        """See Path."""
        self._tables.guard(event)


def make_path(name: str, side: DeviceSide, memory: HostMemory) -> Path:
    """The path called ``name``; auto: staged where the buffers are on a GPU, else torch."""
    if name == "auto":
        name = "staged" if side.device.type == "cuda" else "torch"
    if name == "staged" and side.device.type != "cuda":
        raise SettingError("DSV4_TRANSFER=staged needs a GPU; use auto, triton or torch")
    paths: dict[str, Callable[[DeviceSide, HostMemory], Path]] = {
        "staged": StagedPath,
        "triton": TritonPath,
        "torch": TorchPath,
    }
    return paths[name](side, memory)
