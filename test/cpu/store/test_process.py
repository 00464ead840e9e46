"""A store's client and a real process: killed, stopped, ending in its start, never ready, with unread packets, drained.

The process is a small script that speaks ``wire``: its store is a folder, with a file for each object.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import FORK
from store_scheduler import eventually

import sglang_dsv4
from sglang_dsv4.store import process as process_module
from sglang_dsv4.store.client import Arena, Limits, State, StoreClient
from sglang_dsv4.store.process import Early
from sglang_dsv4.store.wire import Code, Piece, Question, Spot

UNIT, UNITS, START = 512, 24, 4096
PAGE, KEY = 4, b"k" * 32
SCRIPT = """
import json, mmap, os, signal, socket, struct, sys, threading, time
from pathlib import Path
from sglang_dsv4.store.wire import *

mode, folder, (end, parent) = sys.argv[1], Path(sys.argv[2]), map(int, sys.argv[-2:])
end = socket.socket(fileno=end)
first, (arena, shared), *_ = socket.recv_fds(end, MOST_BYTES, 2)
hello = json.loads(unpack(first)[3])
assert parent == os.getppid() and os.environ["CUDA_VISIBLE_DEVICES"] == ""
arena, shared = mmap.mmap(arena, hello["arena_bytes"]), mmap.mmap(shared, hello["shared_bytes"])
words, ids = memoryview(shared)[:CONTROL].cast("q"), memoryview(shared)[CONTROL:].cast("i")

