"""Gives a store's process its work and takes the answers: the scheduler's side, which blocks in no call.

    DOWN -> STARTING -> UP -> DYING -> DOWN      again after 0, 1, 2, 4 ... 300 s, until an answer is good
    any  -> OFF                                  by ``close``

Three rules carry the module.
    ``failed`` is told behind the reap alone: a process that is being killed may still write to a unit, or seal it.
    What a process said before it died counts; of one that breaks the protocol nothing more is read.
    What is not accepted at once is refused: a miss, or not written.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any

from typing_extensions import Buffer

from sglang_dsv4.store.process import SharedMemory, StoreProcess, launch
from sglang_dsv4.store.tickets import LIMITS, Event, Limits, Stage, Ticket, Tickets
from sglang_dsv4.store.wire import (
    BEGUN,
    GET,
    MAIL,
    MOST_BYTES,
    PUT,
    SPENT,
    Kind,
    Piece,
    Question,
    Spot,
    pack,
    pack_question,
    pack_spots,
    pack_write,
    unpack,
)

WORKER = (sys.executable, "-m", "sglang_dsv4.store.worker")
LEAST_FREE = 16 << 30
SOON, IDLE = 0.05, 0.5  # seconds until a process that sends nothing is looked at: with work open, without
REAPING = 0.002  # the same while it dies: its units wait
GRACE = 1.0  # seconds for a process that closed its end, to end; ``close`` adds them for a drain, and for a kill
_MAIL = MAIL // 8


class State(StrEnum):
    """Says where the process is."""

    DOWN = "down"
    STARTING = "starting"
    UP = "up"
    DYING = "dying"  # killed or ended, not reaped
    OFF = "off"


@dataclass(frozen=True)
class Arena:
    """Names the memory whose units are written and read."""

    fd: int
    nbytes: int  # of the file
    start: int  # of unit 0 in it
    units: int
    unit_bytes: int


class StoreClient:
    """Owns the process of one store. Not thread-safe: the scheduler thread owns it."""

    def __init__(
        self, arena: Arena, in_tail: int, backend: str, config: dict[str, Any], model: str, secret: bytes | None = None,
        limits: Limits = LIMITS, command: Sequence[str] | None = None, least_free: int = LEAST_FREE, *,
        clock: Callable[[], float] = time.monotonic, start: Callable[..., StoreProcess] = launch,
    ) -> None:  # fmt: skip
        """Prepares; the first ``poll`` starts the process.

        in_tail: units of a window. config: the backend's, as in JSON. command: argv of the process; the backend's name
        follows it. least_free: bytes of disk that a store of files leaves. start: as ``launch``. Raises ValueError for
        a config that is too long.
        """
        self.state, self.last_error = State.DOWN, ""
        self.counts = dict.fromkeys(("starts", "killed", "died", "refused", "full"), 0)
        self._arena, self._limits = arena, limits
        self._command = *(WORKER if command is None else command), backend
        self._clock, self._launch = clock, start
        self._shared = SharedMemory(limits.ids)
        self._words = self._shared.words
        self._tickets = Tickets(self._shared, limits)
        self._hello: dict[str, Any] = {
            "arena_bytes": arena.nbytes, "arena_start": arena.start, "units": arena.units,
            "unit_bytes": arena.unit_bytes, "shared_bytes": self._shared.nbytes, "in_tail": in_tail,
            "backend": backend, "config": config, "model": model,
            "secret": None if secret is None else secret.hex(), "drain": limits.drain, "least_free": least_free,
        }  # fmt: skip
        if len(self._packed_hello()) > MOST_BYTES:
            raise ValueError(f"the store's config is longer than {MOST_BYTES} bytes")
        self._spent = {PUT: 0.0, GET: 0.0}  # seconds of processes that ended
        self._process: StoreProcess | None = None
        self._said = self._verdict = ""  # the last trouble that this process told; why it was killed
        self._seen = 0  # packets of the process that were taken
        self._due = -inf  # when it is looked at without any
        self._start_at, self._start_by, self._delay = -inf, inf, 0.0
        self._end_by = inf  # of a process that closed its end

    @property
    def ended(self) -> bool:
        """Whether there is no process that could write to a unit."""
        return self._process is None

    @property
    def breaker_open(self) -> bool:
        """Whether nothing is sent, because answers failed."""
        return self._tickets.breaker.refuses(self._clock())

    def seconds(self, lane: int) -> float:
        """Returns how long the backend's calls of PUT or GET took until now, with the one that runs."""
        begun = self._words[(lane + BEGUN) // 8]
        running = self._clock() - begun / 1e9 if begun else 0.0
        return self._spent[lane] + self._words[(lane + SPENT) // 8] / 1e9 + running

    def poll(self) -> Sequence[Event]:
        """Returns what happened. Called once a pass: reads one word and the clock when nothing did."""
        if self._words[_MAIL] == self._seen and self._clock() < self._due:
            return ()
        return self._look()

    def write(self, pieces: Sequence[Piece], group: bytes) -> int | None:
        """Has the units of ``pieces`` stored, in this order. Returns the ticket, or None: refused, nothing happened.

        group: a key, of all that a store may evict as one.
        """
        if self.state is not State.UP or not self._tickets.takes_write(len(pieces), self._clock()):
            self.counts["refused"] += 1
            return None
        ticket = Ticket(self._tickets.next_number, Stage.WRITE, [piece.unit for piece in pieces])
        body = pack_write(group, pieces)
        return self._open(ticket, pack(Kind.WRITE, ticket.number, len(pieces), body))

    def ask(self, question: Question, tokens: Buffer) -> int | None:
        """Asks what is stored of ``tokens``, int64 below 2^31. Returns as ``write`` does.

        question: its ``at`` is set here; there are count * page + ahead tokens at least.
        """
        span = None
        if self.state is State.UP and self._tickets.takes_ask(self._clock()):
            span = self._tickets.ids.put(tokens, question.count * question.page + question.ahead)
        if span is None:
            self.counts["refused"] += 1
            return None
        ticket = Ticket(self._tickets.next_number, Stage.ASK, span=span)
        number = self._open(ticket, pack(Kind.ASK, ticket.number, 0, pack_question(question._replace(at=span.at))))
        if number is None:
            self._tickets.ids.free(span)
        return number

    def load(self, ticket: int, spots: Sequence[Spot]) -> bool:
        """Has ``spots`` filled with what ``ticket`` found. False: refused, and the ticket is as it was."""
        if self.state is not State.UP or not self._tickets.takes_load(ticket, spots, self._clock()):
            self.counts["refused"] += 1
            return False
        loads = Ticket(ticket, Stage.LOAD, [spot.unit for spot in spots])
        return self._open(loads, pack(Kind.LOAD, ticket, len(spots), pack_spots(spots))) is not None

    def drop(self, ticket: int) -> None:
        """Forgets a ticket that nobody wants. An ask says no more, a load answers, maybe early, a write goes on."""
        self._tickets.drop(ticket)
        self._send_drops()

    def close(self, seconds: float) -> list[Event]:
        """Ends the process when it has written what was accepted, after ``seconds`` at most. Waits for that.

        A process that cannot be killed keeps its units; ``poll`` returns them should it ever end.
        """
        events: list[Event] = []
        was, self.state = self.state, State.OFF
        if self._process is not None:
            if was is State.UP and seconds > 0:
                self._drain(self._process, seconds, events)
            self._process.kill()
            self._process.wait(GRACE)
            self._look_at(self._process, self._clock(), events)
        if was is not State.OFF:
            self._shared.close()
        self._due = self._clock() + self._pause(self._clock())
        return events

    def _drain(self, process: StoreProcess, seconds: float, events: list[Event]) -> None:
        end, told = self._clock() + seconds + GRACE, False
        while process.status() is None and self._clock() < end:
            told = told or self._send(pack(Kind.DRAIN, count=int(1000 * seconds)))
            self._receive(process, self._clock(), events)
            process.wait(REAPING)

    def _open(self, ticket: Ticket, packet: bytes) -> int | None:
        if not self._send(packet):
            return None
        now = self._clock()
        self._tickets.add(ticket, now)
        self._due = min(self._due, now + SOON)
        return ticket.number

    def _send(self, packet: bytes) -> bool:
        if self._process is None:
            return False
        try:
            self._process.send(packet)
        except BlockingIOError:
            self.counts["full"] += 1
        except OSError:  # it is dead, as the next poll sees
            self._due = -inf
        else:
            return True
        return False

    def _send_drops(self) -> None:
        untold = self._tickets.untold
        while untold and self._send(pack(Kind.DROP, untold[0])):
            untold.popleft()

    def _look(self) -> list[Event]:
        now, events = self._clock(), list[Event]()
        self._seen = self._words[_MAIL]  # first: a packet that comes after the last one taken changes it again
        if self._process is not None:
            self._look_at(self._process, now, events)
        if self.state is State.DOWN and now >= self._start_at:
            self._start(now)
        self._due = now + self._pause(now)
        return events

    def _pause(self, now: float) -> float:
        """Returns the seconds until the next look at a process that sends nothing."""
        if self._process is None:
            return self._start_at - now if self.state is State.DOWN else inf
        if self.state in (State.DYING, State.OFF):
            return REAPING
        return SOON if self._tickets.open or self._tickets.untold or self.state is State.STARTING else IDLE

    def _look_at(self, process: StoreProcess, now: float, events: list[Event]) -> None:
        status = process.status()  # before the packets: none is sent after the reap
        self._receive(process, now, events)
        self._send_drops()
        if status is not None:
            self._bury(process, status, now, events)
        elif now >= self._end_by:
            process.kill()
        elif self.state is State.STARTING and now >= self._start_by:
            self._kill(process, f"the store's process did not start in {self._limits.start:g} s")
        elif self.state is State.UP and (stuck := self._tickets.stuck(now)) is not None:
            self._kill(process, f"the store's {stuck} made no step in {self._limits.hang:g} s")

    def _receive(self, process: StoreProcess, now: float, events: list[Event]) -> None:
        try:
            while packet := process.receive():
                self._take(packet, now, events)
        except (ValueError, struct.error) as error:
            process.close()
            self._kill(process, f"the store's process broke the protocol: {error}")
        else:
            if packet is not None and self._dies("died"):  # it closed its end, and can say nothing any more
                self._end_by = now + GRACE  # not killed at once: its status tells why it ended

    def _take(self, packet: bytes, now: float, events: list[Event]) -> None:
        kind, number, count, body = unpack(packet)
        if kind is Kind.READY:
            if self.state is State.STARTING:
                self.state = State.UP
        elif kind is Kind.OOPS:
            self.last_error = self._said = body.decode(errors="replace")
            self._tickets.note_failure(number)
        elif kind is not Kind.BYE:
            event = self._tickets.take(kind, number, count, body, now)
            if event is not None:
                events.append(event)

    def _kill(self, process: StoreProcess, why: str) -> None:
        if self._dies("killed"):
            process.kill()
            self.last_error = self._verdict = why

    def _dies(self, how: str) -> bool:
        """Notes that the process ends. Returns whether it was not dying yet."""
        if self.state not in (State.STARTING, State.UP):
            return False
        self.counts[how] += 1
        self.state = State.DYING
        return True

    def _bury(self, process: StoreProcess, status: int, now: float, events: list[Event]) -> None:
        self._dies("died")
        process.close()
        self._process = None
        for lane in self._spent:
            self._spent[lane] = self.seconds(lane)
            self._words[(lane + SPENT) // 8] = self._words[(lane + BEGUN) // 8] = 0
        words = f", after: {self._said}" if self._said else ""
        self.last_error = self._verdict or f"the store's process ended with status {status}{words}"
        events += self._tickets.fail(self.last_error)
        if self.state is State.DYING:
            self.state = State.DOWN
            self._back_off(now)

    def _start(self, now: float) -> None:
        for word in range(len(self._words)):
            self._words[word] = 0
        self._seen, self._said, self._verdict, self._tickets.worked, self._end_by = 0, "", "", False, inf
        self.counts["starts"] += 1
        files = (self._arena.fd, self._shared.fd)
        try:
            self._process = self._launch(self._command, files, self._packed_hello())
        except OSError as error:
            self.last_error = f"the store's process cannot be started: {error}"
            self._back_off(now)
        else:
            self.state, self._start_by = State.STARTING, now + self._limits.start

    def _back_off(self, now: float) -> None:
        """Sets when the next process starts. READY does not reset it: a process may start well and die of its work."""
        first, longest = self._limits.back_off
        if self._tickets.worked:
            self._delay = 0.0
        self._start_at = now + self._delay
        self._delay = min(max(first, 2 * self._delay), longest)

    def _packed_hello(self) -> bytes:
        return pack(Kind.HELLO, body=json.dumps(self._hello).encode())
