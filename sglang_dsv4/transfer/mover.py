"""Stream and event order of a save and of a load.

    save:  current stream --(wait)--> transfer stream: copies, event --> the host waits for the event
    load:  current stream, fences --(wait)--> transfer stream: clear, copies, event --(wait)--> current stream

A save returns only when the bytes are on the host: the device pages may be handed to a request admitted in the
same iteration and be written outside any stream. A load returns when enqueued; the blocks it reads are reused only
after its event, and whatever is enqueued on the current stream afterwards sees its bytes. Fences are streams
whose queued work may still write the pages that were just handed over (a finished request's last forward).
Nothing here synchronizes the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import numpy as np
import torch

from sglang_dsv4.cache.families import Group
from sglang_dsv4.cache.rows import Int64s, Spans
from sglang_dsv4.hostmem.blocks import Event
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.transfer.device import DeviceSide
from sglang_dsv4.transfer.jobs import Jobs, describe, row_image
from sglang_dsv4.transfer.paths import Path

Fences = Callable[[], Iterable["torch.cuda.Stream"]]


class Mover:
    """Moves copies of one pool on a stream of its own (none on CPU, where everything is in order anyway)."""

    def __init__(self, side: DeviceSide, path: Path, fences: Fences) -> None:
        self._side, self._path, self._fences = side, path, fences
        cuda = side.device.type == "cuda"
        self._stream = torch.cuda.Stream(side.device) if cuda else None

    def warm_up(self) -> None:
        """Compile the kernels now, at start, by a transfer of nothing: page -1 and a segment of no layer."""
        nothing = Jobs(np.array([-1]), np.array([0]), np.zeros((1, 8), np.int64), 1, 8, ())
        with self._transfer(after=()):
            for save in (True, False):
                self._path.move(nothing, save)
            self._path.clear(0)  # no request is there yet
            self._path.guard(self._record())

    def begin_save(self, copy: HostCopy, pages: Int64s) -> None:
        """Start on the pages of ``copy`` while its rows are still being planned. ``save`` must follow, or a release."""
        with self._transfer(after=()):
            try:
                self._path.begin_save(pages, copy.blocks[Group.BLOCK])
            finally:
                self._finish(copy, self._record())

    def begin_load(self, copy: HostCopy) -> None:
        """Bring ``copy`` near while its new place is still being found. Writes nothing to the cache."""
        if self._stream is None:
            return
        with torch.cuda.stream(self._stream):
            copy.lease.used_by = self._path.begin_load(copy.blocks[Group.BLOCK], row_image(copy))

    def save(self, copy: HostCopy, plan: tuple[Spans, ...]) -> None:
        """Fill ``copy`` from the device; the bytes are on the host when this returns."""
        jobs = describe(self._side, copy, plan)
        event = None
        with self._transfer(after=()):
            try:
                self._path.move(jobs, save=True)
            finally:  # what was enqueued before an error still writes to the blocks
                event = self._record()
                self._finish(copy, event)
        if event is not None:
            event.synchronize()

    def load(self, copy: HostCopy, plan: tuple[Spans, ...], slot: int) -> None:
        """Write ``copy`` to the device, ordered before whatever the current stream gets next."""
        jobs = describe(self._side, copy, plan)
        with self._transfer(after=self._fences()):
            # The slot's ring holds its previous owner's rows; with speculation they can be read.
            try:
                self._path.clear(slot)
                self._path.move(jobs, save=False)
            finally:
                event = self._record()
                self._finish(copy, event)
        if self._stream is not None and event is not None:
            torch.cuda.current_stream(self._side.device).wait_event(event)  # type: ignore[arg-type]

    def _finish(self, copy: HostCopy, event: Event | None) -> None:
        copy.lease.used_by = event
        self._path.guard(event)

    def _transfer(self, after: Iterable[torch.cuda.Stream]) -> contextlib.AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._side.device))
        for stream in after:
            self._stream.wait_stream(stream)
        return torch.cuda.stream(self._stream)

    def _record(self) -> Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event
