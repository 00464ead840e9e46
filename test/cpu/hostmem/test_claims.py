"""Servers that start together count one another, whoever dies in between, and never wait in a circle."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import signal
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import FORK, on_ranks, together

from sglang_dsv4.engine.ranks import gathered
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem import claims
from sglang_dsv4.hostmem.claims import Claim
from sglang_dsv4.pools import token_to_kv
from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import PoolSpec, make_pool

RAM = 16 << 20


class Machine:
    """A machine with RAM that only pinning takes, slowly. The folder is what its servers share."""

    def __init__(self, folder: Path, ram: int = RAM) -> None:
        self.places = (str(folder),)
        self._free = folder / "free"
        self._free.write_text(str(ram))

    def free(self, bound: object = None) -> int:
        return int(self._free.read_text())

    def pin(self, nbytes: int, seconds: float = 0.3) -> None:
        for step in range(10):
            with self._free.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                left = int(file.read()) - (nbytes - nbytes // 10 * 9 if step == 0 else nbytes // 10)
                assert left >= 0, "the OOM killer comes"
                file.seek(0)
                file.write(f"{left:20}")
            time.sleep(seconds / 10)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    found = Machine(tmp_path)
    monkeypatch.setattr(claims, "free_ram", found.free)
    monkeypatch.setattr(claims, "PATIENCE", 20)
    for warn in (claims._warn_uncounted, claims._warn_unseen, claims._warn_malformed):
        warn.cache_clear()
    monkeypatch.setattr(Claim.__init__, "__defaults__", (None, None, found.places))
    return found


AGREE, PIN = 0.4, 0.6  # seconds that the ranks of a server take to agree, and to pin
RANKS = 2


def start_rank(machine):
    """Plays a rank of a decode server, with a real pool and a real collective; returns bytes pinned, or why not."""

    def pinned(side, size, *_):
        machine.pin(size.nbytes, PIN)
        return SimpleNamespace(nbytes=size.nbytes, close=lambda: None)

    def agree(size):
        time.sleep(AGREE)
        return size.agreed(gathered(size, RANKS, torch.distributed.group.WORLD))

    token_to_kv.CopyService = pinned
    pool = make_pool(PoolSpec(pages=400, swa_pages=4, requests=4))
    host = pool.attach_host(Settings(), ServerContext(agreed_size=agree, ranks=RANKS))
    torch.distributed.barrier()
    return pool.refusal if host is None else host.nbytes


def start_server(machine, folder):
    """The parent of a server's ranks; returns what they say."""
    folder.mkdir()
    return on_ranks(folder, lambda _: start_rank(machine), RANKS)


@pytest.mark.parametrize("apart", [0, AGREE + PIN / 2], ids=["at once", "while the first pins"])
def test_servers_that_start_together_take_half_and_half_of_the_rest(machine, tmp_path, apart):
    found = sorted(together(start_server, [(machine, tmp_path / name) for name in ("one", "other")], apart))
    assert [len(set(ranks)) for ranks in found] == [1, 1], "ranks of a server agree"
    later, first = (sum(ranks) / RAM for ranks in found)
    assert first == pytest.approx(1 / 2, rel=0.05)
    assert later == pytest.approx(1 / 4, rel=0.05)
    assert machine.free() / RAM == pytest.approx(1 / 4, rel=0.1)


def claimed(nbytes, ranks=1, launched_by=None):
    """(a claim that was made and is not pinned yet, what it found free)."""
    claim = Claim(ranks, launched_by)
    with claim.measuring() as free:
        claim.ask(nbytes)
    return claim, free


def test_a_claim_counts_until_it_is_pinned_or_given_up(machine):
    one, free = claimed(1000)
    assert free == RAM
    two, free = claimed(50)
    assert free == RAM - 1000
    with one.pinning():
        machine.pin(1000, 0)
    two.close()
    _, free = claimed(1)
    assert free == RAM - 1000, "in free RAM once, and the claim that was given up not at all"
    kept = claimed(2 * RAM)
    assert claimed(0)[1] == 0, "too little is nothing, and not less"
    kept[0].close()


def test_ranks_share_the_figure_of_their_first_and_count_for_those_to_come(machine):
    first, free = claimed(1000, ranks=3)
    assert free == RAM
    assert claimed(0)[1] == RAM - 3000, "another server counts all three"
    second, free = claimed(1000, ranks=3)
    assert free == RAM
    with first.pinning(), second.pinning():
        machine.pin(2000, 0)
    assert claimed(0)[1] == RAM - 3000, "of which one is still to come"
    assert claimed(1000, ranks=3)[1] == RAM, "late, of another replica perhaps: it measures no less than the others"
    assert claimed(0, ranks=3)[1] == RAM - 3000, "the next server of the same parent"


def stuck(where, forks=False):
    """A child that has come so far and stays there. forks: and has a fork, which outlives it."""
    there, report = os.pipe()

    def child():
        with contextlib.ExitStack() as held:
            if where == "measuring":
                held.enter_context(Claim(1).measuring())
            else:
                claim, _ = claimed(RAM)
            if where == "pinning":
                held.enter_context(claim.pinning())
            if forks and os.fork() == 0:
                time.sleep(3)
                os._exit(0)
            os.write(report, b"x")
            time.sleep(600)

    process = FORK.Process(target=child, daemon=True)
    process.start()
    assert os.read(there, 1) == b"x"
    return process


