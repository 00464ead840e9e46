"""Servers that start together measure and pin one after the other, whoever dies, and never wait in a circle."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import FORK, exchange, on_ranks, place, together

from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem import machine_lock as module
from sglang_dsv4.hostmem.machine_lock import ALONE, Place, machine_locked
from sglang_dsv4.pools import token_to_kv
from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import PoolSpec, make_pool

RAM = 16 << 20


class Machine:
    """A machine with RAM that only pinning takes, slowly. The folder is what its servers share."""

    def __init__(self, folder: Path, ram: int = RAM) -> None:
        self.folder = folder
        self.lock = folder / f"sglang_dsv4.{os.geteuid()}.lock"
        self._free = folder / "free"
        self._free.write_text(str(ram))

    def free(self) -> int:
        return int(self._free.read_text())

    def pin(self, nbytes: int, seconds: float = 0.0) -> None:
        for step in range(10):
            with self._free.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                left = int(file.read()) - (nbytes - nbytes // 10 * 9 if step == 0 else nbytes // 10)
                assert left >= 0, "the OOM killer comes"
                file.seek(0)
                file.write(f"{left:20}")
            time.sleep(seconds / 10)

    def serve(self, nbytes: int = 0, here: Place = ALONE, purpose: str = "arena") -> int:
        """Plays a server that pins so much; returns what it found free."""
        with machine_locked(here, purpose) as ram:
            if nbytes:
                self.pin(nbytes)
            ram.pinned = nbytes
        return ram.free


@pytest.fixture
def machine(tmp_path, monkeypatch):
    found = Machine(tmp_path)
    monkeypatch.setattr(module, "free_ram", found.free)
    monkeypatch.setattr(module, "PATIENCE", 20)
    monkeypatch.setattr(module, "FOLDERS", (str(tmp_path),))
    module._warn_uncounted.cache_clear()
    return found


AGREE, PIN = 0.4, 0.6  # seconds that the ranks of a server take to agree, and to pin


def start_rank(machine, here):
    """What a rank of a decode server does, with a real pool and a real collective; returns bytes pinned, or why not."""

    def pinned(side, size, *_):
        time.sleep(AGREE)
        machine.pin(size.nbytes, PIN)
        return SimpleNamespace(nbytes=size.nbytes, close=lambda: None)

    token_to_kv.CopyService = pinned
    pool = make_pool(PoolSpec(pages=400, swa_pages=4, requests=4))
    host = pool.attach_host(Settings(), ServerContext(place=here))
    return pool.refusal if host is None else host.nbytes


def start_server(machine, folder, replicas=1):
    """The parent of a server's ranks, two of them or as many replicas of one; returns what they say."""
    if replicas > 1:
        return together(start_rank, [(machine, Place(replicas, replicas))] * replicas)
    folder.mkdir()
    return on_ranks(folder, lambda rank: start_rank(machine, place(rank)))


@pytest.mark.parametrize("apart", [0, AGREE + PIN / 2], ids=["at once", "while the first pins"])
def test_servers_that_start_together_take_half_and_half_of_the_rest(machine, tmp_path, apart):
    found = sorted(together(start_server, [(machine, tmp_path / name) for name in ("one", "other")], apart))
    assert [len(set(ranks)) for ranks in found] == [1, 1], "ranks of a server agree"
    later, first = (sum(ranks) / RAM for ranks in found)
    assert first == pytest.approx(1 / 2, rel=0.05)
    assert later == pytest.approx(1 / 4, rel=0.05)
    assert machine.free() / RAM == pytest.approx(1 / 4, rel=0.1)


def test_replicas_of_a_server_take_equal_parts_of_half(machine, tmp_path):
    replicas = start_server(machine, tmp_path, replicas=3)
    assert len(set(replicas)) == 1
    assert sum(replicas) / RAM == pytest.approx(1 / 2, rel=0.1)


def test_replicas_count_each_others_memory_and_no_other(machine):
    replica = Place(2, 2)
    assert machine.serve(1000, replica) == RAM
    assert machine.serve(50) == RAM - 1000, "another server in between"
    assert machine.serve(7, replica, "HiSparse") == RAM - 1050
    assert machine.serve(1000, replica) == RAM - 57
    assert together(machine.serve, [(0, replica)]) == [RAM - 2057], "the same of another parent"
    for number in range(40):
        machine.serve(0, replica, f"memory {number}")
    assert machine.lock.stat().st_size < 600, "no note stays for ever"


def test_servers_of_several_machines_do_not_wait_in_a_circle(machine, tmp_path):
    """Each has a rank that is late on another machine, while its other rank could lock its own."""

    def work(server, rank):
        at = (server + rank) % 2
        module.FOLDERS = (str(tmp_path / f"machine {at}"),)
        time.sleep(0.5 * rank)
        with machine_locked(Place(1, 1, at, 2, True, exchange), "arena"):
            time.sleep(0.2)

    def serve(server):
        (tmp_path / f"server {server}").mkdir()
        on_ranks(tmp_path / f"server {server}", lambda rank: work(server, rank))

    for number in range(2):
        (tmp_path / f"machine {number}").mkdir()
    began = time.monotonic()
    together(serve, [(0,), (1,)])
    assert time.monotonic() - began < module.PATIENCE / 2


