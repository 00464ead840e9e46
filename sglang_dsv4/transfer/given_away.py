"""A retract gives pages away that its save still reads, and that the forward in flight may still write.

Nobody waits for the save on the host, unless he must. Who may get the pages next, and what keeps him back:

    the next forward                    the current stream, which it is launched behind
    what the current stream gets next   the current stream itself
    another load or save                the copier's streams, which work in order
    a transfer from a prefill server    in no stream: the host waits before it takes the pages
    a release of the device's memory    the same

The last two find everything over, nearly always. They also wait for loads: a request may end right after its resume,
with its load still queued, which would overwrite what comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_dsv4.streams import Event


class GivenAway:
    """What still touches pages of one pool that may be given to others. The scheduler thread owns it."""

    def __init__(
        self, device: torch.device, writer_streams: Callable[[], Iterable[Any]], cuda: Any = torch.cuda
    ) -> None:
        self._device, self._writer_streams, self._cuda = device, writer_streams, cuda
        self._transfer: Event | None = None  # the last: each comes after the one before
        self._forwards: list[Event] = []
        self._in_retract = False

    def transferred(self, end: Event | None) -> None:
        """A save or a load was enqueued; ``end`` comes after it, or is None where it is over."""
        self._transfer = end

    def pages(self) -> None:
        """A request's pages are free from now on."""
        self._forwards = []
        for stream in self._writer_streams():
            event = self._cuda.Event()
            event.record(stream)
            self._forwards.append(event)
        if not self._in_retract:
            self.wait_on_the_stream()

    @contextmanager
    def one_retract(self) -> Iterator[None]:
        """Until its end the current stream does not wait for the saves made within.

        Nothing that a retract puts there touches a request's pages, or its row of indices.
        """
        self._in_retract = True
        try:
            yield
        finally:
            self._in_retract = False
            self.wait_on_the_stream()

    def wait_on_the_stream(self) -> None:
        """What the current stream gets next comes after the transfers."""
        if self._transfer is not None:
            self._cuda.current_stream(self._device).wait_event(self._transfer)

    def wait(self) -> None:
        """Return when nothing touches pages that were given away."""
        for event in (self._transfer, *self._forwards):
            if event is not None:
                event.synchronize()
        self._transfer, self._forwards = None, []
