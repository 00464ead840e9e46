"""Runs the store's process: python -m sglang_dsv4.store.worker BACKEND SOCKET PARENT (a file, a process), see ``wire``.

It outlives nothing: it ends at a DRAIN, a SIGTERM, the end of the socket or of the scheduler (a forked child may hold
the socket open), and writes before that what it was sent, for some seconds. It is killed where a call of the backend
hangs, so no thread is ever waited for.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sglang_dsv4.hostmem.populate import map_in
from sglang_dsv4.store import wire
from sglang_dsv4.store.backend import BackendUnfit, import_engine, make_backend, start_check
from sglang_dsv4.store.lanes import SLOTS, Lanes
from sglang_dsv4.store.ring import Ring
from sglang_dsv4.store.threads import Channel, Getter, Inbox, Packet, Putter
from sglang_dsv4.store.wire import Kind

HELLO = 1800  # seconds; a server whose start takes longer gets another process


class Greeting(NamedTuple):
    """Holds what the scheduler tells at first: the units of its arena are mapped, and the memory of both."""

    hello: dict[str, Any]
    units: np.ndarray
    shared: np.ndarray


class Worker:
    """Owns the process: takes packets, starts the lanes, and ends all of it."""

    def __init__(self, sock: socket.socket, hello: dict[str, Any], arena: np.ndarray, shared: np.ndarray) -> None:
        self._hello, self._arena = hello, arena
        self._channel = Channel(sock, shared)
        self._ids = shared[wire.CONTROL :].view(np.int32)
        self._writes: Inbox = queue.SimpleQueue()
        self._reads: Inbox = queue.SimpleQueue()
        self._ready = False
        self._until: float | None = None  # the end of a drain
        self._ended: int | None = None  # the exit status, once nothing is left to write
        self._asked_to_end = False  # by a signal
        self._wake, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_signal)

    def run(self, parent: int) -> int:
        """Returns the exit status. parent: a pidfd; not PR_SET_PDEATHSIG, which follows the thread that started us."""
        threading.Thread(target=self._work, daemon=True).start()
        poll = select.poll()
        for fd in (self._channel.sock.fileno(), parent, self._wake):
            poll.register(fd, select.POLLIN)
        while self._ended is None and (self._until is None or time.monotonic() < self._until):
            left = None if self._until is None else max(1, int(1000 * (self._until - time.monotonic())))
            ready = [fd for fd, _ in poll.poll(left)]
            if self._wake in ready:
                os.read(self._wake, 64)
            # Before any reason to end: what was sent until then counts.
            over = not self._receive()
            if over or parent in ready:
                for fd in {self._channel.sock.fileno(), parent} & set(ready):
                    poll.unregister(fd)
            if over or parent in ready or self._asked_to_end:
                self._drain(self._hello["drain"])
        self._channel.send(Kind.BYE, wait=False)
        return self._ended or 0

    def _on_signal(self, *_: Any) -> None:
        self._asked_to_end = True

    def _receive(self) -> bool:
        """Takes all that was sent; False: there will be no more.

        A scheduler that dies with packets unread resets the socket; what it sent before is still behind that error.
        """
        while True:
            try:
                raw = self._channel.sock.recv(wire.MOST_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                continue
            if not raw:
                return False
            if self._until is None:
                self._take(*wire.unpack(raw))

    def _take(self, kind: Kind, ticket: int, count: int, body: bytes) -> None:
        if kind is Kind.DRAIN:
            self._drain(count / 1000)
        else:
            (self._writes if kind is Kind.WRITE else self._reads).put(Packet(kind, ticket, body))

    def _drain(self, seconds: float) -> None:
        """Lets the writes that were taken end, for so long; reads end as they are. Before the start there are none."""
        if self._until is None:
            self._until = time.monotonic() + (seconds if self._ready else 0.0)
            self._reads.put(None)
            self._writes.put(None)

    def _work(self) -> None:
        """Starts the backend, which may hang, and runs the lanes; the process ends with the writes."""
        try:
            lanes = self._start()
        except BackendUnfit as error:
            self._channel.oops(str(error))
            self._end(1)
            return
        except Exception as error:  # noqa: BLE001 - a backend may raise anything; the scheduler has to know what
            said = f"DSV4_STORE={self._hello['backend']} does not start: {type(error).__name__}: {error}"
            self._channel.oops(f"{said}; change DSV4_STORE_CONFIG, or start without DSV4_STORE")
            self._end(1)
            return
        getter = Getter(lanes, self._channel, self._ids, self._reads)
        threading.Thread(target=getter.run, daemon=True).start()
        Putter(lanes, self._channel, self._writes).run()
        self._end(0)

    def _start(self) -> Lanes:
        hello, channel = self._hello, self._channel
        ring = Ring(hello["unit_bytes"], SLOTS)
        secret = bytes.fromhex(hello["secret"]) if hello["secret"] else None
        backend = make_backend(hello["backend"], hello["config"], hello["model"], ring, hello["least_free"])
        start_check(backend)
        lanes = Lanes(self._arena, hello["unit_bytes"], hello["in_tail"], backend, ring, secret, channel.beat)
        self._ready = True
        channel.send(Kind.READY)
        return lanes

    def _end(self, status: int) -> None:
        self._ended = status
        os.write(self._bell, b"\0")


def _map(fd: int, nbytes: int) -> np.ndarray:
    """Maps ``nbytes`` of a file that others have, too, and closes ``fd``. Raises ValueError for a shorter file."""
    memory = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    os.close(fd)
    return memory


def serve(sock: int, parent: int, prepare: Callable[[], None]) -> int:
    """Runs the process over this socket, and returns its exit status.

    parent: the number of the scheduler's process. prepare: imports the engine, while the HELLO may still be waited for.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the scheduler gets it, too
    channel = socket.socket(fileno=sock)
    try:
        lives = os.pidfd_open(parent)
    except ProcessLookupError:
        return 0
    if os.getppid() != parent:  # it died before, and the number is another's
        return 0
    greeted: Future[Greeting | None] = Future()
    threading.Thread(target=_wait_for_hello, args=(greeted, channel, lives), daemon=True).start()
    prepare()  # where it raises the process ends, and another one is started
    greeting = greeted.result()
    return 0 if greeting is None else Worker(channel, *greeting).run(lives)


