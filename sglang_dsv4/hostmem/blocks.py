"""Hands out the equal blocks of one group; ranks that share an arena get the same numbers without communication.

Every block is in exactly one of two places:

    | free | held: by a live copy, by a page of a session, or by several of them |
    total = free + held

A free block may still be read by the transfer of its last owner: it remembers its last turn, and its next owner waits
for that turn (see ``turns``). The blocks of a ``take`` depend on earlier takes and releases alone, never on the
progress of a stream.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.rows import Int64s

RESTING = 8  # turns after which, in practice, no transfer reads a block; until then other blocks are preferred


class BlockPool:
    """Manages blocks 0..total-1 of one group. Not thread-safe: the scheduler thread owns it."""

    def __init__(self, group: Group, total: int) -> None:
        self.group = group
        self.total = total
        self._holders = np.zeros(total, dtype=np.int32)
        self._last = np.zeros(total, np.int64)
        self._touched: deque[tuple[int, Int64s]] = deque(maxlen=RESTING)  # turns and their blocks; a turn touches once
        self._tenants = np.zeros(total, dtype=bool)
        self.held = 0
        self.idle = 0  # that the tenant alone holds

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
        self._holders[taken] = 1
        self.held += count
        return taken

    def hold(self, blocks: Int64s) -> None:
        """Adds a holder to each of ``blocks``, which have one already and hold bytes that are wanted twice."""
        holders = self._holders[blocks]
        assert holders.all(), f"{self.group.value} blocks that nobody holds: {blocks}"
        self.idle -= int(np.count_nonzero(self._tenants[blocks] & (holders == 1)))
        self._holders[blocks] = holders + 1

    def keep(self, blocks: Int64s) -> None:
        """Makes the tenant a holder of ``blocks``, which a copy holds."""
        self.hold(blocks)
        self._tenants[blocks] = True

    def forget(self, blocks: Int64s) -> None:
        """Gives ``blocks`` back, which the tenant holds."""
        self._tenants[blocks] = False
        self.idle -= int(np.count_nonzero(self._holders[blocks] == 1))
        self.give_back(blocks)

    def is_shared(self, block: int) -> bool:
        """Returns whether ``block`` has more than one holder: it is not free when one of them gives it back."""
        return int(self._holders[block]) > 1

    def last_turn(self, blocks: Int64s) -> int:
        """Returns the last turn that touched one of ``blocks``; 0 where none did."""
        return int(self._last[blocks].max()) if len(blocks) else 0

    def _choose(self, count: int, now: int) -> Int64s:
        """Chooses the first run of ``count`` neighbours, else the first ``count``, of the rested free blocks.

        An arena may have half a million blocks: to list them takes longer than all the rest of a save.
        """
        free = self._holders == 0
        for turn, blocks in self._touched:
            if turn > now - RESTING:
                free[blocks] = False
        if np.count_nonzero(free) < count:
            free = self._holders == 0
            free &= self._last <= np.partition(self._last[free], count - 1)[count - 1]
        first = free.tobytes().find(bytes([True]) * count)
        return np.arange(first, first + count) if first >= 0 else np.flatnonzero(free)[:count]

    def touch(self, blocks: Int64s, turn: int) -> None:
        """Notes that the transfer of ``turn`` may touch ``blocks``, all that it touches here."""
        self._last[blocks] = turn
        self._touched.append((turn, blocks))

    def give_back(self, blocks: Int64s) -> None:
        """Takes one holder from each of ``blocks``; those without another are free."""
        left = self._holders[blocks] - 1
        self._holders[blocks] = left
        self.held -= len(left) - int(np.count_nonzero(left))
        self.idle += int(np.count_nonzero(self._tenants[blocks] & (left == 1)))

    def check_integrity(self, held: Int64s, tenants: Int64s) -> None:
        """Raises AssertionError unless each block has as many holders as copies' ``held`` and ``tenants`` name it."""
        named = np.bincount(np.concatenate([held, tenants]), minlength=self.total)
        alone = len(np.setdiff1d(tenants, held))
        if self.idle != alone:
            raise AssertionError(f"{self.group.value} blocks: {self.idle} of the tenant alone are counted, not {alone}")
        counted = int((self._holders > 0).sum())
        if counted != self.held or len(named) != self.total or not np.array_equal(named, self._holders):
            wrong = np.flatnonzero(named[: self.total] != self._holders)[:4].tolist()
            raise AssertionError(
                f"{self.group.value} blocks: {counted} have holders, {self.held} are counted, of {self.total}; blocks "
                f"{wrong} have others than are known"
            )
