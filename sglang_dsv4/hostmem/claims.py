"""Records the RAM that each starting rank will pin, so that servers do not count the same free RAM twice.

Free RAM falls only while pages are pinned, which ends minutes after it was measured. So every rank that measures
leaves a claim, a small file in a folder that all servers of the machine share.

    measuring      exclusive lock: waits until no rank pins or measures, for then RAM that is free is free
                   free RAM, less other servers' claims that are not pinned yet; the claim is written
                   (a server's first rank measures for all of its ranks: they share one figure)
    (unlocked)     the ranks of the server agree on a size: a collective
    pinning        shared lock: servers and ranks pin at the same time, no rank measures
                   the pages are pinned; from now on free RAM shows them, and the claim no longer counts

No lock is held during that collective. Ranks that share an arena also wait for each other while they pin, each with
the shared lock: a rank that waits for it waits for one that measures, and that one waits for no rank. So ranks, servers
and machines cannot wait for each other in a circle. Locks are flocks, as is the proof that a claim's process lives:
all of them end with their process, however it ends; a fork of it that keeps one is told by the process's start time.

The folder is open to every user, so nothing in it is trusted: claims of root and of this user count, and the lock is a
file that only this user can open. Trouble with the folder, such as a full disk, never stops a start: one warning, and
the claims of others are unknown, as between containers without a common /dev/shm.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import logging
import os
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_type_hints

from sglang_dsv4.hostmem.nodes import Nodes
from sglang_dsv4.hostmem.sizing import free_ram, total_ram

logger = logging.getLogger(__name__)

PLACES = ("/dev/shm", tempfile.gettempdir())  # docker's --ipc=host shares the first between containers
NAME = "sglang_dsv4"
PATIENCE = 900.0  # seconds that a lock is waited for: more than pinning takes
POLL = 0.05


@dataclass
class _Entry:
    """Describes a claim's file. free: as the server's first rank measured it. nbytes: that this rank will pin.

    process: this rank's, which began at ``started``; space: its namespace of process numbers.
    """

    server: str
    ranks: int
    free: int
    space: int
    process: int
    started: int
    nbytes: int = 0
    pinned: bool = False


@dataclass
class _Folder:
    """Holds the shared folder and this user's lock in it, both open."""

    path: Path
    file: int
    lock: int

    def close(self) -> None:
        _close(self.lock)
        _close(self.file)


