"""A pool of equal blocks for one group.

Every block is in exactly one of three places:

    | free | held by a live copy | returning: released, but a load may still be reading it |
    total = free + held + returning

``available`` counts free AND returning blocks, and ``take`` waits for a returning block when it must: whether
there is room then depends on what was saved and released, never on how far a stream happens to be, so that all
tensor-parallel ranks give the same answer.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from sglang_dsv4.cache.families import Group
from sglang_dsv4.cache.rows import Int64s
from sglang_dsv4.streams import Event


class BlockPool:
    """Blocks number 0..total-1 of one group. Not thread-safe: the scheduler thread owns it."""

    def __init__(self, group: Group, total: int) -> None:
        self.group = group
        self.total = total
        self._free = np.ones(total, dtype=bool)
        self._free_count = total
        self._returning: deque[tuple[Event, Int64s]] = deque()
        self.held = 0

    @property
    def available(self) -> int:
        """Blocks a ``take`` can get."""
        return self.total - self.held

    def take(self, count: int) -> Int64s:
        """``count`` block numbers, neighbours where possible (one run is one large copy).

        The caller has checked ``available``. May wait for a load that still reads a returning block.
        """
        if self._returning:
            self._reclaim(finished_only=True)
        while self._free_count < count:
            self._reclaim(finished_only=False)
        taken = self._choose(count)
        self._free[taken] = False
        self._free_count -= count
        self.held += count
        return taken

    def _choose(self, count: int) -> Int64s:
        """The first run of ``count`` free neighbours, else the first ``count`` free blocks."""
        if count == 1:
            return np.array([self._free.argmax()])
        free = np.flatnonzero(self._free)
        first = 0
        if count and free[count - 1] - free[0] != count - 1:
            neighbours = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
            first = int(neighbours[0]) if len(neighbours) else 0
        return free[first : first + count].astype(np.int64)

    def _free_again(self, blocks: Int64s) -> None:
        self._free[blocks] = True
        self._free_count += len(blocks)

    def give_back(self, blocks: Int64s, after: Event | None) -> None:
        """Blocks of a released copy; they are reused only once ``after`` has passed."""
        if not len(blocks):
            return
        self.held -= len(blocks)
        if after is None or after.query():
            self._free_again(blocks)
        else:
            self._returning.append((after, blocks))

    def _reclaim(self, finished_only: bool) -> None:
        """Free the returning blocks whose event has passed; without ``finished_only`` wait for the oldest."""
        if not finished_only:
            self._returning[0][0].synchronize()
        returning, self._returning = self._returning, deque()
        for event, blocks in returning:
            if event.query():
                self._free_again(blocks)
            else:
                self._returning.append((event, blocks))

    @property
    def returning(self) -> int:
        """Blocks released but not yet reusable."""
        return sum(len(blocks) for _, blocks in self._returning)

    def check_integrity(self, held: Int64s) -> None:
        """Raise AssertionError unless free + held + returning are a partition of all blocks.

        held: the blocks of all live copies.
        """
        free = np.flatnonzero(self._free)
        returning = [blocks for _, blocks in self._returning]
        everything = np.sort(np.concatenate([free, held, *returning]))
        counted = len(held) == self.held and len(free) == self._free_count
        if not counted or not np.array_equal(everything, np.arange(self.total)):
            raise AssertionError(
                f"{self.group.value} blocks: free {len(free)} (counted {self._free_count}) + held {len(held)} "
                f"(counted {self.held}) + returning {self.returning} != total {self.total}, "
                "or one block is in two places"
            )
