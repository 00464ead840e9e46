"""Stream and event order of a save and of a load.

    save:  current stream --(wait)--> transfer stream: look, copies, event --> the host waits for the event
    load:  copy engine: host -> staging  ||  current stream --(wait)--> transfer stream: look
           then writer_streams --(wait)--> transfer stream: copies, event --(wait)--> current stream

A save returns only when the bytes are on the host: the device pages may be handed to a request admitted in the
same iteration and be written outside any stream. A load returns when enqueued; the blocks it reads are reused only
after its event, and whatever is enqueued on the current stream afterwards sees its bytes. WriterStreams are streams
whose queued work may still write the pages that were just handed over (a finished request's last forward).
Whole pages are on their way while the host still describes the rows: a save may read a page that turns out to be
the wrong one, a load writes nothing before its place is known to be right. Nothing here synchronizes the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import numpy as np
import torch

from sglang_dsv4.cache.families import Group
from sglang_dsv4.cache.rows import check_range, plan
from sglang_dsv4.hostmem.blocks import Event
from sglang_dsv4.hostmem.memory import HostCopy, HostMemory
from sglang_dsv4.streams import on_stream
from sglang_dsv4.transfer.buffers import DeviceBuffers
from sglang_dsv4.transfer.jobs import Jobs, RowImage, Rows, RowTemplates, plan_rows, row_image
from sglang_dsv4.transfer.locate import Locator, Request
from sglang_dsv4.transfer.paths import Path

WriterStreams = Callable[[], Iterable["torch.cuda.Stream"]]


class Mover:
    """Moves copies of one pool on a stream of its own (none on CPU, where everything is in order anyway)."""

    def __init__(self, side: DeviceBuffers, memory: HostMemory, path: Path, writer_streams: WriterStreams) -> None:
        self._side, self._memory, self._path, self._fences = side, memory, path, writer_streams
        self.locator = Locator(side)
        self._templates = RowTemplates.of(side, memory)
        cuda = side.device.type == "cuda"
        self._stream = torch.cuda.Stream(side.device) if cuda else None
        self._device = side.device.index
        self._outer: torch.cuda.Stream | None = None  # the caller's, while a transfer is being enqueued

    def warm_up(self) -> None:
        """Compile the kernels now, at start, by a transfer of nothing: page -1 and a segment of no layer."""
        page = torch.full((1,), -1, dtype=torch.int64, device=self._side.device)
        nothing = Jobs(page, np.array([0]), Rows(np.zeros((1, 8), np.int64), 1, 8), ())
        with self._on_stream():
            self._wait_for_current()
            for save in (True, False):
                self._path.move(nothing, save)
            self._end()

    def save(self, copy: HostCopy, request: Request) -> None:
        """Fill ``copy`` from the device; the bytes are on the host when this returns.

        Raises IndexMismatch or WindowNotMapped; the copy then holds nothing, and its blocks are guarded.
        """
        with self._on_stream():
            try:
                self._wait_for_current()
                pages = self.locator.look(request)
                self._path.begin_save(pages, copy.blocks[Group.PAGED])
                jobs = self._jobs(copy, request, pages, row_image(copy), save=True)
                self._path.move(jobs, save=True)
            finally:  # what was enqueued before an error still writes to the blocks
                event = copy.lease.used_by = self._end()
        if event is not None:
            event.synchronize()

    def load(self, copy: HostCopy, request: Request) -> None:
        """Write ``copy`` to the device, ordered before whatever the current stream gets next.

        Raises IndexMismatch or WindowNotMapped; nothing was written then.
        """
        with self._on_stream():
            try:
                image = row_image(copy)
                self._path.begin_load(copy.blocks[Group.PAGED], image)
                self._wait_for_current()
                jobs = self._jobs(copy, request, self.locator.look(request), image, save=False)
                if self._stream is not None:
                    for fence in self._fences():
                        self._stream.wait_stream(fence)
                self._path.move(jobs, save=False)
            finally:
                event = copy.lease.used_by = self._end()
        if event is not None and self._outer is not None:
            self._outer.wait_event(event)  # type: ignore[arg-type]

    def settle(self) -> None:
        """Return when every load has been written."""
        if self._stream is not None:
            self._stream.synchronize()

    def _jobs(self, copy: HostCopy, request: Request, pages: torch.Tensor, image: RowImage, save: bool) -> Jobs:
        """Describe the transfer; waits until the device has found the request."""
        window_pages = self.locator.window_pages()
        if window_pages is not None:
            rows = self._templates.rows(copy.tokens, window_pages, request.slot, save)
        else:
            place = self.locator.read(request)
            spans = plan(self._side.geometry, self._side.families, place)
            for family_spans in spans:
                if family_spans.family.layers:
                    check_range(family_spans, self._side.pages[family_spans.family.name])
            rows = plan_rows(self._side, self._memory, spans, None if save else request.slot)
        return Jobs(pages, copy.blocks[Group.PAGED], rows, image)

    def _wait_for_current(self) -> None:
        """The request's slots, and the bytes to save, come from what the current stream has queued."""
        if self._stream is not None:
            self._stream.wait_stream(self._outer)

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        self._outer = torch.cuda.current_stream(self._device)
        return on_stream(self._stream, self._outer)

    def _end(self) -> Event | None:
        """The event after everything that was begun."""
        self._path.end()
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(self._stream)
        self._path.guard(event)
        return event
