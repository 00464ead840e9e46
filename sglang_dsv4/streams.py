"""Switching the current stream."""

from __future__ import annotations

from types import TracebackType

import torch


class on_stream:  # noqa: N801
    """``with on_stream(inner, outer)``: ``inner`` is current, then ``outer`` again, as the caller knows it was.

    torch.cuda.stream looks up the device and the current stream anew each time, which a transfer would do five times.
    """

    def __init__(self, inner: torch.cuda.Stream, outer: torch.cuda.Stream) -> None:
        self._inner, self._outer = inner, outer

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._inner)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        torch.cuda.set_stream(self._outer)
