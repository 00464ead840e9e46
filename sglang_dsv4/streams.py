"""torch.cuda.stream looks up the device and the current stream at each change; who knows both need not pay for it.

Here is a switch between two known streams, and a name for the two things that everybody asks of an event.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import torch


class Event(Protocol):
    """What a piece of enqueued work leaves behind: torch.cuda.Event, or anything with these two."""

    def query(self) -> bool:
        """Whether the work has finished."""

    def synchronize(self) -> None:
        """Wait for it."""


class on_stream:  # noqa: N801
    """``with on_stream(inner, outer)``: ``inner`` is current, then ``outer`` again, as the caller knows it was."""

    def __init__(self, inner: torch.cuda.Stream, outer: torch.cuda.Stream) -> None:
        self._inner, self._outer = inner, outer

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._inner)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        torch.cuda.set_stream(self._outer)
