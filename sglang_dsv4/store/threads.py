"""Answers the packets of the scheduler on the threads of the store's process: one writes, one reads."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from sglang_dsv4.store import wire
from sglang_dsv4.store.keys import object_name
from sglang_dsv4.store.lanes import Job, Lanes
from sglang_dsv4.store.wire import Code, Kind

logger = logging.getLogger(__name__)


class Packet(NamedTuple):
    """Holds a WRITE, an ASK, a LOAD or a DROP."""

    kind: Kind
    ticket: int
    body: bytes


Inbox: TypeAlias = "queue.SimpleQueue[Packet | None]"  # None: there will be no more


@dataclass(eq=False)
class Load:
    """Holds a LOAD that is under way. due: the objects that all loads may have read when this one ends."""

    ticket: int
    count: int
    due: int
    steps: Iterator[list[Code]]
    codes: list[Code] = field(default_factory=list)

    def left(self) -> int:
        """Returns how many objects are not read yet."""
        return self.count - len(self.codes)


class Channel:
    """Sends packets from any thread, and counts them and the steps of the lanes in the shared memory."""

    def __init__(self, sock: socket.socket, shared: np.ndarray) -> None:
        self.sock = sock
        self._words = shared[: wire.CONTROL].view(np.int64)
        self._lock = threading.Lock()

    def beat(self, lane: int) -> None:
        """Counts a step of PUT or GET, each of one thread: a call begins, or ends and its nanoseconds count."""
        now, word = time.monotonic_ns(), lane // 8
        began = int(self._words[word + wire.BEGUN // 8])
        self._words[word] += 1
        self._words[word + wire.BEGUN // 8] = 0 if began else now  # before what it took: nobody counts that twice
        self._words[word + wire.SPENT // 8] += now - began if began else 0

    def send(self, kind: Kind, ticket: int = 0, count: int = 0, body: bytes = b"", wait: bool = True) -> None:
        """Sends one message. Without ``wait`` it is lost where the scheduler does not read."""
        if not self._lock.acquire(timeout=-1 if wait else 0.1):
            return
        try:
            self.sock.send(wire.pack(kind, ticket, count, body), 0 if wait else socket.MSG_DONTWAIT)
            self._words[wire.MAIL // 8] += 1
        except OSError:  # the scheduler is gone, which the main thread sees, too
            return
        finally:
            self._lock.release()

    def codes(self, kind: Kind, ticket: int, codes: list[Code]) -> None:
        """Sends a STORED or a LOADED."""
        self.send(kind, ticket, len(codes), bytes(codes))

    def oops(self, text: str, ticket: int = 0) -> None:
        """Tells what went wrong."""
        self.send(Kind.OOPS, ticket, 0, text.encode(errors="replace")[:2000])

    def raised(self, error: Exception, ticket: int) -> None:
        """Tells what a backend raised in the work for ``ticket``."""
        logger.debug("ticket %d", ticket, exc_info=error)
        self.oops(f"{type(error).__name__}: {error}", ticket)


class Putter:
    """Stores what WRITEs name, one after the other, on a thread of its own."""

    def __init__(self, lanes: Lanes, channel: Channel, inbox: Inbox) -> None:
        self._lanes, self._channel, self._inbox = lanes, channel, inbox

    def run(self) -> None:
        """Returns after a None."""
        while (packet := self._inbox.get()) is not None:
            self._store(packet.ticket, *wire.unpack_write(packet.body))

    def _store(self, ticket: int, group: bytes, pieces: list[wire.Piece]) -> None:
        codes: list[Code] = []
        try:
            for done in self._lanes.put(group, pieces, partial(self._channel.send, Kind.COPIED, ticket)):
                codes = done
        except Exception as error:  # noqa: BLE001 - a backend may raise anything; the ticket has to end
            self._channel.raised(error, ticket)
        self._channel.codes(Kind.STORED, ticket, [*codes, *[Code.FAILED] * (len(pieces) - len(codes))])


class Getter:
    """Answers ASKs, and LOADs one after the other; by turns all would end late.

    The earliest that is due comes first: a short one passes one of 1M tokens, which waits for its own length at most.
    """

    def __init__(self, lanes: Lanes, channel: Channel, ids: np.ndarray, inbox: Inbox) -> None:
        self._lanes, self._channel, self._ids, self._inbox = lanes, channel, ids, inbox
        self._asks: deque[Packet] = deque()
        self._loads: list[Load] = []
        self._read = 0  # objects, of all loads
        self._chains: dict[int, list[bytes]] = {}  # of asks that found something

    def run(self) -> None:
        """Returns after a None, whatever is open."""
        while self._take_all():
            if self._asks:
                self._answer(self._asks.popleft())
            if self._loads:
                self._step(min(self._loads, key=attrgetter("due")))
            elif self._lanes.in_doubt():
                self._survey()

    def _take_all(self) -> bool:
        """Sorts what came in; waits where nothing is open. False: a None came."""
        while not self._inbox.empty() or not (self._asks or self._loads or self._lanes.in_doubt()):
            packet = self._inbox.get()
            if packet is None:
                return False
            if packet.kind is Kind.ASK:
                self._asks.append(packet)
            elif packet.kind is Kind.LOAD:
                self._begin(packet)
            else:
                self._drop(packet.ticket)
        return True

    def _begin(self, packet: Packet) -> None:
        keys = self._chains.pop(packet.ticket, None)
        spots = list(wire.unpack_spots(packet.body))
        if keys is None or any(spot.page >= len(keys) for spot in spots):
            self._channel.codes(Kind.LOADED, packet.ticket, [Code.FAILED] * len(spots))
            return
        jobs = [Job(spot.unit, object_name(keys[spot.page], spot.part)) for spot in spots]
        self._loads.append(Load(packet.ticket, len(jobs), self._read + len(jobs), self._lanes.get(jobs)))

    def _drop(self, ticket: int) -> None:
        """Ends a ticket. What is under way is answered all the same: ids and units wait for that."""
        self._chains.pop(ticket, None)
        for ask in [ask for ask in self._asks if ask.ticket == ticket]:
            self._asks.remove(ask)
            self._channel.send(Kind.FOUND, ticket)
        for load in [load for load in self._loads if load.ticket == ticket]:
            self._end(load, Code.MISSING)

    def _answer(self, packet: Packet) -> None:
        end = 0
        try:
            question = wire.unpack_question(packet.body)
            count = question.count * question.page + question.ahead
            keys = self._lanes.chain(question, self._ids[question.at : question.at + count])
            end = self._lanes.ask(keys, question.have, question.first)
            if end:
                self._chains[packet.ticket] = keys
        except Exception as error:  # noqa: BLE001 - a backend may raise anything; the ticket has to end
            self._channel.raised(error, packet.ticket)
        self._channel.send(Kind.FOUND, packet.ticket, end)

    def _survey(self) -> None:
        """Reads some of what is in doubt; nobody waits for it."""
        try:
            self._lanes.survey()
        except Exception as error:  # a backend may raise anything; what is in doubt is in the next load, too
            logger.debug("survey", exc_info=error)

    def _step(self, load: Load) -> None:
        """Reads the next batch of ``load``."""
        before = load.left()
        try:
            load.codes = next(load.steps, load.codes)
        except Exception as error:  # noqa: BLE001 - a backend may raise anything; the ticket has to end
            self._channel.raised(error, load.ticket)
            self._end(load, Code.FAILED)
            return
        self._read += before - load.left()
        if not load.left():
            self._end(load, Code.MISSING)

    def _end(self, load: Load, rest: Code) -> None:
        """Answers; from here on nothing of ``load`` writes to the arena."""
        self._loads.remove(load)
        load.steps.close()  # type: ignore[attr-defined]
        self._channel.codes(Kind.LOADED, load.ticket, [*load.codes, *[rest] * load.left()])
