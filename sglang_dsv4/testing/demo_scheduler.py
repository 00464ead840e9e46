"""Runs requests over the engine's pool and allocator, retracts and resumes them, and compares every byte.

Used by ``sglang-dsv4 demo`` and ``drill``. The ledger says which bytes are written and read.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem.memory import HostCopy, HostMemory
from sglang_dsv4.testing.ledger import Ledger
from sglang_dsv4.testing.standalone import PoolSpec, make_allocator, make_pool

PAGE = 256
RETRACT_EVERY = 2  # steps between forced retracts, whatever the memory
WATCHED = 2  # pages kept free so that the running requests can grow
MOST_OUTPUT = 300  # tokens


def least_pages(longest: int) -> int:
    """Counts the pages that a prompt of ``longest`` tokens needs to come to its end, alone."""
    return -(-(longest + MOST_OUTPUT) // PAGE) + WATCHED


def damage(memory: HostMemory, unit: int) -> None:
    """Flips the first byte of ``unit``, as a stray writer would."""
    memory.arena.region[memory.offset(unit)] ^= 0xFF


@dataclass(eq=False)
class Job:
    """Keeps one request: its slots hold ``len(slots)`` computed tokens."""

    number: int
    prompt: int
    output: int
    slot: int = -1
    slots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    copy: HostCopy | None = None

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.number, self.prompt + self.output + 64)

    @property
    def done(self) -> bool:
        """Returns whether all tokens were made."""
        return len(self.slots) >= self.prompt + self.output


@dataclass
class Result:
    """Counts the demo's results."""

    retracts: int = 0
    resumes: int = 0
    exact: int = 0
    fallbacks: int = 0
    saved_bytes: int = 0
    save_ms: list[float] = field(default_factory=list)
    load_ms: list[float] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)


class Scheduler:
    """Schedules decode steps over the engine's real pool and allocator."""

    def __init__(self, spec: PoolSpec, rng: random.Random, corrupt: bool) -> None:
        self.pool: Any = make_pool(spec)
        self.allocator = make_allocator(spec, self.pool)
        self.spec, self.rng, self.corrupt = spec, rng, corrupt
        self.slots = list(range(1, spec.requests + 1))
        self.running: list[Job] = []
        self.retracted: list[Job] = []
        self.result = Result()

    def grow(self, job: Job, tokens: int) -> None:
        """Allocates and writes ``tokens`` more, as an extend or ``tokens`` decode steps would."""
        before, after = len(job.slots), len(job.slots) + tokens
        last = job.slots[-1:] if before else torch.tensor([-1], device=self.spec.device)
        got = self.allocator.alloc_extend(
            self._length(before), torch.tensor([before]), self._length(after), torch.tensor([after]),
            last.long(), tokens,
        )  # fmt: skip
        job.slots = torch.cat((job.slots.to(got.device), got.long()))
        job.ledger.write(self.pool, job.slots, before, job.slot)

    def _length(self, value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int64, device=self.spec.device)

    def room(self, tokens: int) -> bool:
        """Returns whether ``tokens`` fit with the watched pages to spare, in both pools."""
        return bool(self.allocator.available_size() >= tokens + WATCHED * PAGE)

    def retract(self, job: Job) -> None:
        """Saves, gives pages and slot away, then lets a stale forward and a new owner write over everything."""
        self.running.remove(job)
        started = time.perf_counter()
        try:
            job.copy = self.pool.get_cpu_copy(job.slots.to(torch.int32), req_pool_index=job.slot)
        except HostMemoryExhausted:
            self.result.fallbacks += 1  # recomputed at the resume, as the engine would
        else:
            self.result.save_ms.append((time.perf_counter() - started) * 1e3)
            self.result.saved_bytes += job.copy.nbytes
            if self.corrupt:
                damage(job.copy.memory, job.copy.units[0])
        self.result.retracts += 1
        Ledger(-1 - job.number & 0xFFFF, len(job.slots)).write(self.pool, job.slots, 0, job.slot)
        self.allocator.free(job.slots)
        self.slots.insert(0, job.slot)
        self.retracted.append(job)

    def resume(self, job: Job) -> bool:
        """Brings a retracted request back into new pages; returns False when there is no room."""
        tokens = len(job.slots)
        if not self.slots or not self.room(-(-tokens // PAGE) * PAGE):
            return False
        self.retracted.remove(job)
        job.slot = self.slots.pop(self.rng.randrange(len(self.slots)))
        tail = tokens - max(0, tokens - 128) // 256 * 256
        job.slots = self.allocator.alloc_extend_swa_tail(
            self._length(0), torch.tensor([0]), self._length(tokens), torch.tensor([tokens]),
            torch.tensor([-1], device=self.spec.device), tokens, tail,
        ).long()  # fmt: skip
        if job.copy is None:
            job.ledger.write(self.pool, job.slots, 0, job.slot)
        else:
            self._load(job)
        self.running.append(job)
        return True

    def _load(self, job: Job) -> None:
        started = time.perf_counter()
        self.pool.load_cpu_copy(job.copy, job.slots.to(torch.int32), req_pool_index=job.slot)
        if self.spec.device == "cuda":
            torch.cuda.current_stream().synchronize()
        self.result.load_ms.append((time.perf_counter() - started) * 1e3)
        job.copy = None
        self.result.resumes += 1
        wrong = job.ledger.mismatches(self.pool, job.slots, job.slot)
        self.result.exact += not wrong
        self.result.mismatches += [f"request {job.number}: {text}" for text in wrong]

    def step(self, number: int) -> list[Job]:
        """Runs one round: resumes, forces a retract, grows every running request. Returns the finished ones."""
        while self.retracted and self.resume(self.retracted[0]):
            pass
        if number % RETRACT_EVERY == 0 and len(self.running) > 1:
            self.retract(self.rng.choice(self.running))
        for job in list(self.running):
            tokens = min(self.rng.randint(1, 48), job.prompt + job.output - len(job.slots))
            while not self.room(tokens) and len(self.running) > 1 and job in self.running:
                self.retract(min(self.running, key=lambda other: len(other.slots)))
            if job in self.running:
                self.grow(job, tokens)
        finished = [job for job in self.running if job.done]
        for job in finished:
            self.running.remove(job)
            self.allocator.free(job.slots)
            self.slots.append(job.slot)
        return finished

    def admit(self, job: Job) -> bool:
        """Starts a new request when nothing waits for memory and it fits."""
        if self.retracted or not self.slots or not self.room(-(-job.prompt // PAGE) * PAGE):
            return False
        job.slot = self.slots.pop(0)
        self.grow(job, job.prompt)
        self.running.append(job)
        return True

    def serve(self, waiting: list[Job]) -> Iterator[list[Job]]:
        """Serves all of ``waiting``; yields the finished, step by step. It ends: each step makes a token at least."""
        number = 0
        while waiting or self.running or self.retracted:
            while waiting and self.admit(waiting[0]):
                waiting.pop(0)
            number += 1
            finished = self.step(number)
            yield finished
            if not finished and not self.running:
                raise AssertionError(f"nothing runs, and {len(waiting) + len(self.retracted)} requests wait for room")
