"""Starts the process of a store, talks to it, kills and reaps it. Only a start and ``wait`` take time."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from sglang_dsv4.store.wire import CONTROL, MOST_BYTES

SOCKET_BYTES = 1 << 20  # of packets that wait on either side
ENDS = 1.0  # seconds for a process that was killed and holds nothing
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # torch is loaded there, a device never


class SharedMemory:
    """Owns the words and the ring of token ids that both sides map."""

    def __init__(self, ids: int) -> None:
        """Makes a memory with a ring of ``ids`` token ids."""
        self.nbytes = CONTROL + 4 * ids
        self.fd = os.memfd_create("sglang_dsv4-store")
        os.ftruncate(self.fd, self.nbytes)
        memory = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.words = memoryview(memory)[:CONTROL].cast("q")
        self.ids = np.frombuffer(memory, np.int32, offset=CONTROL)

    def close(self) -> None:
        """Closes the file; the memory goes with this object."""
        os.close(self.fd)


class StoreProcess:
    """Holds a process and the scheduler's end of its socket."""

    def __init__(self, child: subprocess.Popen[bytes], end: socket.socket) -> None:
        """Takes both over."""
        self._child, self._socket = child, end
        end.setblocking(False)

    def greet(self, hello: bytes, files: Sequence[int]) -> None:
        """Sends the HELLO, with the files that the process maps. Raises OSError where nobody reads it."""
        _greet(self._socket, hello, files)

    def send(self, packet: bytes) -> None:
        """Sends one packet. Raises BlockingIOError where the socket is full, another OSError where nobody reads it."""
        self._socket.send(packet, socket.MSG_NOSIGNAL)

    def receive(self) -> bytes | None:
        """Returns the next packet, b"" at the end of all, or None where there is none yet."""
        while True:
            try:
                return self._socket.recv(MOST_BYTES)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # said once, of a process that died with unread packets: what it sent is still behind it
            except OSError:  # closed
                return b""

    def status(self) -> int | None:
        """Reaps the process if it ended, all its threads with it; returns its exit status then, None before."""
        return self._child.poll()

    def wait(self, seconds: float) -> int | None:
        """Waits for the end, for at most so long; returns as ``status`` does."""
        try:
            return self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Sends SIGKILL. The process may still write until ``status`` says that it ended."""
        self._child.kill()

    def close(self) -> None:
        """Closes the socket; a second call does nothing."""
        self._socket.close()


class Early:
    """Holds a process that is started before there is memory to tell it of: it imports the engine meanwhile."""

    def __init__(self, command: Sequence[str]) -> None:
        """Starts it; where that fails, ``launch`` tries again."""
        self._process: StoreProcess | None = None
        with contextlib.suppress(OSError):
            self._process = _start(command, lambda ours: None)

    def launch(self, command: Sequence[str], files: Sequence[int], hello: bytes) -> StoreProcess:
        """Does as ``launch``: the first time with the process here, if it still runs."""
        process, self._process = self._process, None
        if process is not None:
            try:
                process.greet(hello, files)
            except OSError:
                _end(process)
            else:
                return process
        return launch(command, files, hello)

    def close(self) -> None:
        """Ends the process, if nobody took it."""
        if self._process is not None:
            _end(self._process)
            self._process = None


def launch(command: Sequence[str], files: Sequence[int], hello: bytes) -> StoreProcess:
    """Starts a process, its HELLO and ``files`` in the socket already. Raises OSError; takes 1 ms, 8 on a busy machine.

    command: argv; the number of its socket and of this process follow it.
    """
    return _start(command, lambda ours: _greet(ours, hello, files))


def _start(command: Sequence[str], before: Callable[[socket.socket], None]) -> StoreProcess:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        ours.setblocking(False)
        before(ours)
        child = subprocess.Popen(
            [*command, str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT},
        )
        undo.pop_all()
    return StoreProcess(child, ours)


def _greet(ours: socket.socket, hello: bytes, files: Sequence[int]) -> None:
    numbers = array("i", files)  # by hand: socket.send_fds passes no flags on
    ours.sendmsg([hello], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)], socket.MSG_NOSIGNAL)


def _end(process: StoreProcess) -> None:
    process.kill()
    process.wait(ENDS)
    process.close()
