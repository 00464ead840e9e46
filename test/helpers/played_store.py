"""Plays a store's process over the other end of its socket, dying only when told to."""

from __future__ import annotations

import array
import json
import mmap
import os
import socket
import subprocess

from sglang_dsv4.store.client import Arena, Limits, State, StoreClient
from sglang_dsv4.store.process import StoreProcess
from sglang_dsv4.store.wire import GET, MAIL, MOST_BYTES, PUT, Code, Kind, Piece, Question, pack, unpack

KEY = b"k" * 32
PAGE = 4
MORE = Limits(tickets=10**6, credits=10**9, hang=1e9, slow=1e9)
LANES = {"writes": PUT, "reads": GET}


ARENA = os.memfd_create("arena")


class Clock:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Child:
    """A child process; ``kill`` only marks it, as a kernel that takes its time."""

    def __init__(self, clock, waits):
        self.status, self.killed, self._clock, self._waits = None, False, clock, waits

    def poll(self):
        return self.status

    def kill(self):
        self.killed = True

    def wait(self, timeout):
        if self.status is None:
            self._clock.now += timeout
            self._waits()
        if self.status is None:
            raise subprocess.TimeoutExpired("played", timeout)
        return self.status


class Life:
    """One process: what it was started with, what it was sent, what it says."""

    def __init__(self, clock, command, files, hello, played):
        self.ours, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.setblocking(False)
        for side in (self.ours, self.end):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        self.command, self.hello = command, json.loads(unpack(hello)[3])
        self.child = Child(clock, lambda: played.waits(self))
        self._memory = mmap.mmap(files[1], self.hello["shared_bytes"])
        self.shared = memoryview(self._memory)
        self.words = self.shared[:4096].cast("q")

    def read(self):
        """Returns all messages that it was sent."""
        got = []
        while True:
            try:
                raw = self.ours.recv(MOST_BYTES)
            except OSError:  # no more, or closed
                return got
            if not raw:
                return got
            got.append(unpack(raw))

    def say(self, kind, ticket=0, count=0, body=b""):
        """Returns whether somebody may read it."""
        return self.say_raw(pack(kind, ticket, count, body))

    def say_raw(self, raw):
        try:
            self.ours.send(raw)
        except OSError:
            return False
        self.words[MAIL // 8] += 1
        return True

    def ready(self):
        self.say(Kind.READY)

    def codes(self, kind, ticket, codes):
        return self.say(kind, ticket, len(codes), bytes(codes))

    def step(self, lane):
        self.words[LANES[lane] // 8] += 1

    def die(self, status=-9):
        self.ours.close()
        self.child.status = status


class Played:
    """A client, its clock and the lives of its process."""

    def __init__(self, limits=Limits(), **more):  # noqa: B008 - frozen
        self.clock, self.lives, self.unstartable = Clock(), [], False
        self.waits = lambda life: None  # what happens while the client waits, in ``close`` alone
        arena = Arena(fd=ARENA, nbytes=1 << 20, start=4096, units=200, unit_bytes=4096)
        self.client = StoreClient(
            arena, 5, "file", {"a": [1]}, "model", limits=limits, clock=self.clock, start=self._launch, **more
        )

    def _launch(self, command, files, hello):
        if self.unstartable:
            raise OSError("no memory")
        self.lives.append(Life(self.clock, command, files, hello, self))
        return StoreProcess(self.lives[-1].child, self.lives[-1].end)

    @property
    def life(self):
        return self.lives[-1]

    def passes(self, seconds=0.0, count=1):
        """Polls ``count`` times while ``seconds`` go by."""
        events = []
        for _ in range(count):
            self.clock.now += seconds / count
            events += self.client.poll()
        return events

    def up(self):
        """Starts a process that is ready, after the back-off."""
        lives = len(self.lives)
        while len(self.lives) == lives:
            self.passes(0.5)
        self.life.ready()
        self.passes()
        return self


def pieces(*units):
    return [Piece(unit, unit % 6, bytes([unit]) * 32) for unit in units]


def question(count=1, ahead=0):
    return Question(KEY, have=1, first=2, count=count, page=PAGE, ahead=ahead, at=77777)


def ids(count, first=0):
    return array.array("q", range(first, first + count))


def ask(played, count=1, first=0):
    return played.client.ask(question(count), ids(count * PAGE, first))


def found(played, end=1, count=1):
    """A ticket that found something."""
    ticket = ask(played, count)
    played.life.say(Kind.FOUND, ticket, end)
    assert [event[:3] for event in played.passes()] == [("found", ticket, end)]
    played.life.read()
    return ticket


def fail(played, count=1):
    """Lets the store fail so many writes, one after the other."""
    for _ in range(count):
        ticket = played.client.write(pieces(1), KEY)
        played.life.codes(Kind.STORED, ticket, [Code.FAILED])
        assert [event.name for event in played.passes()] == ["stored"]


def works(played):
    """Lets it do one."""
    ticket = played.client.write(pieces(1), KEY)
    played.life.codes(Kind.STORED, ticket, [Code.OK])
    assert [event.value for event in played.passes()] == [b"\0"]


def opened_for(played):
    """Returns after how many seconds the breaker lets a ticket through."""
    begin = played.clock.now
    while played.client.breaker_open:
        assert (ask(played), played.client.write(pieces(1), KEY)) == (None, None)
        played.passes(0.5)
    return round(played.clock.now - begin)


def restarts(played, deaths):
    """Returns how long each restart took of a process that is killed when it is ready."""
    took = []
    for _ in range(deaths):
        played.life.die()
        lives = len(played.lives)
        while played.client.state is State.UP:
            played.passes(0.5)
        begin = played.clock.now
        while len(played.lives) == lives:
            played.passes(0.05)
        took.append(round(played.clock.now - begin, 0))
        played.life.ready()
        played.passes()
    return took
