"""Plays the scheduler of a real store process: its arena, its shared memory and its end of the socket."""

import contextlib
import hashlib
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback

import numpy as np
import pytest

from sglang_dsv4.store import wire
from sglang_dsv4.store.wire import Code, Kind, Piece, Question, Spot

PAGE, AHEAD, TAIL = 4, 1, 2  # tokens of a page and behind it, units of a window
UNITS, UNIT, START = 64, 8192, 12288
GUARD = 0x5A  # the arena's file before and behind the units
IDS = 4096
GROUP = bytes(wire.KEY_BYTES)
PATIENCE = 20.0


def memory(nbytes):
    fd = os.memfd_create("test")
    os.ftruncate(fd, nbytes)
    return fd, np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


class Scheduler:
    """Starts a process: forked, or by a ``command``; or forked by a process between, which may die.

    greets: whether it sends a HELLO; False: it dies before that, where no process is between. parent: told to the
    process in the place of the real one. hello: what is other in it.
    """

    def __init__(self, backend, config, *, command=None, between=False, greets=True, parent=None, **hello):
        nbytes = START + UNITS * UNIT + 4096
        self.arena_fd, self.file = memory(nbytes)
        self.file[:] = GUARD
        self.units = self.file[START : START + UNITS * UNIT].reshape(UNITS, UNIT)
        self.units[:] = 0
        self.shared_fd, shared = memory(wire.CONTROL + 4 * IDS)
        self.words, self.ids = shared[: wire.CONTROL].view(np.int64), shared[wire.CONTROL :].view(np.int32)
        self.sock, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.between = None
        self.hello = {
            "arena_bytes": nbytes, "arena_start": START, "units": UNITS, "unit_bytes": UNIT,
            "shared_bytes": shared.nbytes, "in_tail": TAIL, "backend": backend, "config": config, "model": "m",
            "secret": None, "drain": 10.0, "least_free": 0, **hello,
        }  # fmt: skip
        self.packets, self.inbox, self.parent = 0, [], parent
        if command is not None:
            words = [sys.executable, *command, str(self.theirs.fileno()), str(os.getpid())]
            self.pid = subprocess.Popen(words, pass_fds=[self.theirs.fileno()]).pid
        elif between:
            self.pid = self._fork_between()
        else:
            self.pid = self._fork()
        self.theirs.close()
        self.pidfd = os.pidfd_open(self.pid)
        if not greets and not between:
            self.sock.close()
        if not greets:
            return
        hello = wire.pack(Kind.HELLO, body=json.dumps(self.hello).encode())
        socket.send_fds(self.sock, [hello], [self.arena_fd, self.shared_fd])

    def _fork(self):
        parent = self.parent or os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                from sglang_dsv4.store.worker import serve

                self.sock.close()
                status = serve(self.theirs.detach(), parent, prepare=lambda: None)
            except BaseException:  # noqa: BLE001 - shown, and the fork must not go on with the tests
                traceback.print_exc()
            finally:
                os._exit(status)
        return pid

    def _fork_between(self):
        out, into = os.pipe()
        self.between = os.fork()
        if self.between == 0:
            os.write(into, b"%d" % self._fork())
            signal.pause()
        pid = int(os.read(out, 32))
        os.close(out)
        os.close(into)
        return pid

    def send(self, kind, ticket=0, count=0, body=b""):
        self.sock.send(wire.pack(kind, ticket, count, body))

    def write(self, ticket, pieces):
        self.send(Kind.WRITE, ticket, len(pieces), wire.pack_write(GROUP, pieces))

    def ask(self, ticket, prompt, have=0, first=0, at=0):
        ids = prompt.ids
        self.ids[at : at + len(ids)] = ids
        question = Question(prompt.root, have, first, prompt.pages, PAGE, AHEAD, at)
        self.send(Kind.ASK, ticket, 0, wire.pack_question(question))

    def load(self, ticket, spots):
        self.send(Kind.LOAD, ticket, len(spots), wire.pack_spots(spots))

    def receive(self, seconds):
        """Returns the next (kind, ticket, count, body); None at the end."""
        if not select.select([self.sock], [], [], seconds)[0]:
            pytest.fail(f"nothing came in {seconds} s; before: {self.inbox[-5:]}")
        with contextlib.suppress(ConnectionResetError):  # told once; what was sent before is behind it
            raw = self.sock.recv(wire.MOST_BYTES)
            if not raw:
                return None
            self.packets += 1
            self.inbox.append(wire.unpack(raw))
            return self.inbox[-1]
        return self.receive(seconds)

    def wait(self, kind, ticket=0, seconds=PATIENCE):
        """Returns (count, body) of the next such message; an OOPS fails the test unless it was waited for."""
        while (got := self.receive(seconds)) is not None:
            if got[0] is kind and got[1] == ticket:
                return got[2], got[3]
            assert got[0] is not Kind.OOPS, got
        pytest.fail(f"no {kind.name} of {ticket}: {self.inbox[-5:]}")

    def codes(self, kind, ticket):
        count, body = self.wait(kind, ticket)
        assert count == len(body)
        return [Code(code) for code in body]

    def ready(self):
        self.wait(Kind.READY)
        return self

    def store(self, ticket, prompt, end):
        """Writes the pages before ``end`` and the window there, from the first units; checks that each is told OK."""
        pieces = prompt.pieces(end)
        for piece in pieces:
            self.units[piece.unit] = prompt.content(piece.key, piece.part)
        self.write(ticket, pieces)
        assert self.codes(Kind.STORED, ticket) == [Code.OK] * len(pieces)
        self.units[:] = 0xA5

    def found(self, ticket, prompt, **more):
        self.ask(ticket, prompt, **more)
        return self.wait(Kind.FOUND, ticket)[0]

    def loaded(self, ticket, prompt, end):
        """Loads the point at ``end`` into the first units, which are poisoned before; returns the codes."""
        self.units[:] = 0xA5
        self.load(ticket, prompt.spots(end))
        return self.codes(Kind.LOADED, ticket)

    def check_units(self, prompt, end):
        """Compares the units after ``loaded``, and all that no unit may have been written to."""
        pieces = prompt.pieces(end)
        for piece in pieces:
            assert (self.units[piece.unit] == prompt.content(piece.key, piece.part)).all(), piece
        assert (self.units[len(pieces) :] == 0xA5).all()
        self.check_guards()

    def check_guards(self):
        assert (self.file[:START] == GUARD).all() and (self.file[START + UNITS * UNIT :] == GUARD).all()

    def ends(self, seconds=PATIENCE):
        """Waits for the end of the process; returns its exit status (None: not our child)."""
        if not select.select([self.pidfd], [], [], seconds)[0]:
            pytest.fail(f"the process goes on after {seconds} s")
        if self.between is not None:
            return None
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self):
        for pid in {self.pid, self.between} - {None}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.sock.close()
        for fd in (self.pidfd, self.arena_fd, self.shared_fd):
            os.close(fd)


