"""Runs conversations through a plain server in miniature, and retracts some of them.

Used by ``sglang-dsv4 demo --plain``. The ledger judges the reads of each forward and the contents of the prefix tree.
Imported after ``boot``: it imports the engine's scheduler.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import cast

from sglang_dsv4.engine.plain.serving import PlainServing, plain_of
from sglang_dsv4.testing.content import VOCABULARY
from sglang_dsv4.testing.demo_scheduler import MOST_OUTPUT, Job, Result, damage
from sglang_dsv4.testing.forward import WrongRows
from sglang_dsv4.testing.integrity import LostPages
from sglang_dsv4.testing.server import PAGE
from sglang_dsv4.testing.standalone import PoolSpec
from sglang_dsv4.testing.world import PlainWorld

# A layer of each compress ratio: all families of rows, in the fewest bytes.
V4_LAYERS = {"ratios": (0, 4, 128)}
V41_LAYERS = {"ratios": (0, 2, 1), "sources": (1, 2)}
CHECK_EVERY = 4  # passes; what a forward reads is checked in each
RETRACT_EVERY = 8  # passes between forced retracts, whatever the memory
WAITING = 3  # new requests that wait at a time
SECOND_TURNS = 0.3  # of the requests


class PlainDemo:
    """Drives the clients of one plain server, and counts its events."""

    def __init__(self, pool: PoolSpec, longest: int, rng: random.Random, corrupt: bool) -> None:
        self.world = PlainWorld(
            pages=pool.pages, swa_pages=pool.swa_pages, requests=pool.requests, chunk=1024, mixed=True, overlap=True,
            **(V41_LAYERS if pool.sources else V4_LAYERS),
        )  # fmt: skip
        self.pool, self.allocator = self.world.pool, self.world.allocator
        self.pool.require_host()
        self.plain = cast(PlainServing, plain_of(self.allocator))
        self.longest, self.rng, self.corrupt = longest, rng, corrupt
        self.result = Result()
        self._seconds = {"save": 0.0, "load": 0.0}

    def serve(self, waiting: list[Job]) -> Iterator[list[Job]]:
        """Serves all of ``waiting``; yields finished requests, pass by pass. Ends at the first wrong byte."""
        running: dict[str, Job] = {}
        passes = 0
        try:
            while waiting or running:
                while waiting and len(self.world.waiting) < WAITING:
                    running.update(self._submit(waiting.pop(0)))
                passes += 1
                yield self._pass(passes, running)
        except (WrongRows, LostPages) as error:
            self.result.mismatches.append(str(error))
        self.world.evict(self.world.spec.pages * PAGE, self.world.spec.swa_pages * PAGE)

    def _submit(self, job: Job) -> dict[str, Job]:
        """Returns a new conversation, or the next turn of one that is over."""
        over = [req for req in self.world.requests if req.finished() and req.seqlen + MOST_OUTPUT < self.longest]
        if over and self.rng.random() < SECOND_TURNS:
            more = [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(1, 100))]
            return {self.world.second_turn(self.rng.choice(over), more, max_new=job.output).rid: job}
        prompt = [self.rng.randrange(VOCABULARY) for _ in range(job.prompt)]
        return {self.world.submit(prompt, max_new=job.output).rid: job}

    def _pass(self, number: int, running: dict[str, Job]) -> list[Job]:
        if number % RETRACT_EVERY == 0:
            self._retract()
        before = self.plain.host.counters.loads
        self.world.step()  # raises where a forward would read a wrong byte
        if number % CHECK_EVERY == 0:
            self.world.check_integrity()
        self.result.exact += self.plain.host.counters.loads - before
        self._count()
        over = [req for req in self.world.requests if req.rid in running and req.finished()]
        return [running.pop(req.rid) for req in over]

    def _retract(self) -> None:
        """Retracts one request; half of the time the tree loses its pages, as to other prompts."""
        found = self.world.retractable
        if len(found) < 2:
            return
        req = self.rng.choice(found)
        self.world.retract(req)
        if self.rng.random() < 0.5:
            self.world.evict(self.world.spec.pages * PAGE, self.world.spec.swa_pages * PAGE)
        if self.corrupt and (saved := self.plain.saved_of(req)):
            damage(saved.copy, page=-1)  # those before it may be the tree's, and are not loaded

    def _count(self) -> None:
        counters, result = self.plain.host.counters, self.result
        result.retracts = sum(req.retraction_count for req in self.world.requests)
        result.resumes, result.spared = counters.loads, counters.spared_tokens
        result.saved_bytes, result.fallbacks = counters.saved_bytes, sum(counters.fallbacks.values())
        for times, what in ((result.save_ms, "save"), (result.load_ms, "load")):
            seconds = getattr(counters, f"{what}_seconds")
            if seconds > self._seconds[what]:
                times.append((seconds - self._seconds[what]) * 1e3)
                self._seconds[what] = seconds
