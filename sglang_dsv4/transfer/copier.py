"""Moves copies between device and host: kernels gather and scatter a staging ring, the copy engine moves its slots.

Kernels that store to host memory do not reach the speed of the link, and the copy engine cannot gather 62 buffers. So
the copy engine drains one slot while the next chunk is gathered.

    save:  gather kernel: pages -> slot k       |  copy engine: slot k-1 -> host units
    load:  copy engine: host units -> slot k    |  scatter kernel: slot k-1 -> pages

Rows (window and states) go through one row image by a template that lies on the card. Launches: one for the rows and
one for every SLOT_BYTES of pages of all layers; neighbouring host units go in one copy.

Order:

    save:  caller's stream --> kernels: pages --> copy engine;  locate --> kernels: rows --> copy engine
           of one chunk: the kernels' stream copies, too, after all its kernels, which spares the host six calls
    load:  copy engine fills the slots  ||  the place was taken --> finder: locate --> the host asks whether it is right
           caller's and writers' streams --> kernels: rows, pages --> caller's stream

Both return when enqueued. A save is located and checked on the caller's stream, which may next undo the mapping that
locates it; its pages and its row of indices must stay as they are until its last kernel (see ``pages_in_use``): then
their bytes are in ring and row image, and the caller's stream need not wait for the link, but for that of the transfer
before, which has these first. The answer is asked for later, and the copy of a wrong request is thrown away. A load
writes nothing before its place is known to be right. The tables that are checked were written when the place was taken,
so the check need not wait for later work of the caller's stream, perhaps a whole forward. Its units are reused only
after its event, and later work on the caller's stream sees its bytes. Writers' streams may still write the pages that
were just handed over (a finished request's last forward). Host units are touched in order, on the copy engine's
stream, which each transfer orders behind the kernels' stream, or on the latter: a transfer that is given up half-way
cannot touch them after the next one began. Nothing here synchronizes the device.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from sglang_dsv4.hostmem.memory import HostCopy, HostMemory, Run
from sglang_dsv4.hostmem.pool import UnitNumbers
from sglang_dsv4.transfer.buffers import DeviceBuffers
from sglang_dsv4.transfer.copy_engine import copy_to_device, copy_to_host
from sglang_dsv4.transfer.locate import NO_SLOT, DeviceSearch, Locator, Request
from sglang_dsv4.transfer.templates import RowTemplates
from triton_ops.copy_pages import copy_pages
from triton_ops.copy_rows import PAGE_NUMBERS, copy_rows
from triton_ops.tables import host_words

WriterStreams = Callable[[], Iterable["torch.cuda.Stream"]]
Together = Callable[[Callable[[], Any]], Any]  # does work on this rank; raises where it fails on any rank
SLOTS = 2  # a kernel is twenty times as fast as the link: it is done with one slot long before the other has moved
SLOT_BYTES = 48 << 20
SHORT_BYTES = 8 << 20  # of the chunk whose kernel nothing hides: a long save's first, a load's last


class _Pages(NamedTuple):
    """Holds the pages of one transfer, from the request's page ``first`` on, and their host units.

    slots: the request's full slots. chunks: (first, past last) unit of each.
    """

    units: UnitNumbers
    slots: torch.Tensor
    first: int
    chunks: list[tuple[int, int]]

    def of(self, number: int) -> range:
        """Returns the request's pages of one chunk."""
        first, last = self.chunks[number]
        return range(self.first + first, self.first + last)

    def units_of(self, number: int) -> UnitNumbers:
        """Returns the host units of one chunk."""
        return self.units[slice(*self.chunks[number])]


