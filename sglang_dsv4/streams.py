"""Switches between two known CUDA streams at less cost than torch.cuda.stream, and types events.

torch.cuda.stream looks up the device and the current stream at each change.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import torch


class Event(Protocol):
    """Marks the end of enqueued work: torch.cuda.Event, or anything with these two methods."""

    def query(self) -> bool:
        """Returns whether the work has finished."""

    def synchronize(self) -> None:
        """Waits for the work."""


class on_stream:  # noqa: N801
    """Makes ``inner`` the current stream within ``with``, then ``outer``, the current one before."""

    def __init__(self, inner: torch.cuda.Stream, outer: torch.cuda.Stream) -> None:
        self._inner, self._outer = inner, outer

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._inner)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        torch.cuda.set_stream(self._outer)