@pytest.mark.parametrize(
    ("where", "forks"), [("measuring", False), ("claimed", False), ("claimed", True), ("pinning", False)]
)
def test_a_killed_process_holds_nobody_up_and_claims_nothing(machine, tmp_path, where, forks):
    """A fork of it has the claim's lock, as it has all files of its parent."""
    process = stuck(where, forks)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    began = time.monotonic()
    claim, free = claimed(1)
    assert time.monotonic() - began < 1
    assert free == RAM
    assert len(list(tmp_path.rglob("*.claim"))) == 1, "what the dead left is removed"
    claim.close()
    assert not list(tmp_path.rglob("*.claim"))


def refuses(number):
    """A call of the system that fails so."""

    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


def started(nbytes=1000):
    """A whole start of a server of one rank; returns what it found free."""
    claim = Claim(1)
    with claim.measuring() as free:
        claim.ask(nbytes)
    with claim.pinning():
        pass
    claim.close()
    return free


NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EBADF)  # NFS, Lustre


@pytest.mark.parametrize(
    ("call", "number"),
    [
        *((call, errno.ENOSPC) for call in ("pwrite", "ftruncate", "open", "mkdir", "listdir")),
        *(("flock", number) for number in NO_LOCKS),
    ],
)
def test_a_full_disk_or_one_without_locks_stops_no_start(machine, tmp_path, monkeypatch, caplog, call, number):
    where = {"mkdir": Path, "flock": claims.fcntl}.get(call, claims.os)
    monkeypatch.setattr(where, call, refuses(number))
    with caplog.at_level(logging.WARNING):
        assert (started(), started()) == (RAM, RAM)
    assert len(caplog.records) == 1 and os.strerror(number) in caplog.text
    kept, _ = claimed(1000)
    assert bool(list(tmp_path.rglob("*.claim"))) is (call == "listdir"), "what says nothing counts for nothing"
    kept.close()


def test_what_goes_wrong_while_pinning_is_not_hidden_by_the_disk(machine, monkeypatch):
    claim, _ = claimed(1000)
    monkeypatch.setattr(claims.os, "pwrite", refuses(errno.ENOSPC))
    with pytest.raises(HostMemoryExhausted), claim.pinning():
        raise HostMemoryExhausted
    assert claimed(0)[1] == RAM, "it claims nothing any more"


GOOD = {
    "server": "x.1.0", "ranks": 1, "free": RAM, "space": 0, "process": 1, "started": 0, "nbytes": 1, "pinned": False,
}  # fmt: skip
PLANTED = {
    "ranks in words": GOOD | {"ranks": "8"}, "no ranks": GOOD | {"ranks": 0},
    "truth for a number": GOOD | {"nbytes": True}, "less than nothing": GOOD | {"nbytes": -(2**50)},
    "more than there is": GOOD | {"nbytes": 2**60}, "free RAM that cannot be": GOOD | {"free": -1},
    "a process in words": GOOD | {"process": "../self", "started": 1, "space": claims._space()},
}  # fmt: skip


@contextlib.contextmanager
def planted(machine, text):
    """A file of this user beside the claims, with the lock of one that lives."""
    folder = Path(machine.places[0]) / claims.NAME
    folder.mkdir(exist_ok=True)
    path = folder / "planted.claim"
    path.write_text(text)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path


@pytest.mark.parametrize("text", [*map(json.dumps, PLANTED.values()), "[" * 4096], ids=[*PLANTED, "very deep"])
def test_a_claim_that_cannot_be_is_ignored_and_told_once(machine, caplog, text):
    with planted(machine, text), caplog.at_level(logging.WARNING):
        assert (claimed(0)[1], claimed(0)[1]) == (RAM, RAM)
    assert len(caplog.records) == 1 and "'planted.claim'" in caplog.text


@pytest.mark.parametrize(("owner", "left"), [("another", RAM), ("this", RAM - 1000), ("root", RAM - 1000)])
def test_claims_of_root_and_of_this_user_count(machine, monkeypatch, caplog, owner, left):
    user = {"another": os.geteuid() + 1, "this": os.geteuid(), "root": 0}[owner]
    real = os.fstat
    with planted(machine, json.dumps(GOOD | {"nbytes": 1000})) as path:

        def of(file):
            fields = list(real(file))
            if fields[stat.ST_INO] == path.stat().st_ino:
                fields[stat.ST_UID] = user
            return os.stat_result(fields)

        monkeypatch.setattr(claims.os, "fstat", of)
        assert claimed(0)[1] == left
        assert path.exists()
    assert not caplog.records


def test_nobody_elses_lock_is_waited_for(machine, tmp_path, monkeypatch, caplog):
    """Anybody can lock the folder; a lock file that others can open is none of this user's."""
    folder = Path(machine.places[0]) / claims.NAME
    claimed(1)[0].close()
    with contextlib.ExitStack() as held:
        file = os.open(folder, os.O_RDONLY)
        held.callback(os.close, file)
        fcntl.flock(file, fcntl.LOCK_EX)
        began = time.monotonic()
        assert claimed(1)[1] == RAM
        lock = folder / f"lock.{os.geteuid()}"
        assert lock.stat().st_mode & 0o777 == 0o600
        lock.chmod(0o666)
        fcntl.flock(held.enter_context(lock.open()), fcntl.LOCK_EX)
        assert claimed(1)[1] == RAM
        assert time.monotonic() - began < 2
    assert "is open to others" in caplog.text
