"""Hands out the equal blocks of one group; ranks that share an arena get the same numbers without communication.

Every block is in exactly one of two places:

    | free | held by a live copy |
    total = free + held

A free block may still be read by the transfer of its last owner: it remembers its last turn, and its next owner waits
for that turn (see ``turns``). The blocks of a ``take`` depend on earlier takes and releases alone, never on the
progress of a stream.
"""

from __future__ import annotations

import numpy as np

from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.rows import Int64s

RESTING = 8  # turns after which, in practice, no transfer reads a block; until then other blocks are preferred
_NEVER = -RESTING


class BlockPool:
    """Manages blocks 0..total-1 of one group. Not thread-safe: the scheduler thread owns it."""

    def __init__(self, group: Group, total: int) -> None:
        self.group = group
        self.total = total
        self._free = np.ones(total, dtype=bool)
        self._last = np.full(total, _NEVER)
        self.held = 0

    @property
    def available(self) -> int:
        """Blocks that are free."""
        return self.total - self.held

    def take(self, count: int, now: int = 0) -> Int64s:
        """Takes ``count`` blocks, neighbours where possible (one run is one large copy), and returns their numbers.

        now: the last turn that ended. The caller has checked ``available``, and waits for their ``last_turn``.
        """
        if not count:
            return np.empty(0, np.int64)
        taken = self._choose(count, now)
        self._free[taken] = False
        self.held += count
        return taken

    def last_turn(self, blocks: Int64s) -> int:
        """Returns the last turn that touched one of ``blocks``; 0 where none did."""
        return int(self._last[blocks].max(initial=0))

    def _choose(self, count: int, now: int) -> Int64s:
        """Chooses the first run of ``count`` neighbours, else the first ``count``, of the rested free blocks."""
        free = np.flatnonzero(self._free & (self._last <= now - RESTING))
        if len(free) < count:
            free = np.flatnonzero(self._free)
            last = self._last[free]
            free = free[last <= np.partition(last, count - 1)[count - 1]]
        first = 0
        if free[count - 1] - free[0] != count - 1:
            neighbours = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
            first = int(neighbours[0]) if len(neighbours) else 0
        return free[first : first + count].astype(np.int64)

    def touch(self, blocks: Int64s, turn: int) -> None:
        """Notes that a transfer of ``turn`` may touch ``blocks``."""
        self._last[blocks] = turn

    def give_back(self, blocks: Int64s) -> None:
        """Frees the blocks of a released copy."""
        self._free[blocks] = True
        self.held -= len(blocks)

    def check_integrity(self, held: Int64s) -> None:
        """Raises AssertionError unless free + held are a partition of all blocks.

        held: the blocks of all live copies.
        """
        free = np.flatnonzero(self._free)
        everything = np.sort(np.concatenate([free, held]))
        if len(held) != self.held or not np.array_equal(everything, np.arange(self.total)):
            raise AssertionError(
                f"{self.group.value} blocks: free {len(free)} + held {len(held)} (counted {self.held}) != total "
                f"{self.total}, or one block is in two places"
            )