class Copier:
    """Moves the copies of one pool on a GPU. The scheduler thread owns it.

    Device memory: the slots, one row image and the templates, allocated once. Events are made once and recorded again
    and again: a wait is for the last record before it. together: each load finds its place in it; ranks that hold the
    same requests load all of them or none. cuda: the module of streams and events.
    """

    def __init__(
        self, buffers: DeviceBuffers, memory: HostMemory, writer_streams: WriterStreams,
        together: Together = lambda work: work(), cuda: Any = torch.cuda,
    ) -> None:  # fmt: skip
        self._buffers, self._memory, self._writer_streams, self._cuda = buffers, memory, writer_streams, cuda
        self._together = together
        self._page, self._unit = buffers.geometry.page_size, memory.units.nbytes
        self._page_table, self._row_table = buffers.page_table(self._unit), buffers.row_table
        self._slot_units, self._short_units = (max(1, nbytes // self._unit) for nbytes in (SLOT_BYTES, SHORT_BYTES))
        device = buffers.device
        self._device = device.index
        self._templates = RowTemplates(buffers)
        self._image = _words(memory.units.longest_tail * self._unit, device)
        slots = SLOTS if self._page_table is not None else 0
        self._slots = [_words(self._slot_units * self._unit, device) for _ in range(slots)]
        self._arena = memory.arena.region.data_ptr()
        self._locator = Locator(buffers, cuda)
        self._kernels, self._engine, self._finder = cuda.Stream(device), cuda.Stream(device), cuda.Stream(device)
        self._filled = [cuda.Event() for _ in range(SLOTS)]  # slot k may be read
        self._emptied = [cuda.Event() for _ in range(SLOTS)]  # slot k may be overwritten
        self._image_filled, self._image_emptied, self._engine_done = cuda.Event(), cuda.Event(), cuda.Event()
        self._queued, self._taken, self._gathered = cuda.Event(), cuda.Event(), cuda.Event()
        self._place_taken = False  # since the last load
        # Slots, row image and arena go with the copier, but not before the copies in flight are over.
        weakref.finalize(self, _finish, self._kernels, self._engine).atexit = False

    def warm_up(self) -> None:
        """Launches each kernel twice, on nothing: the first compiles it, the second goes the way of all later ones.

        A load on nothing writes nothing only while its indices say so. They are made before the kernels wait for the
        caller's stream, and live until the kernels are over.
        """
        nowhere = torch.full((1,), -1, dtype=torch.int64, device=self._buffers.device)
        lists, numbers = (nowhere, nowhere.int()), nowhere.expand(PAGE_NUMBERS).contiguous()
        swa_map = torch.zeros(8, dtype=torch.int64, device=nowhere.device)
        self._wait_for(self._cuda.current_stream(self._device))
        for save in (True, False, True, False):
            self._copy_rows(1, numbers, save)
            for slots in lists:
                self._locator.start(Request(slots, swa_map, NO_SLOT), self._kernels)
                self._copy_pages(0, slots, range(1), save)
        self._kernels.synchronize()

    def save(self, copy: HostCopy, request: Request) -> DeviceSearch:
        """Enqueues the transfer that fills ``copy`` from the device; ``copy.lease.used_by`` is the event after it.

        Until ``copy.lease.gathered`` the request's pages and its indices must not be written. The returned search tells
        whether the request was right; the copy of a wrong one is worthless.
        """
        outer, share = self._cuda.current_stream(self._device), copy.page_share
        units, rows = copy.pages(share.start, share.stop), copy.tail_share
        pages, search = _Pages(units, request.indices, share.start, self._chunks(len(units), save=True)), None
        link = self._engine if len(pages.chunks) > 1 else self._kernels
        try:
            self._wait_for(outer)
            self._gather(pages, 0, link)
            if link is self._engine:  # it works by now, while the host goes on
                self._drain(pages, 0, link)
            search = self._locator.start(request, outer)
            if rows:
                search.comes_before(self._kernels)  # the rows follow the page numbers
                self._copy_rows(copy.tokens, search.page_numbers, save=True)
            if link is self._kernels:
                self._note_gathered(copy)
                self._drain(pages, 0, link)
            if rows:
                self._follow(self._image_filled, link)
                self._copy_image(copy.tail_runs(rows), link, save=True)
            for number in range(1, len(pages.chunks)):
                self._gather(pages, number, link)
                self._drain(pages, number, link)
            if link is self._engine:
                self._note_gathered(copy)
        finally:  # work enqueued before an error still writes to the units
            self._end(copy, search, link)
        return search

    def place_taken(self) -> None:
        """Notes that the next load's place was just taken on the current stream; the load ignores later work there."""
        self._taken.record(self._cuda.current_stream(self._device))
        self._place_taken = True

    def load(self, copy: HostCopy, request: Request, first_page: int = 0) -> None:
        """Writes ``copy`` to the device, ordered before later work on the current stream.

        first_page: of the paged families only the pages from this one on are written; those before it are shared.
        Raises IndexMismatch, WindowNotMapped, or the error of ``together``; nothing was written then.
        """
        outer, units = self._cuda.current_stream(self._device), copy.pages(first_page)
        pages, search = _Pages(units, request.indices, first_page, self._chunks(len(units), save=False)), None
        if not self._place_taken:
            self._taken.record(outer)
        self._place_taken = False
        try:
            self._image_emptied.record(self._kernels)
            self._engine.wait_event(self._image_emptied)  # the transfer before this one read slots and image
            self._copy_image(copy.tail_runs(), self._engine, save=False)
            self._image_filled.record(self._engine)
            for number in range(min(SLOTS, len(pages.chunks))):
                self._fill(pages, number)
            self._finder.wait_event(self._taken)
            search = self._locator.start(request, self._finder)
            self._together(search.check)
            for stream in (outer, *self._writer_streams()):
                self._wait_for(stream)
            self._kernels.wait_event(self._image_filled)
            self._copy_rows(copy.tokens, search.page_numbers, save=False)
            for number in range(len(pages.chunks)):
                self._scatter(pages, number)
        finally:  # enqueued work still reads the request's indices, whose memory is the caller's stream's
            outer.wait_event(self._end(copy, search, self._engine))

    def _wait_for(self, stream: Any) -> None:
        """Orders the kernels behind ``stream``; torch's wait_stream would make an event each time."""
        self._queued.record(stream)
        self._kernels.wait_event(self._queued)

    def _follow(self, filled: Any, link: Any) -> None:
        """Orders ``link`` behind the kernels so far, by the event ``filled``."""
        if link is not self._kernels:
            filled.record(self._kernels)
            link.wait_event(filled)

    def _end(self, copy: HostCopy, search: DeviceSearch | None, link: Any) -> Any:
        """Records the event after the whole transfer; until then the copy's units are in use.

        The next transfer's kernels come after it, and own slots and row image from then on.
        """
        if link is not self._kernels:
            self._engine_done.record(link)
            self._kernels.wait_event(self._engine_done)
        done = copy.lease.used_by = self._cuda.Event()
        done.record(self._kernels)
        if search is not None:
            search.ends_with(done)
        return done

    def _note_gathered(self, copy: HostCopy) -> None:
        """Records the event after the last kernel of a save."""
        copy.lease.gathered = self._gathered
        self._gathered.record(self._kernels)

    def _gather(self, pages: _Pages, number: int, link: Any) -> None:
        """Gathers one chunk of a save, if there is one, into its slot, as soon as that is empty."""
        if number < len(pages.chunks):
            slot = number % SLOTS
            if number >= SLOTS:
                self._kernels.wait_event(self._emptied[slot])
            self._copy_pages(slot, pages.slots, pages.of(number), save=True)
            self._follow(self._filled[slot], link)

    def _drain(self, pages: _Pages, number: int, link: Any) -> None:
        """Sends one chunk of a save, if there is one, to its host units by ``link``."""
        if number < len(pages.chunks):
            slot = number % SLOTS
            self._copy_slot(slot, pages.units_of(number), link, save=True)
            if number + SLOTS < len(pages.chunks):
                self._emptied[slot].record(link)

    def _fill(self, pages: _Pages, number: int) -> None:
        """Brings one chunk of a load from its host units to its slot."""
        slot = number % SLOTS
        self._copy_slot(slot, pages.units_of(number), self._engine, save=False)
        self._filled[slot].record(self._engine)

    def _scatter(self, pages: _Pages, number: int) -> None:
        """Scatters one chunk of a load; its slot is filled with the chunk after the next then."""
        slot = number % SLOTS
        self._kernels.wait_event(self._filled[slot])
        self._copy_pages(slot, pages.slots, pages.of(number), save=False)
        if number + SLOTS < len(pages.chunks):
            self._emptied[slot].record(self._kernels)
            self._engine.wait_event(self._emptied[slot])
            self._fill(pages, number + SLOTS)

    def _chunks(self, count: int, save: bool) -> list[tuple[int, int]]:
        """Lists (first, past last) unit of each chunk, in order.

        A save of less than two short chunks is one: the other takes the host longer than what it hides of the gather.
        """
        if self._page_table is None or not count:
            return []
        step, short = self._slot_units, min(count, self._short_units)
        if save and count < min(2 * short, step):
            return [(0, count)]
        inner = range(short, count, step) if save else (*range(step, count - short, step), count - short)
        return [(first, last) for first, last in itertools.pairwise((0, *inner, count)) if last > first]

    def _copy_rows(self, tokens: int, page_numbers: torch.Tensor, save: bool) -> None:
        """Copies rows between row image and cache; one launch, nothing is uploaded."""
        segments, most_layers, most_bytes = self._templates.of(tokens, save)
        copy_rows(
            self._row_table, self._image, segments, page_numbers, most_layers, most_bytes, save,
            self._buffers.state_dtype, self._kernels.cuda_stream,
        )  # fmt: skip

    def _copy_pages(self, slot: int, slots: torch.Tensor, pages: range, save: bool) -> None:
        if self._page_table is None:
            return
        copy_pages(self._page_table, self._slots[slot], slots, self._page, save, pages, self._kernels.cuda_stream)

    def _copy_image(self, runs: Iterable[Run], link: Any, save: bool) -> None:
        """Copies parts of the tail between arena and row image."""
        for run in runs:
            _enqueue(self._arena + run.arena, self._image.data_ptr() + run.start, run.nbytes, link, save)

    def _copy_slot(self, slot: int, units: UnitNumbers, link: Any, save: bool) -> None:
        """Copies page i of the slot to or from host unit units[i]; neighbouring host units go in one copy."""
        memory, size = self._slots[slot].data_ptr(), self._unit
        for first, last in self._memory.runs(units):
            host = self._arena + self._memory.offset(units[first])
            _enqueue(host, memory + first * size, (last - first) * size, link, save)


def _enqueue(host: int, device: int, nbytes: int, link: Any, save: bool) -> None:
    """Enqueues one copy on the stream ``link``."""
    if save:
        copy_to_host(host, device, nbytes, link.cuda_stream)
    else:
        copy_to_device(device, host, nbytes, link.cuda_stream)


def _finish(*streams: Any) -> None:
    for stream in streams:
        stream.synchronize()


def _words(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocates device memory as int64 words."""
    return host_words(torch.empty(nbytes, dtype=torch.uint8, device=device))