def held(forks=False, leaves=False):
    """A child that has the lock. forks: and has a fork, which outlives it. leaves: and gave it back."""
    there, report = os.pipe()

    def child():
        with machine_locked(ALONE, "arena"):
            if forks and os.fork() == 0:
                time.sleep(5)
                os._exit(0)
            if not leaves:
                os.write(report, b"x")
                time.sleep(600)
        os.write(report, b"x")
        time.sleep(600)

    process = FORK.Process(target=child, daemon=True)
    process.start()
    assert os.read(there, 1) == b"x"
    return process


@pytest.mark.parametrize("forks", [False, True], ids=["with the lock", "after it, with a fork"])
def test_a_killed_process_holds_nobody_up(machine, forks):
    process = held(forks, leaves=forks)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    began = time.monotonic()
    assert machine.serve() == RAM
    assert time.monotonic() - began < 1


def test_a_start_that_fails_gives_the_lock_back(machine):
    def fails():
        with machine_locked(ALONE, "arena"):
            raise HostMemoryExhausted

    with pytest.raises(HostMemoryExhausted):
        fails()
    began = time.monotonic()
    machine.serve()
    assert time.monotonic() - began < 1


def test_a_server_that_hangs_is_not_waited_for_for_ever(machine, monkeypatch, caplog):
    process = held()
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    began = time.monotonic()
    with caplog.at_level(logging.INFO):
        assert machine.serve() == RAM
    assert time.monotonic() - began < 5
    process.kill()
    waits, gives_up = caplog.messages
    assert waits == "waits for another server of this machine that pins its host memory"
    assert gives_up.startswith(f"{machine.lock} stayed locked for 0 s: other servers' host memory")


@pytest.mark.parametrize(
    ("call", "number"),
    [
        *((call, errno.ENOSPC) for call in ("open", "pwrite", "ftruncate")),
        *(("flock", number) for number in (errno.ENOSYS, errno.ENOLCK, errno.EBADF)),  # NFS, Lustre
    ],
)
def test_a_full_disk_or_one_without_locks_stops_no_start(machine, monkeypatch, caplog, call, number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.fcntl if call == "flock" else module.os, call, refuse)
    with caplog.at_level(logging.WARNING):
        assert [machine.serve(here=Place(2, 2)) for _ in range(2)] == [RAM, RAM]
    assert len(caplog.records) == 1 and os.strerror(number) in caplog.text


def test_notes_that_a_crash_has_broken_stop_no_start(machine, caplog):
    machine.lock.touch(0o600)
    machine.lock.write_bytes(bytes(40))
    assert [machine.serve(1000, Place(2, 2)) for _ in range(2)] == [RAM, RAM], "the second has notes again"
    assert len(caplog.records) == 1 and "notes of replicas" in caplog.text


def stranger(path, monkeypatch):
    """Makes the file of ``path`` another user's."""
    real = os.fstat

    def of(file):
        found = real(file)
        return os.stat_result([*found[:4], found.st_uid + (found.st_ino == path.stat().st_ino), *found[5:]])

    path.touch(0o600)
    monkeypatch.setattr(module.os, "fstat", of)


PLANTED = {
    "another user's": stranger,
    "open to others": lambda path, _: path.touch() or path.chmod(0o666),
    "linked to a file of this user": lambda path, _: path.hardlink_to(path.with_name("own")),
    "a symbolic link": lambda path, _: path.symlink_to(path.with_name("own")),
    "a folder": lambda path, _: path.mkdir(0o700),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_nobody_elses_lock_is_waited_for_or_written(machine, tmp_path, monkeypatch, caplog, kind):
    """The next folder is taken; without one, no lock."""
    (tmp_path / "own").write_text("cache")
    (tmp_path / "own").chmod(0o600)
    PLANTED[kind](machine.lock, monkeypatch)
    (tmp_path / "next").mkdir()
    with contextlib.ExitStack() as stack:
        file = os.open(machine.lock, os.O_RDONLY)
        stack.callback(os.close, file)
        fcntl.flock(file, fcntl.LOCK_EX)
        began = time.monotonic()
        machine.serve(here=Place(2, 2))
        assert str(machine.lock) in caplog.text
        monkeypatch.setattr(module, "FOLDERS", (str(tmp_path), str(tmp_path / "next")))
        machine.serve(here=Place(2, 2))
        assert time.monotonic() - began < 1
    assert (tmp_path / "next" / machine.lock.name).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "own").read_text() == "cache"
