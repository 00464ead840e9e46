"""Numbers the saves and loads, and waits until those that touch a unit are over.

A unit may be taken while a transfer of its last owner still reads it, on this rank or on another that shares it.
Every save and load is a *turn*. Ranks number turns alike, as they retract and resume the same requests in the same
order; so a unit's last turn must be over before the unit is touched again.
"""

from __future__ import annotations

from collections import deque

from sglang_dsv4.hostmem.board import Board
from sglang_dsv4.streams import Event


class Turns:
    """Counts this rank's turns. board: of the ranks that share the units; None: this rank alone has them."""

    def __init__(self, board: Board | None) -> None:
        self.now = 0
        self._board = board
        self._pending: deque[tuple[int, Event]] = deque()

    def end(self, after: Event | None) -> int:
        """Number the turn whose last transfer was just enqueued; it is over once ``after`` has passed."""
        self.now += 1
        if after is not None:
            self._pending.append((self.now, after))
        self._forget_passed()
        return self.now

    def reach(self, turn: int) -> None:
        """Waits until the turns up to ``turn`` are over, on every rank. Raises RankNotHeard."""
        for number, event in self._pending:
            if number <= turn and not event.query():
                event.synchronize()
        self._forget_passed()
        if self._board is not None:
            self._board.wait_done(turn)

    def _forget_passed(self) -> None:
        while self._pending and self._pending[0][1].query():
            self._pending.popleft()
        if self._board is not None:
            self._board.publish(self._pending[0][0] - 1 if self._pending else self.now)