class Prompt:
    """Token ids and, by hashlib alone, the keys of their pages."""

    def __init__(self, seed, pages):
        self.pages, self.root = pages, hashlib.sha256(b"root").digest()
        self.ids = np.random.default_rng(seed).integers(0, 129280, pages * PAGE + AHEAD, np.int32)
        self.keys, before = [], self.root
        for page in range(pages):
            raw = self.ids[page * PAGE : (page + 1) * PAGE + AHEAD].astype("<i8").tobytes()
            before = hashlib.sha256(before + raw).digest()
            self.keys.append(before)

    def pieces(self, end):
        parts = [(0, key) for key in self.keys[:end]] + [(part, self.keys[end - 1]) for part in range(1, TAIL + 1)]
        return [Piece(unit, part, key) for unit, (part, key) in enumerate(parts)]

    def spots(self, end):
        return [Spot(piece.unit, piece.part, self.keys.index(piece.key)) for piece in self.pieces(end)]

    @staticmethod
    def content(key, part):
        return np.random.default_rng([*key, part]).integers(0, 256, UNIT, np.uint8)

    def name(self, page, part=0):
        return self.keys[page].hex() + ("p" if part == 0 else f"w{part - 1}")


def file_of(folder, name):
    return folder / f"{name}.deepseek_v4_c4_m.bin"


def eventually(what, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
