"""Retract and resume requests of real pools under a cache that is too small, comparing every byte."""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_dsv4.cli.ledger import Ledger
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.engine.standalone import PoolSpec, boot, install_hooks, make_allocator, make_pool
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.settings import read_settings

RETRACT_EVERY = 2  # steps between forced retracts, whatever the memory
WATCHED = 2  # pages kept free so that the running requests can grow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``sglang-dsv4 demo``."""
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--longest", type=int, default=1500, help="longest prompt, tokens")
    parser.add_argument("--pages", type=int, default=28, help="pages of 256 tokens in the device cache")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corrupt", action="store_true", help="flip one saved byte, to see the demo fail")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line, last")
    parser.set_defaults(run=run)


@dataclass(eq=False)
class Job:
    """One request: its slots hold ``len(slots)`` computed tokens."""

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
        """Whether all tokens were made."""
        return len(self.slots) >= self.prompt + self.output


@dataclass
class Result:
    """What the demo counts."""

    retracts: int = 0
    resumes: int = 0
    exact: int = 0
    fallbacks: int = 0
    saved_bytes: int = 0
    save_ms: list[float] = field(default_factory=list)
    load_ms: list[float] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)


class Scheduler:
    """A small decode scheduler over the engine's real pool and allocator."""

    def __init__(self, spec: PoolSpec, rng: random.Random, corrupt: bool) -> None:
        self.pool: Any = make_pool(spec)
        self.allocator = make_allocator(spec, self.pool)
        self.spec, self.rng, self.corrupt = spec, rng, corrupt
        self.slots = list(range(1, spec.requests + 1))
        self.running: list[Job] = []
        self.retracted: list[Job] = []
        self.result = Result()

    def grow(self, job: Job, tokens: int) -> None:
        """Allocate and write ``tokens`` more, as an extend or ``tokens`` decode steps would."""
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
        """Whether ``tokens`` fit with the watched pages to spare, in both pools."""
        return bool(self.allocator.available_size() >= tokens + WATCHED * 256)

    def retract(self, job: Job) -> None:
        """Save, give pages and slot away, and let a stale forward and a new owner write over everything."""
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
                job.copy.memory.arena.region[int(job.copy.blocks[next(iter(job.copy.blocks))][0])] ^= 255
        self.result.retracts += 1
        Ledger(-1 - job.number & 0xFFFF, len(job.slots)).write(self.pool, job.slots, 0, job.slot)
        self.allocator.free(job.slots)
        self.slots.insert(0, job.slot)
        self.retracted.append(job)

    def resume(self, job: Job) -> bool:
        """Bring a retracted request back into new pages; False when there is no room."""
        tokens = len(job.slots)
        if not self.slots or not self.room(-(-tokens // 256) * 256):
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
        """One round: resume, force a retract, grow every running request. Returns the finished ones."""
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
        """Start a new request when nothing waits for memory and it fits."""
        if self.retracted or not self.slots or not self.room(-(-job.prompt // 256) * 256):
            return False
        job.slot = self.slots.pop(0)
        self.grow(job, job.prompt)
        self.running.append(job)
        return True


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; 1 on any mismatch or leak."""
    logging.basicConfig(level=logging.ERROR)
    boot()
    install_hooks()
    rng = random.Random(arguments.seed)
    spec = PoolSpec(pages=arguments.pages, swa_pages=arguments.pages, requests=12, device=arguments.device)
    scheduler = Scheduler(spec, rng, arguments.corrupt)
    scheduler.pool.require_host()  # reserved at start, as a server does
    waiting = [Job(i, int(arguments.longest ** rng.random()), rng.randint(20, 300)) for i in range(arguments.requests)]
    console = Console()
    started = time.perf_counter()
    _serve(scheduler, waiting, arguments.requests, console)
    memory = scheduler.pool.require_host().memory
    memory.check_integrity()
    leaks = memory.leaks + memory.copies + (scheduler.allocator.full_available_size() != spec.pages * 256)
    _report(console, scheduler.result, arguments, leaks, time.perf_counter() - started)
    return 1 if scheduler.result.mismatches or leaks or scheduler.result.exact != scheduler.result.resumes else 0


def _serve(scheduler: Scheduler, waiting: list[Job], total: int, console: Console) -> None:
    bar = Progress(
        TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(), console=console,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=total, note="")
        number = 0
        while waiting or scheduler.running or scheduler.retracted:
            while waiting and scheduler.admit(waiting[0]):
                waiting.pop(0)
            number += 1
            finished = scheduler.step(number)
            result = scheduler.result
            note = f"retracts {result.retracts}  exact {result.exact}/{result.resumes}"
            bar.update(task, advance=len(finished), note=note)


def _report(console: Console, result: Result, arguments: argparse.Namespace, leaks: int, seconds: float) -> None:
    settings = read_settings()
    table = Table(title=f"sglang {engine_version()} on {arguments.device}, {arguments.requests} requests")
    table.add_column("what")
    table.add_column("result", justify="right")
    rows = {
        "retracts / resumes from a copy": f"{result.retracts} / {result.resumes}",
        "bytes saved": f"{result.saved_bytes / 1e6:.1f} MB",
        "exact / resumed": f"{result.exact} / {result.resumes}",
        "save, median / longest": _times(result.save_ms),
        "load, median / longest": _times(result.load_ms),
        "fallbacks (no host memory)": str(result.fallbacks),
        "leaked blocks, copies or slots": str(leaks),
        "DSV4_TRANSFER / DSV4_VERIFY": f"{settings.transfer} / {int(settings.verify)}",
        "time": f"{seconds:.1f} s",
    }
    for what, value in rows.items():
        table.add_row(what, value)
    console.print(table)
    for text in result.mismatches[:5]:
        console.print(f"[red]MISMATCH[/red] {text}")
    if arguments.json:
        print(json.dumps({"device": arguments.device, "leaks": leaks, "seconds": seconds, **_summary(result)}))


def _times(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} / {max(values):.2f} ms" if values else "-"


def _summary(result: Result) -> dict[str, Any]:
    return {
        "retracts": result.retracts, "resumes": result.resumes, "exact": result.exact,
        "fallbacks": result.fallbacks, "saved_bytes": result.saved_bytes, "mismatches": len(result.mismatches),
    }  # fmt: skip
