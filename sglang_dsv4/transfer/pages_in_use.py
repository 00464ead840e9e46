"""Orders later users of freed pages behind the transfers and forwards that still touch them.

A retract frees pages that its save still reads, and that the forward in flight may still write. A stream waits until
the last save has gathered them, which begins when the transfer before it is over. The host waits for all of it, where
no stream can. The next user of the pages waits

    the next forward                    on the current stream, which it is launched behind
    later work of the current stream    on that stream
    another load or save                on the copier's streams, which work in order
    a transfer from a prefill server    in no stream: the host waits before it takes the pages
    a release of the device's memory    the same

The last two mostly find everything over: a decode server that writes answers has a small save in many passes. They also
wait for loads: a request may end right after its resume, with its load still queued, which would overwrite the incoming
pages.

For a session's save the current stream alone waits: no forward writes pages before a page end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_dsv4.streams import Event


class PagesInUse:
    """Tracks the transfers and forwards that still touch freed pages of one pool. The scheduler thread owns it."""

    def __init__(
        self, device: torch.device, writer_streams: Callable[[], Iterable[Any]], cuda: Any = torch.cuda
    ) -> None:
        self._device, self._writer_streams, self._cuda = device, writer_streams, cuda
        self._transfer: Event | None = None  # the last: each comes after the one before
        self._touched: Event | None = None  # after it that one touches no pages any more
        self._events: list[Any] = []  # of the writers, recorded again and again
        self._forwards: list[Event] = []
        self._in_retract = False

    def transferred(self, end: Event | None, gathered: Event | None = None) -> None:
        """Notes an enqueued save or load; ``end`` comes after it, or is None where it is over.

        gathered: of a save, comes after its last look at the request's pages.
        """
        self._transfer, self._touched = end, gathered or end

    def record_writers(self) -> None:
        """Records the forwards that may still write a request's pages, free from now on."""
        self._forwards = []
        for number, stream in enumerate(self._writer_streams()):
            if number == len(self._events):
                self._events.append(self._cuda.Event())
            self._events[number].record(stream)
            self._forwards.append(self._events[number])
        if not self._in_retract:
            self.wait_on_the_stream()

    @contextmanager
    def one_retract(self) -> Iterator[None]:
        """Lets the current stream wait once, at the end, for the saves made within.

        Nothing that a retract puts there touches a request's pages, or its row of indices.
        """
        self._in_retract = True
        try:
            yield
        finally:
            self._in_retract = False
            self.wait_on_the_stream()

    def wait_on_the_stream(self) -> None:
        """Orders later work of the current stream behind the transfers."""
        if self._touched is not None:
            self._cuda.current_stream(self._device).wait_event(self._touched)

    def wait(self) -> None:
        """Waits on the host until nothing touches freed pages."""
        for event in (self._transfer, *self._forwards):
            if event is not None:
                event.synchronize()
        self._transfer, self._touched, self._forwards = None, None, []
