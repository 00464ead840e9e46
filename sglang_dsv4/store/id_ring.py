"""Hands token ids to a store's process in a ring of shared memory: a long prompt has too many for a packet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from typing_extensions import Buffer


@dataclass(eq=False, slots=True)
class Span:
    """Names ids that the process may still read. start: of the first, counted since the ring began."""

    start: int
    at: int  # where that is in the ring
    freed: bool = False


class IdRing:
    """Owns the ring: spans lie in the order of their asks, each without a break.

        ids   |  free  | oldest span | freed, not the oldest | span |  free  |
                       ^ the oldest's start                         ^ head

    A place is used again when every span before it was freed, too.
    """

    def __init__(self, ids: np.ndarray) -> None:
        """Begins empty. ids: int32, the whole ring."""
        self._ids = ids
        self._head = 0  # counted since the ring began, as the spans are: never below the oldest start
        self._spans: deque[Span] = deque()

    def put(self, tokens: Buffer, count: int) -> Span | None:
        """Copies the first ``count`` of ``tokens``, int64 below 2^31; None where there is no room."""
        size, start = len(self._ids), self._head
        if start % size + count > size:  # it does not fit before the ring's end
            start += size - start % size
        oldest = self._spans[0].start if self._spans else start
        if start + count - oldest > size:
            return None
        at = start % size
        np.copyto(self._ids[at : at + count], np.frombuffer(memoryview(tokens), np.int64, count), casting="same_kind")
        span = Span(start, at)
        self._spans.append(span)
        self._head = start + count
        return span

    def free(self, span: Span) -> None:
        """Lets the place of ``span`` be used again."""
        span.freed = True
        while self._spans and self._spans[-1].freed:  # the newest first: a ring with one ask at a time stays in place
            self._head = self._spans.pop().start
        while self._spans and self._spans[0].freed:
            self._spans.popleft()

    def clear(self) -> None:
        """Frees all spans: nobody reads them."""
        self._spans.clear()
        self._head = 0
