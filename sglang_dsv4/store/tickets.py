"""Keeps the tickets of a store: what its process works on, and the units that it may touch until it has answered.

    write   sent, copied (units back, a batch at a time), stored
    ask     sent, found; with something found: load, loaded; or dropped
    any     failed

A unit that was given comes back once: by the answer that ends the process's use of it, or by ``fail``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from sglang_dsv4.store.health import Breaker, Lane
from sglang_dsv4.store.id_ring import IdRing, Span
from sglang_dsv4.store.process import SharedMemory
from sglang_dsv4.store.wire import GET, MOST_PIECES, MOST_SPOTS, PUT, Code, Kind, Spot


@dataclass(frozen=True)
class Limits:
    """Bounds what a store may hold and, in seconds, how long it may take."""

    credits: int = 256  # units of writes that were not copied yet
    tickets: int = 64
    hang: float = 20.0  # without a step: killed
    slow: float = 1.0  # without a step: nothing new
    start: float = 120.0
    drain: float = 10.0  # of a process whose scheduler died
    back_off: tuple[float, float] = (1.0, 300.0)
    ids: int = 4 << 20  # token ids of asks that were not answered


LIMITS = Limits()


class Event(NamedTuple):
    """Tells what became of a ticket.

    copied: value: how many of its units so far. stored, loaded: a Code a unit, as bytes; those without were not tried.
    found: pages; 0: nothing, and the ticket is over. failed: why.
    """

    name: str
    ticket: int
    value: Any
    units: list[int]  # those that are the caller's again


class Stage(StrEnum):
    """Says what a ticket waits for."""

    WRITE = "write"
    ASK = "ask"
    FOUND = "found"  # the caller: to load or to drop
    LOAD = "load"


_ANSWERED_BY = {Stage.WRITE: (Kind.COPIED, Kind.STORED), Stage.ASK: (Kind.FOUND,), Stage.LOAD: (Kind.LOADED,)}


@dataclass(eq=False, slots=True)
class Ticket:
    """Holds the units of one piece of work."""

    number: int
    stage: Stage
    units: Sequence[int] = ()
    back: int = 0  # how many of them, the first ones, came back
    span: Span | None = None  # an ask's ids
    dropped: bool = False
    failed: bool = False  # the process said so; its answer follows


class Tickets:
    """Owns the open tickets, and what bounds them: credits, the ring of ids, lanes and breaker."""

    def __init__(self, shared: SharedMemory, limits: Limits) -> None:
        self.open: dict[int, Ticket] = {}
        self.ids = IdRing(shared.ids)
        self.untold: deque[int] = deque()  # dropped, and the process has to forget what it found
        self.worked = False  # whether this process gave a good answer
        self.breaker = Breaker()
        self._limits = limits
        self._puts, self._gets = Lane(shared.words, PUT), Lane(shared.words, GET)
        self._number = 0  # of the last ticket, of all processes
        self._held = 0  # credits in use

    @property
    def next_number(self) -> int:
        """The number of the ticket that is opened next."""
        return self._number + 1

    def takes_write(self, units: int, now: float) -> bool:
        """Returns whether a write of so many units may be opened."""
        fits = units <= min(self._limits.credits - self._held, MOST_PIECES)
        return fits and len(self.open) < self._limits.tickets and self._works(self._puts, now)

    def takes_ask(self, now: float) -> bool:
        """Returns whether an ask may be opened, if its ids have room."""
        return len(self.open) < self._limits.tickets and self._works(self._gets, now)

    def takes_load(self, ticket: int, spots: Sequence[Spot], now: float) -> bool:
        """Returns whether ``ticket`` found something that may be loaded."""
        found = self.open.get(ticket)
        fits = found is not None and found.stage is Stage.FOUND and len(spots) <= MOST_SPOTS
        return fits and self._works(self._gets, now)

    def add(self, ticket: Ticket, now: float) -> None:
        """Opens ``ticket``, which was sent; or goes on with it, to be loaded."""
        self._number = max(self._number, ticket.number)
        self.open[ticket.number] = ticket
        self._held += len(ticket.units) if ticket.stage is Stage.WRITE else 0
        self._lane_of(ticket).opened(now)
        self.breaker.sent(ticket.number)

    def drop(self, number: int) -> None:
        """Forgets a ticket that nobody wants. An ask says no more, a load answers, maybe early, a write goes on."""
        ticket = self.open.get(number)
        if ticket is None or ticket.dropped or ticket.stage is Stage.WRITE:
            return
        ticket.dropped = True
        if ticket.stage is not Stage.ASK:  # an ask is told to forget when it has found something
            self.untold.append(number)
        if ticket.stage is Stage.FOUND:
            del self.open[number]

    def take(self, kind: Kind, number: int, count: int, body: bytes, now: float) -> Event | None:
        """Takes an answer. Raises ValueError for one that nothing was asked for."""
        ticket = self.open.get(number)
        if ticket is None or kind not in _ANSWERED_BY.get(ticket.stage, ()):
            raise ValueError(f"{kind.name} of ticket {number}")
        self._lane_of(ticket).stepped(now)
        if kind is Kind.COPIED:
            if not ticket.back <= count <= len(ticket.units):
                raise ValueError(f"{count} units copied, {ticket.back} before, of {len(ticket.units)}")
            return Event("copied", number, count, self._give_back(ticket, count))
        if kind is Kind.FOUND:
            return self._take_found(ticket, count, now)
        if len(body) > len(ticket.units):
            raise ValueError(f"{len(body)} codes for {len(ticket.units)} units")
        del self.open[number]
        self._end_work(ticket, ticket.failed or Code.FAILED in body, now)
        name = "stored" if kind is Kind.STORED else "loaded"
        return Event(name, number, body, self._give_back(ticket, len(ticket.units)))

    def _take_found(self, ticket: Ticket, end: int, now: float) -> Event | None:
        if ticket.span is not None:
            self.ids.free(ticket.span)
        self._end_work(ticket, ticket.failed, now)
        ticket.stage = Stage.FOUND
        if ticket.dropped or not end:
            del self.open[ticket.number]
        if not ticket.dropped:
            return Event("found", ticket.number, end, [])
        if end:
            self.untold.append(ticket.number)
        return None

    def note_failure(self, number: int) -> None:
        """Notes that the store failed ``number``; the answer comes all the same."""
        ticket = self.open.get(number)
        if ticket is not None:
            ticket.failed = True

    def stuck(self, now: float) -> str | None:
        """Returns what made no step for so long that the process has to go; None: nothing."""
        lanes = {"writes": self._puts, "reads": self._gets}
        return next((name for name, lane in lanes.items() if lane.still_for(now) >= self._limits.hang), None)

    def fail(self, why: str) -> list[Event]:
        """Ends all tickets. Their process was reaped: nothing writes to their units any more."""
        events = [
            Event("failed", ticket.number, why, self._give_back(ticket, len(ticket.units)))
            for ticket in self.open.values()
            if ticket.stage is not Stage.ASK or not ticket.dropped
        ]
        self.open.clear()
        self.untold.clear()
        self.ids.clear()
        self._puts.open = self._gets.open = 0
        self.breaker.lost()
        return events

    def _works(self, lane: Lane, now: float) -> bool:
        return lane.still_for(now) < self._limits.slow and not self.breaker.refuses(now)

    def _lane_of(self, ticket: Ticket) -> Lane:
        return self._puts if ticket.stage is Stage.WRITE else self._gets

    def _give_back(self, ticket: Ticket, count: int) -> list[int]:
        units, ticket.back = [*ticket.units[ticket.back : count]], count
        self._held -= len(units) if ticket.stage is Stage.WRITE else 0
        return units

    def _end_work(self, ticket: Ticket, failed: bool, now: float) -> None:
        self._lane_of(ticket).open -= 1
        if failed:
            self.breaker.failed(ticket.number, now)
        else:
            self.breaker.worked()
            self.worked = True
