"""Ranks share an arena or agree that they cannot, and a rank that dies leaves nothing."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import SMALL_RATIOS
from processes import FORK, exchange, on_ranks

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.units import Units
from sglang_dsv4.errors import ArenaNotShared, HostMemoryExhausted
from sglang_dsv4.hostmem import arena as arena_module
from sglang_dsv4.hostmem import board as board_module
from sglang_dsv4.hostmem import sharing
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.hostmem.sharing import Sharers, World, find_sharers
from sglang_dsv4.hostmem.sizing import ArenaSize


def world_of(rank: int, group: Any = "all") -> World:
    return World(exchange, rank, group)


def memory_of(sharers: Sharers | None) -> HostMemory:
    g = Geometry(SMALL_RATIOS)
    return HostMemory(families(g), ArenaSize(Units.of(g), 40), pin=False, sharers=sharers)


def test_what_one_rank_writes_the_others_read(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        before = open_memory()
        sharers = find_sharers(world_of(rank))
        memory = memory_of(sharers)
        assert not memory.arena.board._lines.any(), "nobody has taken a turn or voted"
        torch.distributed.barrier()
        part = memory.arena.nbytes // 3
        memory.arena.region[rank * part : (rank + 1) * part].fill_(rank + 1)
        memory.arena.board.vote(True)
        found = [int(memory.arena.region[number * part + 5]) for number in range(3)]
        opened = [name for path, name in open_memory().items() if path not in before]
        return found, (sharers.rank, sharers.ranks, sharers.arenas, sharers.whole), opened

    answers = on_ranks(tmp_path, work, 3)
    assert [answer[0] for answer in answers] == [[1, 2, 3]] * 3
    assert [answer[1] for answer in answers] == [(rank, 3, 1, True) for rank in range(3)]
    assert all(answer[2] == ["/memfd:sglang_dsv4 (deleted)"] for answer in answers), "memory without a name"


def test_each_group_and_each_machine_has_an_arena(tmp_path: Path) -> None:
    """Two stages of two ranks; and a group over two machines, which its ranks only seem to be on."""

    def stages(rank: int) -> Any:
        sharers = find_sharers(world_of(rank, group=rank // 2))
        memory_of(sharers).arena.region[:4].fill_(rank // 2 + 1)
        return sharers.rank, sharers.ranks, sharers.arenas, sharers.whole

    for number in range(2):
        (tmp_path / f"boot{number}").write_text(f"machine {number}")

    def machines(rank: int) -> Any:
        sharing._BOOT_ID = str(tmp_path / f"boot{rank // 2}")
        sharers = find_sharers(world_of(rank))
        memory_of(sharers)
        return sharers.rank, sharers.ranks, sharers.arenas, sharers.whole

    (tmp_path / "stages").mkdir()
    assert on_ranks(tmp_path / "stages", stages, 4) == [(0, 2, 2, True), (1, 2, 2, True)] * 2
    assert on_ranks(tmp_path, machines, 4) == [(0, 2, 1, False), (1, 2, 1, False)] * 2


def open_memory() -> dict[str, str]:
    """This process's open files that are memory of ours: name by path. Some are of tests that were there before."""
    found = {}
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[str(file)] = str(file.readlink())
    return {path: name for path, name in found.items() if "sglang_dsv4" in name}


def refused(work: Callable[[], Any]) -> str:
    with pytest.raises(ArenaNotShared) as caught:
        work()
    return str(caught.value)


OFFERS = {
    "memfd": "rank 1: memory without a name",
    "boot": "rank 1: memory without a name",
    "processor": "rank 0: a riscv64",
    "namespace": "rank 0: the memory of process",
}


@pytest.mark.parametrize("what", OFFERS)
def test_a_rank_that_cannot_offer_memory_tells_the_others(tmp_path: Path, what: str) -> None:
    """A sandbox without memfd or the machine's name; a processor whose stores others may see in another order; a
    container in which another process has the number that was offered."""

    def work(rank: int) -> str:
        def refuse(*_: Any) -> None:
            raise OSError

        if rank == 1 and what == "memfd":
            os.memfd_create = refuse
        elif rank == 1 and what == "boot":
            sharing._BOOT_ID = str(tmp_path / "none")
        elif what == "processor":
            platform.machine = lambda: "riscv64"
        elif rank == 0 and what == "namespace":
            sharing.os = SimpleNamespace(**{**vars(os), "getpid": os.getppid})
        before = open_memory().keys()
        said = refused(lambda: find_sharers(world_of(rank)))
        assert open_memory().keys() == before
        return said

    answers = on_ranks(tmp_path, work)
    assert answers[0] == answers[1] and answers[0].startswith(OFFERS[what])


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("step", ["resize", "map", "populate"])
def test_a_rank_that_cannot_tells_the_others(tmp_path: Path, step: str, failing: int) -> None:
    """A control group's limit, say. Only rank 0 makes the memory as large as it must be."""

    def work(rank: int) -> Any:
        def fail(*_: Any) -> None:
            raise HostMemoryExhausted("no memory (lower DSV4_HOST_GB)")

        before = open_memory().keys()
        if rank == failing and step == "populate":
            arena_module.populate = fail
        elif rank == failing:
            setattr(Sharers, step, fail)
        sharers = find_sharers(world_of(rank))
        if step == "resize" and failing == 1:
            memory_of(sharers)
            return None
        said = refused(lambda: memory_of(sharers))
        return said, len(open_memory().keys() - before)

    wanted = None if step == "resize" and failing == 1 else (f"rank {failing}: no memory (lower DSV4_HOST_GB)", 0)
    assert on_ranks(tmp_path, work) == [wanted] * 2


@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize("phase", ["exchange", "_open", "resize", "map", "populate", "made", "serving"])
def test_a_rank_that_is_killed_does_not_hang_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, phase: str, dying: int
) -> None:
    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def rank(number: int) -> None:
        store = f"file://{tmp_path}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=number, world_size=2)
        world = world_of(number)
        if number == dying:
            for owner in (sharing, arena_module, Sharers):
                if hasattr(owner, phase):
                    setattr(owner, phase, die)
            world = world._replace(exchange=die) if phase == "exchange" else world
        memory = memory_of(find_sharers(world))
        for votes in range(2):
            if number == dying and (phase != "serving" or votes):
                die()
            memory.arena.board.vote(True)

    monkeypatch.setattr(board_module, "PATIENCE", 2.0)  # of a board that is made; the engine would end the rank before
    children = [FORK.Process(target=rank, args=(number,)) for number in range(2)]
    try:
        for child in children:
            child.start()
        for child in children:
            child.join(45)
        codes = [child.exitcode for child in children]
    finally:
        for child in children:
            child.kill()
    assert codes[dying] == -signal.SIGKILL and codes[1 - dying] == 1
