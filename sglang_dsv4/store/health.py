"""Judges whether a store answers: by the steps of a lane, and by the answers that failed."""

from __future__ import annotations

FAILURES = 3  # in a row, until the store rests
REST, LONGEST_REST = 10.0, 300.0  # seconds


class Lane:
    """Watches the process's writes, or its reads: with work open it has to make steps, which a shared word counts."""

    def __init__(self, words: memoryview, offset: int) -> None:
        """Watches the word at ``offset`` bytes of ``words``, int64."""
        self.open = 0  # tickets that wait for it
        self._words, self._word = words, offset // words.itemsize
        self._steps, self._since = 0, 0.0

    def still_for(self, now: float) -> float:
        """Returns for how many seconds work was open and no step was made."""
        steps = self._words[self._word]
        if not self.open or steps != self._steps:
            self._steps, self._since = steps, now
        return now - self._since

    def opened(self, now: float) -> None:
        """Counts one more ticket."""
        self.still_for(now)
        self.open += 1

    def stepped(self, now: float) -> None:
        """Notes an answer, which is a step, too."""
        self._since = now


class Breaker:
    """Lets a store rest whose answers fail: three in a row, then 10 s, doubling to 300. A good answer ends it.

    After a rest one ticket is let through, the probe. While it rests only the probe's failure counts: the others were
    sent before, and say nothing new.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._rest = self._until = 0.0  # seconds; no rest: closed
        self._probe = 0

    def refuses(self, now: float) -> bool:
        """Returns whether nothing may be sent."""
        return self._rest > 0 and (now < self._until or self._probe != 0)

    def sent(self, ticket: int) -> None:
        """Notes what was let through."""
        if self._rest:
            self._probe = ticket

    def worked(self) -> None:
        """Notes a good answer."""
        self._failures = self._probe = 0
        self._rest = self._until = 0.0

    def failed(self, ticket: int, now: float) -> None:
        """Notes the answer of a ticket that the store failed."""
        if self._rest:
            if ticket == self._probe:
                self._begin_rest(now)
            return
        self._failures += 1
        if self._failures == FAILURES:
            self._begin_rest(now)

    def lost(self) -> None:
        """Notes that the process died and will not answer: the next ticket is the probe."""
        self._probe = 0

    def _begin_rest(self, now: float) -> None:
        self._rest = min(max(2 * self._rest, REST), LONGEST_REST)
        self._until = now + self._rest
        self._probe = 0