def say(kind, ticket=0, count=0, body=b""):
    end.send(pack(kind, ticket, count, body))
    words[MAIL // 8] += 1

def bytes_of(unit):
    start = hello["arena_start"] + unit * hello["unit_bytes"]
    return slice(start, start + hello["unit_bytes"])

def name(key, part):
    return folder / f"{key.hex()}-{part}"

if mode == "cannot start":
    say(Kind.OOPS, body=b"no such backend")
    sys.exit(3)
if mode.startswith("closes its end"):
    say(Kind.OOPS, body=b"no such backend")
    end.close()
    time.sleep(1000 if mode.endswith("never ends") else 0.3)
    sys.exit(3)
if mode == "never ready":
    time.sleep(1000)
say(Kind.READY)
while True:
    raw = end.recv(MOST_BYTES)
    if not raw:
        break
    kind, ticket, count, body = unpack(raw)
    if kind is Kind.WRITE:
        for number, piece in enumerate(unpack_write(body)[1], 1):
            time.sleep(0.002 if mode == "slow" else 0)
            name(piece.key, piece.part).write_bytes(arena[bytes_of(piece.unit)])
            words[PUT // 8] += 1
            say(Kind.COPIED, ticket, number)
        say(Kind.STORED, ticket, count, bytes(count))
        if mode == "dies with unread packets":
            time.sleep(0.3)
            os._exit(9)
    if kind is Kind.ASK:
        question = unpack_question(body)
        tokens = ids[question.at : question.at + question.count * question.page]
        say(Kind.FOUND, ticket, question.count if sum(tokens) == 6 else 0)
    if kind is Kind.LOAD and mode == "hangs and writes late":
        time.sleep(1.0)
        for spot in unpack_spots(body):
            arena[bytes_of(spot.unit)] = b"L" * hello["unit_bytes"]
        (folder / "late").touch()
    if kind is Kind.LOAD:
        codes = []
        for spot in unpack_spots(body):
            file = name(bytes([spot.page]) * 32, spot.part)
            codes.append(Code.OK if file.exists() else Code.MISSING)
            if file.exists():
                arena[bytes_of(spot.unit)] = file.read_bytes()
        say(Kind.LOADED, ticket, len(codes), bytes(codes))
    if kind is Kind.DRAIN and mode != "does not drain":
        (folder / "drained").write_text(str(count))
        say(Kind.BYE)
        break
"""


class World:
    """A client with an arena, and its passes: all that happened, and the longest call."""

    def __init__(self, folder: Path, mode: str, **limits) -> None:
        self.folder, self.script = folder / "objects", folder / "script.py"
        self.folder.mkdir()
        self.script.write_text(SCRIPT)
        self.file = os.memfd_create("arena")
        nbytes = START + UNITS * UNIT
        os.ftruncate(self.file, nbytes)
        self.memory = mmap.mmap(self.file, nbytes)
        self.memory[:] = b"p" * nbytes  # poison
        self.arena = Arena(self.file, nbytes, START, UNITS, UNIT)
        self.client = StoreClient(self.arena, 5, "none", {}, "model", None, Limits(**limits), self.command(mode))
        self.events, self.longest = [], 0.0

    @property
    def pid(self):
        return self.client._process._child.pid

    def command(self, mode):
        return (sys.executable, str(self.script), mode, str(self.folder))

    def use(self, mode):
        """Changes what the next process does."""
        self.client._command = self.command(mode)

    def until(self, condition, seconds=30.0):
        """Makes passes until ``condition`` holds; returns what they brought."""
        before, end = len(self.events), time.monotonic() + seconds
        while not condition():
            begin = time.monotonic()
            self.events += self.client.poll()
            self.longest = max(self.longest, time.monotonic() - begin)
            assert begin < end, f"{self.client.state}, {self.client.last_error}, {self.events}"
            time.sleep(0.001)
        return self.events[before:]

    def up(self):
        self.until(lambda: self.client.state is State.UP)
        return self

    def answered(self, ticket, *names):
        """The answer to a ticket: its first event of these names."""
        self.until(lambda: any(event.ticket == ticket and event.name in names for event in self.events))
        return next(event for event in self.events if event.ticket == ticket and event.name in names)

    def fill(self, unit, byte):
        start = START + unit * UNIT
        self.memory[start : start + UNIT] = bytes([byte]) * UNIT

    def bytes(self, unit):
        start = START + unit * UNIT
        return self.memory[start : start + UNIT]

    def write(self, *units):
        """Writes units to pages of their number, filled with it."""
        for unit in units:
            self.fill(unit, unit)
        return self.client.write([Piece(unit, 0, bytes([unit]) * 32) for unit in units], KEY)

    def ask(self, *tokens):
        return self.client.ask(Question(b"r" * 32, 0, 0, 1, PAGE, 0, 0), array.array("q", tokens or (0, 1, 2, 3)))

    def returned(self, ticket):
        return [unit for event in self.events if event.ticket == ticket for unit in event.units]


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(sglang_dsv4.__file__).parents[1]))
    made = []

    def make(mode="works", **limits):
        made.append(World(tmp_path, mode, **limits))
        return made[-1]

    yield make
    for one in made:
        if one.client._process is not None:
            one.client.close(0.0)
        os.close(one.file)


def is_alive(pid):
    """Whether it is there and not reaped."""
    return Path(f"/proc/{pid}").exists()


def test_bytes_go_to_the_store_and_come_back(world):
    here = world().up()
    ticket = here.write(3, 4, 5)
    assert here.answered(ticket, "stored").value == bytes(3)
    assert here.returned(ticket) == [3, 4, 5]
    assert here.ask(1, 1, 1, 1) is not None
    ticket = here.ask()
    assert here.answered(ticket, "found").value == 1
    assert here.client.load(ticket, [Spot(9, 0, 4), Spot(10, 0, 5), Spot(11, 0, 77)])
    event = here.answered(ticket, "loaded")
    assert (event.value, event.units) == (bytes([Code.OK, Code.OK, Code.MISSING]), [9, 10, 11])
    assert [here.bytes(unit)[:1] for unit in (9, 10, 11)] == [b"\4", b"\5", b"p"]
    assert [event.value for event in here.events if event.name == "found"] == [0, 1]


def test_a_process_that_was_started_early_is_the_first_one(world):
    """It waits for its HELLO, with the memory, as long as nobody has any; a later start is another process."""
    here = world(back_off=(0.0, 0.0))
    early = Early(here.command("works"))
    pid = early._process._child.pid
    here.client._launch = early.launch
    here.up()
    assert here.pid == pid
    assert here.answered(here.write(3), "stored").value == bytes(1)
    early.close()
    assert is_alive(pid), "it is the client's now"
    os.kill(pid, signal.SIGKILL)
    here.until(lambda: here.client.state is State.UP and here.pid != pid)
    assert here.answered(here.write(4), "stored").value == bytes(1)


IMPORT_FAILS = """
import sys
from sglang_dsv4.store.worker import serve
serve(*map(int, sys.argv[1:]), prepare=lambda: 1 / 0)
"""


@pytest.mark.parametrize("program", ["", IMPORT_FAILS])
def test_an_early_process_that_ended_is_replaced(world, program):
    here = world()
    early = Early((sys.executable, "-c", program))
    eventually(lambda: early._process.status() is not None)
    here.client._launch = early.launch
    assert here.up().client.counts["starts"] == 1


def test_an_early_process_that_nobody_takes_ends(world):
    early = Early(world().command("works"))
    pid = early._process._child.pid
    early.close()
    assert not is_alive(pid)


def test_sigkill_gives_the_units_back_and_the_next_process_works(world):
    here = world("hangs and writes late", back_off=(0.1, 1.0)).up()
    pid = here.pid
    ticket = here.ask()
    here.answered(ticket, "found")
    here.client.load(ticket, [Spot(9, 0, 0), Spot(10, 0, 0)])
    stuck = here.write(1, 2)
    os.kill(pid, signal.SIGKILL)
    assert here.answered(ticket, "failed").units == [9, 10]
    assert here.returned(stuck) == [1, 2]
    assert not is_alive(pid), "units came back before the reap"
    assert "status -9" in here.client.last_error
    assert here.client.counts == {"starts": 2, "killed": 0, "died": 1, "refused": 0, "full": 0}
    here.use("works")
    here.up()
    assert here.answered(here.write(6), "stored").units == []  # it was copied


def test_sigstop_is_refused_then_killed(world):
    here = world(slow=0.3, hang=1.0).up()
    pid, begin = here.pid, time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    ticket = here.write(1, 2, 3)
    here.until(lambda: time.monotonic() > begin + 0.5)
    assert here.client.write([], KEY) is None
    assert here.ask() is not None, "the other lane"
    assert here.answered(ticket, "failed").units == [1, 2, 3]
    assert time.monotonic() - begin >= 1.0
    assert not is_alive(pid)
    assert here.client.counts["killed"] == 1
    assert "writes made no step in 1 s" in here.client.last_error
    assert here.longest < 0.5, "a call waited"
    assert here.answered(here.up().write(4), "stored")


def test_a_late_write_never_comes(world):
    """It hangs in a load and would write after 1 s; it is killed at 0.3, and its units have a new owner then."""
    here = world("hangs and writes late", hang=0.3, back_off=(60.0, 60.0)).up()
    ticket = here.ask()
    here.answered(ticket, "found")
    here.client.load(ticket, [Spot(unit, 0, 0) for unit in range(UNITS)])
    for unit in here.answered(ticket, "failed").units:
        here.fill(unit, 0xEE)
    time.sleep(1.2)
    assert not (here.folder / "late").exists()
    assert {here.bytes(unit) for unit in range(UNITS)} == {b"\xee" * UNIT}


def test_a_process_that_ends_in_its_start_is_started_again_with_back_off(world):
    here = world("cannot start", back_off=(0.2, 0.4))
    begin = time.monotonic()
    here.until(lambda: here.client.counts["starts"] == 4)
    assert time.monotonic() - begin >= 0.2 + 0.4
    assert here.client.last_error == "the store's process ended with status 3, after: no such backend"
    assert (here.client.counts["died"], here.client.counts["killed"]) == (3, 0)
    here.use("works")
    here.up()


@pytest.mark.parametrize(("mode", "status"), [("closes its end", 3), ("closes its end and never ends", -9)])
def test_a_process_that_closes_its_end_is_killed_only_where_it_does_not_end(world, mode, status):
    here = world(mode, back_off=(0.1, 0.1))
    here.until(lambda: here.client.counts["starts"] == 2)
    assert here.client.last_error == f"the store's process ended with status {status}, after: no such backend"
    assert (here.client.counts["died"], here.client.counts["killed"]) == (1, 0)


def test_a_command_that_is_not_there(world):
    here = world(back_off=(0.1, 0.1))
    here.client._command = ("/nowhere/python",)
    here.until(lambda: here.client.counts["starts"] == 3)
    assert "cannot be started: [Errno 2]" in here.client.last_error
    files = len([*Path("/proc/self/fd").iterdir()])
    here.until(lambda: here.client.counts["starts"] == 6)
    assert len([*Path("/proc/self/fd").iterdir()]) == files, "a socket was left"
    here.use("works")
    here.up()


def test_a_process_that_is_never_ready(world):
    here = world("never ready", start=0.5)
    here.until(lambda: here.client.state is State.DYING)
    here.until(lambda: here.client.state is not State.DYING)
    assert "did not start in 0.5 s" in here.client.last_error
    assert here.client.counts["killed"] == 1


def test_what_it_said_before_it_died_with_unread_packets_counts(world):
    """Its socket is reset then; the answers are behind that error."""
    here = world("dies with unread packets").up()
    first, second = here.write(1, 2), here.write(3, 4)
    time.sleep(0.6)  # not a pass in between: all of it lies in the socket
    assert here.answered(second, "failed").units == [3, 4]
    assert here.answered(first, "stored").value == bytes(2)
    assert here.returned(first) == [1, 2]
    assert here.client.counts["died"] == 1


@contextlib.contextmanager
def holder():
    """A fork of this process that keeps all its files open."""
    child = FORK.Process(target=time.sleep, args=(60,))
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("ends", ["dies", "is closed"])
def test_a_fork_that_holds_the_sockets(world, monkeypatch, ends):
    """The process's end is held, too: its death shows no end of the socket, only waitpid tells of it."""
    here = world()
    stack, popen = contextlib.ExitStack(), subprocess.Popen

    def start(*args, **more):
        stack.enter_context(holder())
        return popen(*args, **more)

    with stack:
        monkeypatch.setattr(process_module.subprocess, "Popen", start)
        here.up()
        monkeypatch.undo()
        monkeypatch.setenv("PYTHONPATH", str(Path(sglang_dsv4.__file__).parents[1]))
        stack.enter_context(holder())
        pid = here.pid
        if ends == "dies":
            ticket = here.ask(9, 9, 9, 9)
            here.answered(ticket, "found")
            os.kill(pid, signal.SIGSTOP)
            ticket = here.write(1)
            os.kill(pid, signal.SIGKILL)
            assert here.answered(ticket, "failed").units == [1]
            assert here.client.counts["died"] == 1
            here.up()
        else:
            here.write(1)
            begin = time.monotonic()
            here.events += here.client.close(20.0)
            assert time.monotonic() - begin < 10.0
            assert (here.folder / "drained").read_text() == "20000"
        assert not is_alive(pid)


def test_close_writes_all_that_was_accepted(world):
    here = world("slow").up()
    pid = here.pid
    tickets = [here.write(unit) for unit in range(UNITS)]
    assert None not in tickets
    here.events += here.client.close(20.0)
    assert (here.client.state, is_alive(pid)) == (State.OFF, False)
    assert [event.ticket for event in here.events if event.name == "stored"] == tickets
    assert sorted(unit for event in here.events for unit in event.units) == list(range(UNITS))
    for unit in range(UNITS):
        assert (here.folder / f"{bytes([unit] * 32).hex()}-0").read_bytes() == bytes([unit]) * UNIT
    assert not here.client.poll()


def test_close_kills_what_does_not_drain(world):
    here = world("does not drain").up()
    pid, begin = here.pid, time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    ticket = here.write(1, 2)
    events = here.client.close(0.2)
    assert time.monotonic() - begin < 5.0
    assert [event[:2] + event[3:] for event in events] == [("failed", ticket, [1, 2])]
    assert not is_alive(pid)


def test_a_process_whose_client_is_gone_sees_the_end(world):
    """Nothing else holds the client's end; a real one drains then."""
    here = world().up()
    here.client._process.close()
    pid = here.pid
    here.until(lambda: not is_alive(pid))


def test_tickets_without_bound_never_wait(world):
    here = world(tickets=10**6, credits=10**9, slow=1e9, hang=1e9).up()
    os.kill(here.pid, signal.SIGSTOP)
    begin, accepted = time.monotonic(), []
    while (ticket := here.client.write([Piece(unit, 0, KEY) for unit in range(11)], KEY)) is not None:
        accepted.append(ticket)
    assert len(accepted) > 50
    assert time.monotonic() - begin < 10.0
    assert here.client.counts["full"] == 1
    os.kill(here.pid, signal.SIGCONT)
    here.answered(accepted[3], "stored")
    assert [here.returned(ticket) for ticket in accepted[:4]] == [[*range(11)]] * 4
