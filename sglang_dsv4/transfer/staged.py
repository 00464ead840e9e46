"""The fast path on a GPU: a bounded staging ring that the copy engine drains while the next chunk is gathered.

    save:  gather kernel: pages -> slot k  |  copy engine: slot k-1 -> host blocks        two streams, events between
    load:  copy engine: host blocks -> slot k  |  scatter kernel: slot k-1 -> pages

The copy engine moves whole packed blocks at the speed of the link, which stores from a kernel to host memory do not
reach; neighbouring host blocks go in one copy. Rows (window and states) are staged as one image, see ``jobs``.
Host blocks are read and written on the copy engine's stream alone, in order: a transfer that is given up half-way
cannot touch them after the next one began.
Device memory: SLOTS slots, one row image, one index table and the row templates, allocated once. Launches: one for the
rows and one for every SLOT_BYTES of pages, whatever the layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from sglang_dsv4.cache.families import Group
from sglang_dsv4.cache.rows import Int64s
from sglang_dsv4.hostmem.blocks import Event
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.streams import on_stream
from sglang_dsv4.transfer.buffers import DeviceBuffers
from sglang_dsv4.transfer.card_templates import CardTemplates
from sglang_dsv4.transfer.jobs import Jobs, PlacedRows, RowImage, image_bytes
from sglang_dsv4.transfer.staging import StagingRing
from triton_ops.copy_pages import copy_pages
from triton_ops.copy_rows import copy_rows

SLOTS = 2  # a kernel is twenty times as fast as the link: it is done with one slot long before the other has moved
SLOT_BYTES = 48 << 20
SHORT_BYTES = 8 << 20  # of the chunk whose kernel nothing hides: the first of a save, the last of a load
MOST_SEGMENTS = 64  # a copy has about a dozen: spans of four row families, by plane


class StagedPath:
    """See the module. Kernels run on the current stream, copies on a stream of the path's own.

    Events are made once and recorded again and again: a wait refers to the last record before it.
    """

    name = "staged"

    def __init__(self, side: DeviceBuffers, memory: HostMemory) -> None:
        self._side, self._memory = side, memory
        region = memory.regions[Group.PAGED]
        self._pages = side.page_table(region.packed)
        self._stride = region.packed.block_stride
        self._region = memory.region_tensor(Group.PAGED)
        self._blocks_a_slot, self._blocks_a_short = (
            max(1, nbytes // self._stride) if self._stride else 1 for nbytes in (SLOT_BYTES, SHORT_BYTES)
        )
        device = side.device
        self._device = device.index
        self._slots = [
            torch.empty(self._blocks_a_slot * self._stride, dtype=torch.uint8, device=device) for _ in range(SLOTS)
        ]
        self._image = torch.empty(image_bytes(memory), dtype=torch.uint8, device=device)
        self._order = torch.arange(self._blocks_a_slot, dtype=torch.int64, device=device)
        self._templates = CardTemplates.of(side, memory) if device.type == "cuda" else None
        if self._templates is not None:
            self._templates.warm_up(self._image)
        self._row_index = torch.empty((MOST_SEGMENTS, 8), dtype=torch.int64, device=device)
        self._tables = StagingRing(pin=True)
        self._engine = torch.cuda.Stream(device)
        self._moved = [torch.cuda.Event() for _ in range(SLOTS)]  # the copy engine is done with slot k
        self._used = [torch.cuda.Event() for _ in range(SLOTS)]  # a kernel is done with slot k
        self._rows_moved, self._rows_used = torch.cuda.Event(), torch.cuda.Event()
        self._begun = 0  # chunks under way, by begin_save or begin_load
        self._has_begun = False

    def guard(self, event: Event | None) -> None:
        """See Path."""
        self._tables.guard(event)

    def end(self) -> None:
        """See Path."""
        self._has_begun = False
        self._rows_moved.record(self._engine)
        torch.cuda.current_stream(self._device).wait_event(self._rows_moved)

    def begin_save(self, pages: torch.Tensor, blocks: Int64s) -> None:
        """See Path: every page is on its way when this returns."""
        kernels = torch.cuda.current_stream(self._device)
        with on_stream(self._engine, kernels):
            for number, (first, last) in enumerate(self._chunks(len(blocks), save=True)):
                k = number % SLOTS
                if number >= SLOTS:
                    kernels.wait_event(self._moved[k])
                self._page_kernel(self._slots[k], pages[first:last], kernels, save=True)
                self._used[k].record(kernels)
                self._engine.wait_event(self._used[k])
                self._copy_slot(self._slots[k], blocks[first:last], save=True)
                self._moved[k].record(self._engine)
        self._has_begun = True

    def begin_load(self, blocks: Int64s, image: RowImage) -> None:
        """See Path: the row image and as many pages as there are slots are on their way when this returns."""
        kernels = torch.cuda.current_stream(self._device)
        self._rows_used.record(kernels)
        self._engine.wait_event(self._rows_used)  # kernels of the transfer before this one read slots and image
        with on_stream(self._engine, kernels):
            self._copy_image(image, save=False)
            self._rows_moved.record(self._engine)
            chunks = self._chunks(len(blocks), save=False)[:SLOTS]
            for k, (first, last) in enumerate(chunks):
                self._copy_slot(self._slots[k], blocks[first:last], save=False)
                self._moved[k].record(self._engine)
        self._begun, self._has_begun = len(chunks), True

    def move(self, jobs: Jobs, save: bool) -> None:
        """See Path."""
        if not self._has_begun:
            self.begin_save(jobs.pages, jobs.blocks) if save else self.begin_load(jobs.blocks, jobs.image)
        kernels = torch.cuda.current_stream(self._device)
        if save:
            self._rows(jobs, save=True)
            self._rows_used.record(kernels)
            self._engine.wait_event(self._rows_used)
            with on_stream(self._engine, kernels):
                self._copy_image(jobs.image, save=True)
        else:
            kernels.wait_event(self._rows_moved)
            self._rows(jobs, save=False)
            self._scatter_pages(jobs, kernels)

    def _rows(self, jobs: Jobs, save: bool) -> None:
        """Between the row image and the cache, by the template that lies on the card.

        The segments of rows without one go there by one small copy: read from pinned memory, each would queue behind
        the large copies on the same link.
        """
        side, rows = self._side, jobs.rows
        if self._templates is not None and isinstance(rows, PlacedRows):
            self._templates.copy(rows, self._image, save)
            return
        side.residents.sent.step += rows.table.nbytes
        there = self._row_index[: len(rows.table)]
        there.copy_(self._tables.put(rows.table.reshape(-1))[0].view(there.shape), non_blocking=True)
        copy_rows(side.row_table, self._image, there, rows.most_layers, rows.most_bytes, save, side.c128_state_dtype)

    def _copy_image(self, image: RowImage, save: bool) -> None:
        """Window and request block between the arena and the row image; only what is live of the latter."""
        for arena, start, nbytes in image:
            _copy(self._memory.arena.region[arena : arena + nbytes], self._image[start : start + nbytes], save)

    def _scatter_pages(self, jobs: Jobs, kernels: torch.cuda.Stream) -> None:
        chunks = self._chunks(len(jobs.blocks), save=False)
        for number, (first, last) in enumerate(chunks):
            k = number % SLOTS
            kernels.wait_event(self._moved[k])
            self._page_kernel(self._slots[k], jobs.pages[first:last], kernels, save=False)
            if number + self._begun >= len(chunks):
                continue
            self._used[k].record(kernels)
            following = slice(*chunks[number + self._begun])
            with on_stream(self._engine, kernels):
                self._engine.wait_event(self._used[k])
                self._copy_slot(self._slots[k], jobs.blocks[following], save=False)
                self._moved[k].record(self._engine)

    def _page_kernel(self, slot: torch.Tensor, pages: torch.Tensor, stream: torch.cuda.Stream, save: bool) -> None:
        assert self._pages is not None
        copy_pages(self._pages, slot, pages, self._order[: len(pages)], save, stream.cuda_stream)

    def _chunks(self, count: int, save: bool) -> list[tuple[int, int]]:
        """(first, past last) block of each chunk, in order."""
        if self._pages is None or not count:
            return []
        step, short = self._blocks_a_slot, min(count, self._blocks_a_short)
        if save:
            edges = [0, *range(short, count, step), count]
        else:
            edges = [*range(0, count - short, step), count - short, count]
        return [(first, last) for first, last in itertools.pairwise(edges) if last > first]

    def _copy_slot(self, slot: torch.Tensor, blocks: Int64s, save: bool) -> None:
        """Slot block i <-> host block blocks[i]; neighbouring host blocks go in one copy."""
        for first, last in _runs(blocks):
            start, size = int(blocks[first]) * self._stride, (last - first) * self._stride
            at = first * self._stride
            _copy(self._region[start : start + size], slot[at : at + size], save)


def _runs(blocks: Int64s) -> Iterator[tuple[int, int]]:
    """(first, past last) index of each run of neighbours in ascending ``blocks``."""
    if blocks[-1] - blocks[0] == len(blocks) - 1:
        return iter(((0, len(blocks)),))
    breaks = (np.flatnonzero(blocks[1:] != blocks[:-1] + 1) + 1).tolist()
    return itertools.pairwise([0, *breaks, len(blocks)])


def _copy(host: torch.Tensor, device: torch.Tensor, save: bool) -> None:
    (host if save else device).copy_(device if save else host, non_blocking=True)
