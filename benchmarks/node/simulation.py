#!/usr/bin/env python3
"""Ranks that share an arena live their lives on a CPU: they save, load, abort, fail, lose handles, and are killed.

    python3 -m benchmarks.node.simulation [--ranks 4 8] [--operations 10000] [--name NAME] [--out FOLDER]

Each rank is a process. A save stamps the blocks of its share, a load looks for the stamps of all shares; either may
happen long after it was enqueued, as on a card. So a block that is read before it is written, or written while it is
read, shows as a stamp of another operation. Every rank must get the same blocks and the same answers. At the end of
each life one rank is killed; the others must hear of it, and nothing of the memory may be left. No GPU; it takes about
two minutes.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_dsv4.bench import results
from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.errors import HostMemoryExhausted, RankNotHeard
from sglang_dsv4.hostmem import board
from sglang_dsv4.hostmem.memory import HostCopy, HostMemory
from sglang_dsv4.hostmem.sharing import World, find_sharers

FORK = multiprocessing.get_context("fork")
GEOMETRY = Geometry((0, 4, 128))
COUNTS = {Group.PAGED: 60, Group.WINDOW: 8, Group.REQUEST: 8}
LIVES = 4  # of which each ends with a rank killed
PATIENCE = 5.0
MOST_TOKENS = 5_000
LATE = 0.003  # seconds that a transfer may take


class Transfer:
    """What a card does some time after it was asked; an event to those who wait for it."""

    def __init__(self, work: Any, seconds: float) -> None:
        self._work, self._due, self._over = work, time.monotonic() + seconds, False

    def query(self) -> bool:
        """Whether it is over; nothing happens before its time."""
        if not self._over and time.monotonic() >= self._due:
            self._over = True
            self._work()
            self._work = None  # which holds the copy, which holds this
        return self._over

    def synchronize(self) -> None:
        """Wait until it is over."""
        time.sleep(max(0.0, self._due - time.monotonic()))
        self.query()


class Rank:
    """One rank of a life. ``plan`` is every rank's; ``own`` is what only this one meets."""

    def __init__(self, memory: HostMemory, life: int) -> None:
        self.memory, self.board = memory, memory.arena.board
        self.plan, self.own = random.Random(life), random.Random(f"{life} {memory.rank}")
        self.bytes = memory.arena.region.numpy()
        self.copies: list[tuple[int, HostCopy]] = []
        self.did: Counter[str] = Counter()
        self.history = hashlib.sha256()
        self.wrong = 0
        self.kept: list[HostCopy] = []  # handles that this rank has not collected yet

    def stamps(self, copy: HostCopy, group: Group, number: int) -> list[np.ndarray[Any, Any]]:
        """The first and the last eight bytes of a block of ``copy``."""
        region = self.memory.regions[group]
        first = self.memory.offset(group, int(copy.lease.blocks[group][number]))
        last = first + region.packed.block_stride - 8
        return [self.bytes[at : at + 8].view(np.int64) for at in (first, last)]

    def enqueue(self, copy: HostCopy, work: Any) -> None:
        """``work`` happens now or late, after which nothing of it touches the copy's blocks."""
        seconds = self.own.random() * LATE if self.own.random() < 0.3 else 0.0
        copy.lease.used_by = Transfer(work, seconds)
        copy.lease.used_by.query()
        self.memory.touched(copy)

    def save(self, operation: int) -> None:
        """As ``CopyService.save``; one rank in fifty such calls cannot."""
        tokens, unlucky = self.plan.randrange(1, MOST_TOKENS), self.plan.random() < 0.02
        failing = self.plan.randrange(self.memory.ranks) if unlucky else None
        try:
            copy = self.memory.allocate(tokens, GEOMETRY)
        except HostMemoryExhausted:
            self.history.update(b"full")
            self.did["refused"] += 1
            if self.board.vote(False):
                raise AssertionError("one rank had no room, the others had") from None
            self.leave()
            return
        self.history.update(str([blocks.tolist() for blocks in copy.blocks.values()]).encode())

        def stamp() -> None:
            for group, blocks in copy.lease.blocks.items():
                for number in range(len(blocks)):
                    if copy.share.has(group, number):
                        for place in self.stamps(copy, group, number):
                            place[0] = operation

        self.enqueue(copy, stamp)
        if not self.board.vote(failing != self.memory.rank):
            self.did["failed on one rank"] += 1
            copy.release()
        else:
            self.did["saved"] += 1
            self.copies.append((operation, copy))

    def load(self) -> None:
        """As ``CopyService.load``: every rank reads all shares."""
        operation, copy = self.copies.pop(self.plan.randrange(len(self.copies)))
        self.memory.wait_for_shares(copy)

        def look() -> None:
            for group, blocks in copy.lease.blocks.items():
                for number in range(len(blocks)):
                    self.wrong += any(int(place[0]) != operation for place in self.stamps(copy, group, number))

        self.enqueue(copy, look)
        copy.release()
        self.did["loaded"] += 1

    def leave(self) -> None:
        """A copy is aborted, or its handle is lost: on each rank at another time."""
        if not self.copies:
            return
        _, copy = self.copies.pop(self.plan.randrange(len(self.copies)))
        if self.plan.random() < 0.9:
            copy.release()
            self.did["aborted"] += 1
        else:
            self.did["handles lost"] += 1
            self.kept.append(copy)

    def live(self, first: int, count: int) -> None:
        """Operations number ``first`` to ``first + count - 1``."""
        for operation in range(first, first + count):
            if self.own.random() < 0.002:
                time.sleep(0.01)  # a slow rank
            if self.own.random() < 0.1:
                self.kept.clear()
            what = self.plan.random()
            if what < 0.5 or not self.copies:
                self.save(operation)
            elif what < 0.9:
                self.load()
            else:
                self.leave()
        for _, copy in self.copies:
            copy.release()
        self.copies.clear()
        self.memory.turns.reach(self.memory.turns.now)
        self.memory.check_integrity()