def _wait_for_hello(greeted: Future[Greeting | None], channel: socket.socket, parent: int) -> None:
    try:
        greeted.set_result(_greeted(channel, parent))
    except Exception as error:  # noqa: BLE001 - raised in the main thread
        greeted.set_exception(error)


def _greeted(channel: socket.socket, parent: int) -> Greeting | None:
    """Returns what the scheduler tells at first, with its memory mapped; None where it ended before, or never does."""
    poll = select.poll()
    for fd in (channel.fileno(), parent):
        poll.register(fd, select.POLLIN)
    if channel.fileno() not in [fd for fd, _ in poll.poll(1000 * HELLO)]:
        return None
    first, files, *_ = socket.recv_fds(channel, wire.MOST_BYTES, 2)
    if not first:
        return None
    arena, shared = files
    hello = json.loads(wire.unpack(first)[3])
    start, nbytes = hello["arena_start"], hello["units"] * hello["unit_bytes"]
    whole = _map(arena, hello["arena_bytes"])
    address = whole.__array_interface__["data"][0]
    threading.Thread(target=map_in, args=(address, whole.nbytes), daemon=True).start()  # 0.1 s a GiB
    return Greeting(hello, whole[start : start + nbytes], _map(shared, hello["shared_bytes"]))


def main() -> None:
    """Runs the process; nothing of it uses a GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    logging.basicConfig(level=logging.WARNING, format="[%(asctime)s store] %(message)s")
    backend, sock, parent = sys.argv[1:]
    status = serve(int(sock), int(parent), partial(import_engine, backend))
    os._exit(status)  # a thread may hang in the backend, and its library's destructors, too


if __name__ == "__main__":
    main()
