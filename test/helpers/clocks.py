"""Keeps vector clocks of the host and of streams, and raises Race for two accesses that nothing orders.

An access asks whether all that it must not overtake happened before it, in every execution that the waits allow: a
missing wait is always found, whatever ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

HOST = "host"

Clock = dict[str, int]  # by actor, the number of its operations


class Race(AssertionError):
    """Reports two accesses in no order."""


class Clocks:
    """Knows of each actor (the host or a stream) the operations that happened before its next one."""

    def __init__(self) -> None:
        self.seen: dict[str, Clock] = defaultdict(lambda: defaultdict(int))
        self._writes: dict[Hashable, tuple[str, int, str]] = {}
        self._reads: dict[Hashable, dict[str, tuple[int, str]]] = defaultdict(dict)

    def learn(self, actor: str, clock: Clock) -> None:
        """Orders the next operation of ``actor`` behind those of ``clock``."""
        for other, count in clock.items():
            self.seen[actor][other] = max(self.seen[actor][other], count)

    def now(self, actor: str) -> Clock:
        """Returns the clock of all that ``actor`` was given so far. A stream is given work by the host."""
        if actor != HOST:
            self.learn(actor, self.seen[HOST])
        return dict(self.seen[actor])

    def do(self, actor: str, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = (), name: str = "") -> None:
        """Notes an operation called ``name``. Raises Race."""
        self.now(actor)
        self.seen[actor][actor] += 1
        at, writes = self.seen[actor][actor], list(writes)
        for thing in (*reads, *writes):
            if (last := self._writes.get(thing)) is not None:
                self._follows(actor, thing, f"{name} uses", last[0], last[1], f"was written by {last[2]}")
        for thing in writes:
            for reader, (count, reading) in self._reads.pop(thing, {}).items():
                self._follows(actor, thing, f"{name} writes", reader, count, f"is read by {reading}")
            self._writes[thing] = actor, at, name
        for thing in reads:
            self._reads[thing][actor] = at, name

    def cut(self, thing: Hashable, parts: Iterable[Hashable]) -> None:
        """Puts ``parts`` in the place of ``thing``."""
        last, readers = self._writes.pop(thing, None), self._reads.pop(thing, {})
        for part in parts:
            self._reads[part] = dict(readers)
            if last is not None:
                self._writes[part] = last

    def ends(self, actor: str, thing: Hashable, name: str, behind: Iterable[str] = ()) -> None:
        """Forgets ``thing``, which ``actor`` gives away. Raises Race where another actor may still use it.

        behind: actors whose work so far is waited for first.
        """
        known = Clocks._merged(self.now(each) for each in (actor, *behind))
        last, users = self._writes.pop(thing, None), self._reads.pop(thing, {})
        if last is not None:
            self._follows(actor, thing, name, last[0], last[1], f"was written by {last[2]}", known)
        for user, (count, use) in users.items():
            self._follows(actor, thing, name, user, count, f"is read by {use}", known)

    @staticmethod
    def _merged(clocks: Iterable[Clock]) -> Clock:
        merged: Clock = {}
        for clock in clocks:
            merged |= {actor: max(count, merged.get(actor, 0)) for actor, count in clock.items()}
        return merged

    def _follows(
        self, actor: str, thing: Hashable, name: str, other: str, count: int, use: str, known: Clock | None = None
    ) -> None:
        if (self.seen[actor] if known is None else known).get(other, 0) < count:
            raise Race(f"{name} {thing} on {actor}, and nothing orders it behind {other}, where it {use}")
