"""Numbers the saves and loads, and waits until those that touch a unit are over.

A unit may be taken while a transfer of its last owner still reads it, on this rank or on another that shares it.
Every save and load gets a *ticket*, the next number. Ranks number alike, as they retract and resume the same requests
in the same order; so the transfer of a unit's last ticket must be over before the unit is touched again.
"""

from __future__ import annotations

from collections import deque

from sglang_dsv4.hostmem.board import Board
from sglang_dsv4.streams import Event


class Tickets:
    """Issues this rank's tickets. board: of the ranks that share the units; None: this rank alone has them."""

    def __init__(self, board: Board | None) -> None:
        self.now = 0
        self._board = board
        self._pending: deque[tuple[int, Event]] = deque()

    def issue(self, after: Event | None) -> int:
        """Returns the ticket of the transfer just enqueued, which is over once ``after`` has passed."""
        self.now += 1
        if after is not None:
            self._pending.append((self.now, after))
        self._forget_passed()
        return self.now

    def reach(self, ticket: int) -> None:
        """Waits until the transfers up to ``ticket`` are over, on every rank. Raises RankNotHeard."""
        for number, event in self._pending:
            if number <= ticket and not event.query():
                event.synchronize()
        self._forget_passed()
        if self._board is not None:
            self._board.wait_done(ticket)

    def is_over(self, ticket: int) -> bool:
        """Returns whether the transfers up to ``ticket`` are over, on every rank; waits for none."""
        self._forget_passed()
        done = not self._pending or self._pending[0][0] > ticket
        return done and (self._board is None or self._board.is_done(ticket))

    def _forget_passed(self) -> None:
        while self._pending and self._pending[0][1].query():
            self._pending.popleft()
        if self._board is not None:
            self._board.publish(self._pending[0][0] - 1 if self._pending else self.now)
