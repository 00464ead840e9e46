"""Servers that start together must not each take half of the same free RAM.

Free RAM falls only while pages are pinned, which ends minutes after it was measured. So every rank that measures
leaves a claim: what it will pin, in a small file of a folder that all servers of the machine share.

    measuring      exclusive lock: waits until nobody pins or measures, for then RAM that is free is free
                   free RAM, less what other servers have claimed and not pinned yet; the claim is written
                   (a server's first rank measures for all of its ranks: they share one figure)
    (unlocked)     the ranks of the server agree on a size: a collective
    pinning        shared lock: servers and ranks pin at the same time, nobody measures
                   the pages are pinned; from now on free RAM shows them, and the claim no longer counts

No lock is held during that collective. Ranks that share an arena also wait for each other while they pin, each with
the shared lock: who waits for it waits for whoever measures, and who measures waits for no rank. So ranks, servers
and machines cannot wait for each other in a circle. Locks are flocks, as is the proof that a claim's process lives:
all of them end with their process, however it ends. Where no folder can be shared, such as between containers without
a common /dev/shm, a server counts its own ranks alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_dsv4.hostmem.sizing import free_ram

logger = logging.getLogger(__name__)

PLACES = ("/dev/shm", tempfile.gettempdir())  # docker's --ipc=host shares the first between containers
NAME = "sglang_dsv4"
PATIENCE = 900.0  # seconds that a lock is waited for: more than pinning takes
POLL = 0.05


@dataclass
class _Entry:
    """What a claim's file says. free: as the server's first rank measured it. nbytes: that this rank will pin."""

    server: str
    ranks: int
    free: int
    nbytes: int = 0
    pinned: bool = False


class Claim:
    """What one rank of a starting server will pin. ranks: those of its server on this machine."""

    def __init__(self, ranks: int, places: tuple[str, ...] = PLACES) -> None:
        self.ranks = ranks
        self._folder = _open_folder(places)
        self._entry: _Entry | None = None
        self._file: int | None = None
        self._path = Path()

    @contextlib.contextmanager
    def measuring(self) -> Iterator[int]:
        """Gives the bytes of free RAM that this rank's server may count on; ``ask`` belongs inside."""
        with self._locked(fcntl.LOCK_EX):
            entries = self._others()
            server = self._server(entries)
            siblings = [entry for entry in entries if entry.server == server]
            claimed = _still_to_pin([entry for entry in entries if entry.server != server])
            free = siblings[0].free if siblings else max(0, free_ram() - claimed)
            if claimed and not siblings:
                logger.info("%.2f GiB of RAM are claimed by servers that start now", claimed / 2**30)
            self._entry = _Entry(server, self.ranks, free)
            yield free

    def ask(self, nbytes: int) -> None:
        """Claim ``nbytes`` for this rank."""
        assert self._entry is not None
        self._entry.nbytes = nbytes
        if self._folder is None:
            return
        self._path = self._folder[1] / f"{uuid.uuid4().hex}.claim"
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write()
        except OSError as error:  # a full disk, say
            logger.warning("servers that start now cannot see what this one will pin: %s", error)

    @contextlib.contextmanager
    def pinning(self) -> Iterator[None]:
        """Pages are pinned inside; afterwards the claim no longer counts.

        With several ranks its file stays until this process ends: a rank that comes later, such as one of another data
        parallel replica, finds in it what was free before.
        """
        with self._locked(fcntl.LOCK_SH):
            try:
                yield
            finally:
                if self._entry is not None and self._file is not None:
                    self._entry.pinned = True
                    self._write()
        if self.ranks == 1:
            self.close()

    def close(self) -> None:
        """Give the claim up; a second call does nothing."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None
        if self._folder is not None:
            os.close(self._folder[0])
            self._folder = None

    def _write(self) -> None:
        assert self._entry is not None
        assert self._file is not None
        text = json.dumps(asdict(self._entry)).encode()
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        if self._folder is None:
            yield
            return
        folder, path = self._folder
        locked, told, deadline = False, False, time.monotonic() + PATIENCE
        while not locked and time.monotonic() < deadline:
            try:
                fcntl.flock(folder, kind | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError:
                if not told:
                    logger.info("waits for another server of this machine that pins its host memory")
                    told = True
                time.sleep(POLL)
        if not locked:
            logger.warning("%s stayed locked for %.0f s: other servers' host memory is not counted", path, PATIENCE)
        try:
            yield
        finally:
            if locked:
                fcntl.flock(folder, fcntl.LOCK_UN)

    def _others(self) -> list[_Entry]:
        """Claims of living processes; those of dead ones are removed."""
        found = []
        for path in self._folder[1].glob("*.claim") if self._folder else ():
            with contextlib.suppress(OSError, ValueError, TypeError):  # another user's, or no claim at all
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    if _is_locked(file):
                        found.append(_Entry(**json.loads(os.read(file, 4096))))
                    else:
                        path.unlink()
                finally:
                    os.close(file)
        return found

    def _server(self, entries: list[_Entry]) -> str:
        """A name that the ranks of one server share: who started them, and which of the servers that it started."""
        starter = f"{Path('/proc/self/ns/pid').stat().st_ino}.{os.getppid()}.{self.ranks}"
        names = (f"{starter}.{number}" for number in itertools.count())
        return next(name for name in names if sum(entry.server == name for entry in entries) < self.ranks)


def _open_folder(places: tuple[str, ...]) -> tuple[int, Path] | None:
    """The shared folder, open, with its path; None, with one log line, where there is none."""
    troubles = []
    for place in places:
        folder = Path(place) / NAME
        try:
            with contextlib.suppress(FileExistsError):  # another server that starts now may be first
                folder.mkdir()
                folder.chmod(0o1777)  # servers of other users, too
            if not os.access(folder, os.W_OK):
                raise PermissionError(f"{folder} cannot be written")
            return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC), folder
        except OSError as error:
            troubles.append(str(error))
    logger.warning("host memory of other servers that start now is not counted: %s", "; ".join(troubles))
    return None


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _still_to_pin(entries: list[_Entry]) -> int:
    """Bytes that the servers of ``entries`` will pin, their ranks that have not measured yet included."""
    total = 0
    for server in {entry.server for entry in entries}:
        ranks = [entry for entry in entries if entry.server == server]
        left = ranks[0].ranks - sum(entry.pinned for entry in ranks)
        total += left * max(entry.nbytes for entry in ranks)
    return total
