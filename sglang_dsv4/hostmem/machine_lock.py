"""Lets one server of a machine at a time measure free RAM and pin its host memory.

Free RAM falls only while pages are pinned: two servers that measured before either pins would both take the same.

    first rank of a machine    waits for the machine's lock; the server's other ranks wait for it in a collective
    every rank                 measures, agrees on a size, pins
    first rank                 gives the lock back when every rank has pinned

No other rank waits for a lock, and servers of several machines lock them in one order. So ranks, servers and machines
cannot wait for each other in a circle. The lock is a flock, which ends with its process, however that ends. A wait for
it has a limit, and trouble with its file never stops a start: one warning, and other servers are not counted.

A server's replicas (--dp-size) lock one after the other, too, and yet divide what was free before the first of them:
each notes in the lock's file, which only this user can open, what it has pinned.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dsv4.hostmem.sizing import free_ram

logger = logging.getLogger(__name__)

FOLDERS = ("/dev/shm", tempfile.gettempdir())  # docker's --ipc=host shares the first between containers
PATIENCE = 900.0  # seconds that the lock is waited for: more than pinning takes
POLL = 0.05
NOTES = 8  # servers with replicas whose notes are kept, the last ones


class Place(NamedTuple):
    """Describes where a rank is among the ranks of its server, or of one of its replicas."""

    ranks: int = 1  # of the server on this machine, with those of all replicas
    replicas: int = 1  # of the server; several are on one machine, and started by one process
    machine: int = 0  # this rank's; all servers number machines in one order
    machines: int = 1  # of the server
    first: bool = True  # whether this is the replica's first rank on this machine
    tell: Callable[[Any], list[Any]] = lambda mine: [mine]  # -> what each of the replica's ranks tells; a collective


ALONE = Place()


@dataclass
class Ram:
    """Tells a rank what it may count on while its server has the lock, and others what it took."""

    free: int  # bytes of RAM; with those that the server's other replicas have pinned
    pinned: int = 0  # bytes that this rank has pinned; it says so itself


@contextlib.contextmanager
def machine_locked(place: Place, purpose: str) -> Iterator[Ram]:
    """Locks the machine until every rank has left the block; a collective at both ends.

    A rank that leaves it by an error waits for no other. purpose: of the memory; each replica locks once for each.
    """
    with contextlib.ExitStack() as held:
        lock, before = None, 0
        for machine in range(place.machines):
            if place.first and machine == place.machine:
                lock = held.enter_context(_locked())
                before = _noted(lock, purpose) if place.replicas > 1 else 0
            before = max(place.tell(before))
        ram = Ram(free_ram() + before)
        yield ram
        pinned = sum(place.tell(ram.pinned))
        if place.replicas > 1:
            _note(lock, purpose, before + pinned)


@contextlib.contextmanager
def _locked() -> Iterator[int | None]:
    """Holds this user's lock and yields its file; None, after a warning, where it cannot be had."""
    path, lock = _open_lock()
    if lock is None:
        yield None
        return
    try:
        taken = _take(path, lock)
        yield lock if taken else None
    finally:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_UN)  # else a fork that has the file, too, would keep it locked
        os.close(lock)


def _open_lock() -> tuple[Path, int | None]:
    """Opens this user's lock in the first folder that can have it; None, after a warning, where none can."""
    troubles, path = [], Path()
    for folder in FOLDERS:
        path = Path(folder) / f"sglang_dsv4.{os.geteuid()}.lock"
        try:
            return path, _open(path)
        except OSError as error:
            troubles.append(str(error))
    _warn_uncounted("; ".join(troubles))
    return path, None


def _open(path: Path) -> int:
    """Opens or makes a file of this user alone. Raises OSError for any other: everybody may put one there."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    found = os.fstat(file)
    if found.st_uid == os.geteuid() and found.st_nlink == 1 and not stat.S_IMODE(found.st_mode) & 0o077:
        return file
    os.close(file)
    raise PermissionError(f"{path} belongs to user {found.st_uid}, has another name, or is open to others")


def _take(path: Path, lock: int) -> bool:
    """Waits for the lock; returns whether it was taken."""
    told, deadline = False, time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told:
                logger.info("waits for another server of this machine that pins its host memory")
                told = True
            time.sleep(POLL)
        except OSError as error:
            _warn_uncounted(f"no lock at {path}: {error}")
            return False
        else:
            return True
    logger.warning("%s stayed locked for %.0f s: other servers' host memory is not counted", path, PATIENCE)
    return False


def _noted(lock: int | None, purpose: str) -> int:
    """Returns the bytes that other replicas of this server have pinned for ``purpose``."""
    return 0 if lock is None else _notes(lock).get(_server(purpose), 0)


def _note(lock: int | None, purpose: str, nbytes: int) -> None:
    """Notes the bytes that replicas of this server have pinned for ``purpose``."""
    if lock is None:
        return
    notes = _notes(lock) | {_server(purpose): nbytes}
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(dict(list(notes.items())[-NOTES:])).encode(), 0)
    except OSError as error:  # a full disk
        _warn_uncounted(str(error))


def _notes(lock: int) -> dict[str, int]:
    """Reads the notes of the last servers with replicas: server -> bytes."""
    try:
        notes: dict[str, int] = json.loads(os.pread(lock, 4096, 0) or "{}")
    except (OSError, ValueError) as error:  # the machine crashed while they were written
        _warn_uncounted(f"notes of replicas: {error}")
        return {}
    return notes


def _server(purpose: str) -> str:
    """Names this server by the process that started its replicas: number, and ticks from the machine's start."""
    parent = os.getppid()
    fields = Path(f"/proc/{parent}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return f"{purpose} {parent} {fields[19]}"


@functools.cache
def _warn_uncounted(reason: str) -> None:
    logger.warning("host memory of other servers that start now is not counted: %s", reason)