def run_rank(rank: int, ranks: int, life: int, count: int, store: str, answers: Any) -> None:
    """A process of one life. The last rank of the first life is killed, then the one before it, ..."""
    board.PATIENCE = 30.0  # of a rank that is slow
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)

    def exchange(mine: Any) -> list[Any]:
        found: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(found, mine)
        return found

    memory = HostMemory(init_groups(GEOMETRY), COUNTS, pin=False, sharers=find_sharers(World(exchange, rank, "all")))
    here = Rank(memory, life)
    here.live(1 + life * count, count)
    held = sum(pool.held for pool in memory.pools.values())
    lost = sum(1 for _ in memory._leases)
    report = {"history": here.history.hexdigest(), "wrong": here.wrong, "did": dict(here.did), "held": held}
    report.update(lost=lost, leaks=memory.leaks, memory=_memory())
    answers.put((rank, report))
    answers.close()
    answers.join_thread()
    torch.distributed.barrier()
    if rank == ranks - 1 - life % ranks:
        os.kill(os.getpid(), signal.SIGKILL)
    board.PATIENCE = PATIENCE
    try:
        here.board.vote(True)
    except RankNotHeard:
        os._exit(3)
    os._exit(4)


def live(ranks: int, life: int, count: int) -> dict[str, Any]:
    """One life of ``ranks`` processes, from their start to the last one's end."""
    answers = FORK.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        children = [FORK.Process(target=run_rank, args=(r, ranks, life, count, store, answers)) for r in range(ranks)]
        for child in children:
            child.start()
        found: dict[int, Any] = {}
        try:
            found.update([answers.get(timeout=60) for _ in children])
        finally:
            for child in children:
                child.join(0 if len(found) < ranks else 30)
                child.kill()
    reports = [found[rank] for rank in range(ranks)]
    codes = Counter(child.exitcode for child in children)
    return {
        "ranks": ranks, "life": life, "operations": count, **reports[0]["did"],
        "same history on every rank": len({report["history"] for report in reports}) == 1,
        "wrong stamps": sum(report["wrong"] for report in reports),
        "blocks held at the end by lost handles alone": all(report["lost"] or not report["held"] for report in reports),
        "reclaimed": reports[0]["leaks"],
        "heard of the killed rank": codes == {-signal.SIGKILL: 1, 3: ranks - 1},
        "memory left": _left(reports[0]["memory"]),
    }  # fmt: skip


def _memory() -> str:
    """What only processes with this rank's arena have in their maps: its device and inode."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return " ".join(next(line for line in lines if "memfd:sglang_dsv4" in line).split()[3:5])


def _left(memory: str) -> int:
    """Processes of this machine that still map it."""
    found = 0
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            found += any("memfd:sglang_dsv4" in line and memory in line for line in maps.read_text().splitlines())
        except OSError:  # it has just ended, or is another user's
            continue
    return found


def judge(rows: list[dict[str, Any]], operations: int) -> list[dict[str, Any]]:
    """What every life must have shown."""
    found = []
    for ranks in sorted({row["ranks"] for row in rows}):
        mine = [row for row in rows if row["ranks"] == ranks]
        sum_of = lambda name: sum(row.get(name, 0) for row in mine)  # noqa: B023, E731
        alike = sum(not (row["same history on every rank"] and row["heard of the killed rank"]) for row in mine)
        found += [
            results.bound(f"operations, TP {ranks}", f">= {operations}", sum_of("operations")),
            results.bound(f"stamps of another operation, TP {ranks}", "<= 0", sum_of("wrong stamps")),
            results.bound(f"lives in which ranks differed or did not hear of a kill, TP {ranks}", "<= 0", alike),
            results.bound(f"processes with memory left, TP {ranks}", "<= 0", sum_of("memory left")),
            results.bound(f"copies loaded, TP {ranks}", f">= {operations // 5}", sum_of("loaded")),
        ]
    return found


def main() -> int:
    """Run, print, write."""
    parser = results.parser(__doc__, "node-simulation")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--operations", type=int, default=10_000, help="for each number of ranks")
    results.add_out(parser)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        for life in range(LIVES):
            started = time.monotonic()
            rows.append(live(ranks, life, -(-arguments.operations // LIVES)))
            rows[-1]["seconds"] = time.monotonic() - started
            results.show(rows[-1:])
            bounds = judge(rows, arguments.operations)
    return results.finish(arguments, rows, bounds)


if __name__ == "__main__":
    raise SystemExit(main())
