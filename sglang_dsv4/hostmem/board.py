"""Publishes each rank's progress in shared memory, so that ranks that share units wait without a collective.

Ranks issue the same tickets, of saves and loads, in the same order, so one number says how far a rank is.

    a rank's line, int64:  | done | ballot 0 | ballot 1 | told | heard | ... | named 0 | named 1 | told 0 | told 1 |

``done`` is the last ticket up to which none of the rank's transfers touches units any more. A ballot is twice its
number plus the answer. Ballots alternate between two places: a rank that writes one again has seen every rank's next
ballot, so every rank had read it. What the first rank tells alternates, too; it waits for those that have not heard. A
line is written by its rank alone, each number in one store. A fence comes before a number that tells of anything
written before it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_dsv4.cache.packed import align
from sglang_dsv4.errors import RankNotHeard
from sglang_dsv4.hostmem.fences import fence_of_this_rank
from sglang_dsv4.hostmem.populate import system_page

PATIENCE = 1800.0  # seconds that another rank is waited for: as long as the engine's own collectives do
SPIN = 0.0005  # seconds of waiting before it sleeps
SLEEP = 0.00005
NAMED = 64  # numbers that a rank can name at once

_LINE = 384  # int64 a rank
_DONE, _BALLOT, _TOLD, _HEARD = 0, 1, 3, 4
_NAMES, _TELLS = 64, 192  # each two lists of NAMED numbers


class Board:
    """Reads and writes the first bytes of ``memory``, zero at start. The scheduler thread owns this rank's line."""

    def __init__(self, memory: Any, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._lines = np.frombuffer(memory, np.int64, ranks * _LINE).reshape(ranks, _LINE)
        self._mine = self._lines[rank]
        self._fence = fence_of_this_rank()
        self._votes = self._tells = 0

    @staticmethod
    def bytes_for(ranks: int) -> int:
        """Returns the bytes of a board, in whole pages."""
        return align(ranks * _LINE * 8, system_page())

    def publish(self, done: int) -> None:
        """Publishes that none of this rank's transfers up to ticket ``done`` touches units any more."""
        self._fence()
        self._mine[_DONE] = done

    def wait_done(self, ticket: int) -> None:
        """Returns when every rank has published ``ticket``. Raises RankNotHeard."""
        late = self._wait(self._lines[:, _DONE], ticket)
        if late is not None:
            raise self._not_heard(late, f"ticket {self._lines[late, _DONE]}, and {ticket}")

    def vote(self, answer: bool) -> bool:
        """Returns whether every rank answers True; all ranks call it equally often. Raises RankNotHeard."""
        self._votes += 1
        ballots = self._lines[:, _BALLOT + self._votes % 2]
        self._fence()
        ballots[self.rank] = 2 * self._votes + answer
        late = self._wait(ballots, 2 * self._votes)
        if late is not None:
            last = int(self._lines[late, _BALLOT : _BALLOT + 2].max()) // 2
            raise self._not_heard(late, f"ballot {last}, and {self._votes}")
        return bool((ballots & 1).all())

    def common(self, numbers: Sequence[int]) -> list[int]:
        """Returns the numbers (from 1) that every rank names, of the first ``NAMED`` of each; called as ``vote``."""
        at = _NAMES + (self._votes + 1) % 2 * NAMED
        named = self._lines[:, at : at + NAMED]
        named[self.rank] = 0
        named[self.rank, : len(numbers[:NAMED])] = numbers[:NAMED]
        self.vote(True)
        found = set.intersection(*(set(line.tolist()) for line in named))
        return sorted(found - {0})

    def is_done(self, ticket: int) -> bool:
        """Returns whether every rank has published ``ticket``."""
        return bool(self._lines[:, _DONE].min() >= ticket)

    def tell(self, numbers: Sequence[int]) -> list[int]:
        """Returns the numbers that the first rank gives, at most ``NAMED``; all ranks call it equally often.

        The first rank waits for none, but for those that have not heard what it told the time before the last.
        Raises RankNotHeard.
        """
        self._tells += 1
        first, place = self._lines[0], _TELLS + self._tells % 2 * NAMED
        if self.rank == 0:
            self._hear(self._lines[:, _HEARD], self._tells - 2)
            first[place : place + len(numbers)] = numbers
            first[place + len(numbers) : place + NAMED] = 0
            self._fence()
            first[_TOLD] = self._tells
        else:
            self._hear(self._lines[:1, _TOLD], self._tells)
        told = [int(number) for number in first[place : place + NAMED] if number]
        self._fence()  # it was read before it may be written again
        self._mine[_HEARD] = self._tells
        return told

    def _hear(self, column: Any, least: int) -> None:
        late = self._wait(column, least)
        if late is not None:
            raise self._not_heard(late, f"telling {column[late]}, and {least}")

    def _wait(self, column: Any, least: int) -> int | None:
        """Returns when all of ``column`` are at ``least``; after PATIENCE with the rank of the smallest."""
        started = time.monotonic()
        while int(column.min()) < least:
            waited = time.monotonic() - started
            if waited > PATIENCE:
                return int(column.argmin())
            time.sleep(0 if waited < SPIN else SLEEP)
        return None

    def _not_heard(self, late: int, at: str) -> RankNotHeard:
        return RankNotHeard(
            f"rank {late} of {self.ranks} is at {at} was waited for {PATIENCE:.0f} s by rank {self.rank}: the ranks "
            "retract different requests, or one of them hangs; DSV4_SHARE=off gives each rank an arena of its own"
        )
