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
from sglang_dsv4.transfer.buffers import DeviceBuffers
from sglang_dsv4.transfer.jobs import Jobs, RowImage
from sglang_dsv4.transfer.staged import StagedPath
from sglang_dsv4.transfer.staging import StagingRing
from triton_ops.copy_pages import copy_pages, copy_pages_torch
from triton_ops.copy_rows import copy_rows, copy_rows_torch


class Path(Protocol):
    """One way to move the bytes of ``jobs`` between a DeviceBuffers and a HostMemory."""

    name: str

    def begin_save(self, pages: torch.Tensor, blocks: Int64s) -> None:
        """What can start before the rows are described, and before ``pages`` are known to be right."""

    def begin_load(self, blocks: Int64s, image: RowImage) -> None:
        """What can start before the request's new place is known: nothing that writes to the cache."""

    def move(self, jobs: Jobs, save: bool) -> None:
        """Enqueue the copies, or what ``begin_save`` or ``begin_load`` left of them."""

    def end(self) -> None:
        """Order the current stream behind all that was begun, moved or not."""

    def guard(self, event: Event | None) -> None:
        """``event`` follows the last ``end``: whatever that call staged is reused only after it."""


class _WithoutHeadStart:
    """A path that does everything in ``move``, on the current stream."""

    def begin_save(self, pages: torch.Tensor, blocks: Int64s) -> None:
        """See Path."""

    def begin_load(self, blocks: Int64s, image: RowImage) -> None:
        """See Path."""

    def end(self) -> None:
        """See Path."""


class TorchPath(_WithoutHeadStart):
    """Plain torch on any device. Reference and fallback: it may stage on the device what it moves."""

    name = "torch"

    def __init__(self, side: DeviceBuffers, memory: HostMemory) -> None:
        self._side, self._memory = side, memory
        self._pages = side.page_table(memory.regions[Group.PAGED].packed)

    def move(self, jobs: Jobs, save: bool) -> None:
        """See Path."""
        if self._pages is not None and len(jobs.pages):
            region = self._memory.region_tensor(Group.PAGED)
            copy_pages_torch(self._pages, region, jobs.pages.cpu(), torch.from_numpy(jobs.blocks), save)
        side, rows = self._side, torch.from_numpy(jobs.rows_in_arena())
        copy_rows_torch(
            side.row_table, self._memory.arena.region, rows, jobs.rows.most_layers, jobs.rows.most_bytes, save,
            side.c128_state_dtype,
        )  # fmt: skip

    def guard(self, event: Event | None) -> None:
        """Nothing is staged."""


class TritonPath(_WithoutHeadStart):
    """Two launches a transfer, whatever the layers and pages; no device allocation.

    The kernels read and write the pinned arena directly. The small index arrays of a call lie in pinned memory too
    and are read from there.
    """

    name = "triton"

    def __init__(self, side: DeviceBuffers, memory: HostMemory) -> None:
        self._side, self._memory = side, memory
        self._pages = side.page_table(memory.regions[Group.PAGED].packed)
        self._region = memory.region_tensor(Group.PAGED)
        self._tables = StagingRing(pin=side.device.type == "cuda")
        self._saving = False  # whether the pages of a save are on their way

    def begin_save(self, pages: torch.Tensor, blocks: Int64s) -> None:
        """See Path."""
        self._move_pages(pages, blocks, save=True)
        self._saving = True

    def end(self) -> None:
        """See Path."""
        self._saving = False

    def move(self, jobs: Jobs, save: bool) -> None:
        """See Path."""
        if not self._saving:
            self._move_pages(jobs.pages, jobs.blocks, save)
        side = self._side
        rows = self._tables.put(jobs.rows_in_arena().reshape(-1))[0]
        copy_rows(
            side.row_table, self._memory.arena.region, rows.view(-1, 8), jobs.rows.most_layers, jobs.rows.most_bytes,
            save, side.c128_state_dtype,
        )  # fmt: skip

    def _move_pages(self, pages: torch.Tensor, blocks: Int64s, save: bool) -> None:
        if self._pages is not None:
            copy_pages(self._pages, self._region, pages, self._tables.put(blocks)[0], save)

    def guard(self, event: Event | None) -> None:
        """See Path."""
        self._tables.guard(event)


def make_path(name: str, side: DeviceBuffers, memory: HostMemory) -> Path:
    """The path called ``name``; auto: staged where the buffers are on a GPU, else torch."""
    if name == "auto":
        name = "staged" if side.device.type == "cuda" else "torch"
    if name == "staged" and side.device.type != "cuda":
        raise SettingError("DSV4_TRANSFER=staged needs a GPU; use auto, triton or torch")
    paths: dict[str, Callable[[DeviceBuffers, HostMemory], Path]] = {
        "staged": StagedPath,
        "triton": TritonPath,
        "torch": TorchPath,
    }
    return paths[name](side, memory)