class Claim:
    """Claims the RAM that one rank of a starting server will pin.

    ranks: those of its server on this machine. launched_by: see ``launcher``; the same for all of them. bound: the
    memory nodes to which they are bound, if each is.
    """

    def __init__(
        self, ranks: int, launched_by: str | None = None, bound: Nodes | None = None, places: tuple[str, ...] = PLACES
    ) -> None:  # fmt: skip
        self.ranks, self._bound = ranks, bound
        self._launcher = launched_by or launcher()
        self._folder = _open_folder(places)
        self._entry: _Entry | None = None
        self._file: int | None = None
        self._name = f"{uuid.uuid4().hex}.claim"

    @contextlib.contextmanager
    def measuring(self) -> Iterator[int]:
        """Yields the bytes of free RAM that this rank's server may count on; ``ask`` belongs inside."""
        with self._locked(fcntl.LOCK_EX):
            entries = self._others()
            server = self._server(entries)
            siblings = [entry for entry in entries if entry.server == server]
            claimed = _still_to_pin([entry for entry in entries if entry.server != server])
            free = siblings[0].free if siblings else max(0, free_ram(self._bound) - claimed)
            if claimed and not siblings:
                logger.info("%.2f GiB of RAM are claimed by servers that start now", claimed / 2**30)
            process = os.getpid()
            self._entry = _Entry(server, self.ranks, free, _space(), process, _started(process) or 0)
            yield free

    def ask(self, nbytes: int) -> None:
        """Claims ``nbytes`` for this rank."""
        assert self._entry is not None
        self._entry.nbytes = nbytes
        if self._folder is None:
            return
        mode = 0o600 if os.geteuid() else 0o644  # of other users' claims only root's count
        try:
            new = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.open(self._name, new, mode, dir_fd=self._folder.file)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write()
        except OSError as error:
            self._remove_file()
            _warn_unseen(str(error))

    @contextlib.contextmanager
    def pinning(self) -> Iterator[None]:
        """Lets the caller pin pages inside; afterwards the claim no longer counts.

        With several ranks its file stays until this process ends: a later rank, such as one of another data parallel
        replica, reads in it the RAM that was free before.
        """
        with self._locked(fcntl.LOCK_SH):
            try:
                yield
            finally:
                self._say_pinned()
        if self.ranks == 1:
            self.close()

    def close(self) -> None:
        """Withdraws the claim; a second call does nothing."""
        self._remove_file()
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _remove_file(self) -> None:
        if self._file is not None:
            if self._folder is not None:
                _remove(self._name, self._folder.file)
            _close(self._file)
            self._file = None

    def _say_pinned(self) -> None:
        if self._entry is None or self._file is None:
            return
        self._entry.pinned = True
        try:
            self._write()
        except OSError as error:  # a claim that counts for ever is worse than none
            self._remove_file()
            _warn_unseen(str(error))

    def _write(self) -> None:
        assert self._entry is not None
        assert self._file is not None
        text = json.dumps(asdict(self._entry)).encode()
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        locked = self._folder is not None and self._take_lock(self._folder, kind)
        try:
            yield
        finally:
            if locked and self._folder is not None:
                with contextlib.suppress(OSError):  # it ends with its file at the latest
                    fcntl.flock(self._folder.lock, fcntl.LOCK_UN)

    def _take_lock(self, folder: _Folder, kind: int) -> bool:
        """Returns whether the lock was taken; a folder without locks is closed."""
        told, deadline = False, time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                fcntl.flock(folder.lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    logger.info("waits for another server of this machine that pins its host memory")
                    told = True
                time.sleep(POLL)
            except OSError as error:
                _warn_uncounted(f"no lock in {folder.path}: {error}")
                self.close()
                return False
            else:
                return True
        logger.warning("%s stayed locked for %.0f s: other servers' host memory is not counted", folder.path, PATIENCE)
        return False

    def _others(self) -> list[_Entry]:
        """Reads the claims of living processes, and removes those of dead ones."""
        if self._folder is None:
            return []
        found, malformed = [], []
        try:
            names = [name for name in os.listdir(self._folder.file) if name.endswith(".claim")]  # noqa: PTH208
        except OSError as error:
            _warn_uncounted(str(error))
            names = []
        for name in names:
            try:
                entry = _read_living(name, self._folder.file)
            except ValueError as error:
                malformed.append(f"{name!r}: {error}")
            else:
                found += [] if entry is None else [entry]
        if malformed:
            _warn_malformed(len(malformed), self._folder.path, malformed[0])
        return found

    def _server(self, entries: list[_Entry]) -> str:
        """Returns the name that a server's ranks share: its launcher, and its number among that one's servers."""
        names = (f"{self._launcher}.{self.ranks}.{number}" for number in itertools.count())
        return next(name for name in names if sum(entry.server == name for entry in entries) < self.ranks)


def launcher() -> str:
    """Names the process that started this rank; unique on this machine."""
    return f"{_space()}.{os.getppid()}"


def _open_folder(places: tuple[str, ...]) -> _Folder | None:
    """Opens the shared folder; None, with one log line, where there is none."""
    troubles = []
    for place in places:
        path, file = Path(place) / NAME, -1
        try:
            with contextlib.suppress(FileExistsError):  # another server that starts now may be first
                path.mkdir()
                path.chmod(0o1777)  # servers of other users, too
            if not os.access(path, os.W_OK):
                raise PermissionError(f"{path} cannot be written")
            file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            return _Folder(path, file, _open_lock(file))
        except OSError as error:
            if file >= 0:
                _close(file)
            troubles.append(str(error))
    _warn_uncounted("; ".join(troubles))
    return None


def _open_lock(folder: int) -> int:
    """Opens this user's lock, a file that no other user can open. Raises OSError for another user's of its name."""
    name = f"lock.{os.geteuid()}"
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    found = os.fstat(file)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        _close(file)
        raise PermissionError(f"{name} belongs to user {found.st_uid}, or is open to others")
    return file


def _read_living(name: str, folder: int) -> _Entry | None:
    """Reads the claim in file ``name``; None for another user's, or one whose process has ended (it is removed).

    Raises ValueError for an invalid one.
    """
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:  # removed meanwhile, another user's, a link
        return None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in {0, os.geteuid()}:
            return None
        if _is_locked(file):
            entry = _parsed(os.read(file, 4096))
            if not _has_ended(entry):
                return entry
        _remove(name, folder)
    except OSError:
        pass
    finally:
        _close(file)
    return None


def _parsed(text: bytes) -> _Entry:
    """Parses a claim. Raises ValueError for text that is none, or has impossible numbers."""
    try:
        entry = _Entry(**json.loads(text))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    for name, kind in get_type_hints(_Entry).items():
        if type(getattr(entry, name)) is not kind:  # True is no number here
            raise ValueError(f"{name} is no {kind.__name__}")
    ram = total_ram()
    if entry.ranks < 1 or not 0 <= entry.nbytes <= ram or not 0 <= entry.free <= ram:
        raise ValueError(f"{entry.ranks} ranks, {entry.nbytes} bytes each, {entry.free} of {ram} bytes free")
    return entry


def _has_ended(entry: _Entry) -> bool:
    """Returns whether the entry's process is known to be over, though a fork of it may hold its lock."""
    return entry.space == _space() and entry.started > 0 and _started(entry.process) != entry.started


def _space() -> int:
    """Returns the namespace of process numbers; 0: unknown."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _started(process: int) -> int | None:
    """Returns the ticks from the machine's start to that of ``process``; None: it is over."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *numbers = text.rpartition(")")[2].split()  # its name, in parentheses, may have any character
    return None if state in {"Z", "X"} else int(numbers[18])


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _remove(name: str, folder: int) -> None:
    with contextlib.suppress(OSError):  # gone, or another user's
        os.unlink(name, dir_fd=folder)


def _close(file: int) -> None:
    with contextlib.suppress(OSError):
        os.close(file)


@functools.cache
def _warn_uncounted(reason: str) -> None:
    logger.warning("host memory of other servers that start now is not counted: %s", reason)


@functools.cache
def _warn_unseen(reason: str) -> None:
    logger.warning("starting servers cannot see the claim of this one: %s", reason)


@functools.cache
def _warn_malformed(count: int, folder: Path, first: str) -> None:
    logger.warning("%d files in %s are no claims of servers and do not count: %s", count, folder, first)


def _still_to_pin(entries: list[_Entry]) -> int:
    """Sums the bytes that the servers of ``entries`` will pin, including ranks that have not measured yet."""
    total = 0
    for server in {entry.server for entry in entries}:
        ranks = [entry for entry in entries if entry.server == server]
        left = ranks[0].ranks - sum(entry.pinned for entry in ranks)
        total += left * max(entry.nbytes for entry in ranks)
    return total
