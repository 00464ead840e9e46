"""The fast path on a GPU: a bounded staging ring that the copy engine drains while the next chunk is gathered.

    save:  gather kernel: pages -> slot k  |  copy engine: slot k-1 -> host blocks        two streams, events between
    load:  copy engine: host blocks -> slot k  |  scatter kernel: slot k-1 -> pages

The copy engine moves whole packed blocks at the speed of the link, which stores from a kernel to host memory do not
reach; neighbouring host blocks go in one copy. Rows (window and states) are staged as one image, see ``jobs``.
Host blocks are read and written on the copy engine's stream alone, in order: a transfer that is given up half-way
cannot touch them after the next one began.
Device memory: SLOTS slots, one row image and one index table, allocated once. Launches: one for the rows and one
for every SLOT_BYTES of pages, whatever the layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from sglang_dsv4.cache.families import Group
from sglang_dsv4.cache.rows import Int64s
from sglang_dsv4.hostmem.blocks import Event
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.transfer.device import DeviceSide
from sglang_dsv4.transfer.jobs import Jobs, RowImage, image_bytes
from sglang_dsv4.transfer.staging import StagingRing
from triton_ops.clear_rings import clear_rings
from triton_ops.copy_pages import copy_pages
from triton_ops.copy_rows import copy_rows

SLOTS = 3
SLOT_BYTES = 16 << 20
MOST_SEGMENTS = 64  # a copy has about a dozen: spans of four row families, by plane


class _Begun(NamedTuple):
    """A transfer that has started: its host blocks, and what its first steps left behind."""

    blocks: Int64s
    events: list[torch.cuda.Event]


class StagedPath:
    """See the module. Works on one stream (the current one) plus a stream of its own for the copy engine."""

    name = "staged"

    def __init__(self, side: DeviceSide, memory: HostMemory) -> None:
        self._side, self._memory = side, memory
        region = memory.regions[Group.BLOCK]
        self._pages = side.page_table(region.packed)
        self._stride = region.packed.block_stride
        self._region = memory.region_tensor(Group.BLOCK)
        self._blocks_a_slot = max(1, SLOT_BYTES // self._stride) if self._stride else 1
        device = side.device
        self._slots = [
            torch.empty(self._blocks_a_slot * self._stride, dtype=torch.uint8, device=device) for _ in range(SLOTS)
        ]
        self._image = torch.empty(image_bytes(memory), dtype=torch.uint8, device=device)
        self._order = torch.arange(self._blocks_a_slot, dtype=torch.int64, device=device)
        most_pages = max(side.pages[f.name] for f in side.families)
        self._page_index = torch.empty(most_pages, dtype=torch.int64, device=device)
        self._row_index = torch.empty(MOST_SEGMENTS * 8, dtype=torch.int64, device=device)
        self._begun: _Begun | None = None
        self._tables = StagingRing(pin=True)
        self._engine = torch.cuda.Stream(device)

    def clear(self, slot: int) -> None:
        """See Path."""
        self._side.clear(slot, clear_rings)

    def guard(self, event: Event | None) -> None:
        """See Path."""
        self._tables.guard(event)

    def begin_save(self, pages: Int64s, blocks: Int64s) -> None:
        """See Path: every page is on its way when this returns."""
        kernels = self._meet()
        there = self._upload(self._page_index, pages)
        drained: list[torch.cuda.Event] = []
        for number, (first, last) in enumerate(self._chunks(len(pages))):
            if number >= SLOTS:
                kernels.wait_event(drained[number - SLOTS])
            slot = self._slots[number % SLOTS]
            self._page_kernel(slot, there[first:last], save=True)
            self._engine.wait_event(kernels.record_event())
            with torch.cuda.stream(self._engine):
                self._copy_slot(slot, blocks[first:last], save=True)
            drained.append(self._engine.record_event())
        self._begun = _Begun(blocks, drained)

    def begin_load(self, blocks: Int64s, image: RowImage) -> Event | None:
        """See Path: the row image and as many pages as there are slots are on their way when this returns."""
        self._meet()
        with torch.cuda.stream(self._engine):
            self._copy_image(image, save=False)
        arrived = [self._engine.record_event()]
        for number, (first, last) in enumerate(self._chunks(len(blocks))):
            if number == SLOTS:
                break
            with torch.cuda.stream(self._engine):
                self._copy_slot(self._slots[number], blocks[first:last], save=False)
            arrived.append(self._engine.record_event())
        self._begun = _Begun(blocks, arrived)
        return arrived[-1]

    def move(self, jobs: Jobs, save: bool) -> None:
        """See Path."""
        begun, self._begun = self._begun, None
        if begun is None or not np.array_equal(begun.blocks, jobs.blocks):
            if save:
                self.begin_save(jobs.pages, jobs.blocks)
            else:
                self.begin_load(jobs.blocks, jobs.image)
            begun, self._begun = self._begun, None
        assert begun is not None
        kernels = torch.cuda.current_stream(self._side.device)
        rows = self._upload(self._row_index, jobs.rows.reshape(-1))
        if save:
            self._rows(jobs, rows, save=True)
            self._engine.wait_event(kernels.record_event())
            with torch.cuda.stream(self._engine):
                self._copy_image(jobs.image, save=True)
        else:
            kernels.wait_event(begun.events[0])
            self._rows(jobs, rows, save=False)
            self._scatter_pages(jobs, kernels, begun.events[1:])
        kernels.wait_stream(self._engine)

    def _meet(self) -> torch.cuda.Stream:
        """Order both streams behind everything that still uses the slots, the image or the tables."""
        kernels = torch.cuda.current_stream(self._side.device)
        kernels.wait_stream(self._engine)
        self._engine.wait_stream(kernels)
        return kernels

    def _upload(self, target: torch.Tensor, array: Int64s) -> torch.Tensor:
        """An index array on the device, by one small copy.

        Read from pinned memory instead, each gather would queue behind the large copies on the same link.
        """
        there = target[: len(array)]
        there.copy_(self._tables.put(array)[0], non_blocking=True)
        return there

    def _rows(self, jobs: Jobs, rows: torch.Tensor, save: bool) -> None:
        table = self._side.row_table
        copy_rows(table, self._image, rows.view(-1, 8), jobs.most_layers, jobs.most_bytes, save)

    def _copy_image(self, image: RowImage, save: bool) -> None:
        """Window and request block between the arena and the row image; only what is live of the latter."""
        for arena, start, nbytes in image:
            _copy(self._memory.arena.region[arena : arena + nbytes], self._image[start : start + nbytes], save)

    def _scatter_pages(self, jobs: Jobs, kernels: torch.cuda.Stream, arrived: list[torch.cuda.Event]) -> None:
        pages = self._upload(self._page_index, jobs.pages)
        scattered: list[torch.cuda.Event] = []
        for number, (first, last) in enumerate(self._chunks(len(jobs.pages))):
            slot = self._slots[number % SLOTS]
            if number >= len(arrived):
                self._engine.wait_event(scattered[number - SLOTS])
                with torch.cuda.stream(self._engine):
                    self._copy_slot(slot, jobs.blocks[first:last], save=False)
                arrived.append(self._engine.record_event())
            kernels.wait_event(arrived[number])
            self._page_kernel(slot, pages[first:last], save=False)
            scattered.append(kernels.record_event())

    def _page_kernel(self, slot: torch.Tensor, pages: torch.Tensor, save: bool) -> None:
        if self._pages is not None:
            copy_pages(self._pages, slot, pages, self._order[: len(pages)], save)

    def _chunks(self, count: int) -> Iterator[tuple[int, int]]:
        if self._pages is None:
            return iter(())
        step = self._blocks_a_slot
        return ((first, min(first + step, count)) for first in range(0, count, step))

    def _copy_slot(self, slot: torch.Tensor, blocks: Int64s, save: bool) -> None:
        """Slot block i <-> host block blocks[i]; neighbouring host blocks go in one copy."""
        breaks = (np.flatnonzero(blocks[1:] != blocks[:-1] + 1) + 1).tolist()
        for first, last in itertools.pairwise([0, *breaks, len(blocks)]):
            start, size = int(blocks[first]) * self._stride, (last - first) * self._stride
            at = first * self._stride
            _copy(self._region[start : start + size], slot[at : at + size], save)


def _copy(host: torch.Tensor, device: torch.Tensor, save: bool) -> None:
    (host if save else device).copy_(device if save else host, non_blocking=True)
