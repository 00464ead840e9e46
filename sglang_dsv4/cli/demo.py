"""Retracts and resumes requests of real pools under a cache that is too small, comparing every byte.

With --sessions it plays conversations: their turns go on from the cache that finished requests left on the host. With
--store their server ends, and another one reads that cache from a store of files.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import time
from typing import Any

import torch

from sglang_dsv4.cli import demo_sessions, demo_store
from sglang_dsv4.cli.tables import facts
from sglang_dsv4.command_line import CommandError, number
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.errors import HostCopyError, SettingError
from sglang_dsv4.settings import Settings, enabled_settings
from sglang_dsv4.testing.demo_scheduler import MOST_OUTPUT, PAGE, Job, Result, Scheduler, least_pages
from sglang_dsv4.testing.standalone import TINY41_RATIOS, TINY41_SOURCES, PoolSpec, boot, install_hooks

MODELS: dict[str, dict[str, Any]] = {"v4": {}, "v41": {"ratios": TINY41_RATIOS, "sources": TINY41_SOURCES}}
REQUESTS = 300
CORE_SECONDS = 0.08  # of one core a request of the default length, the import included
EVERY = 5.0  # seconds between two lines of progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``sglang-dsv4 demo``."""
    add = parser.add_argument
    help_ = (
        f"default: {REQUESTS}; turns of conversations: {demo_sessions.TURNS}; with --store: {demo_store.CONVERSATIONS}"
    )
    add("--requests", type=number(int, 1, 100_000), metavar="N", help=help_)
    add("--longest", type=number(int, 1, 100_000), default=1500, metavar="TOKENS", help="longest prompt (1500)")
    add("--model", choices=MODELS, default="v4", help="whose caches: DeepSeek-V4's, or V4.1's, which layers share (v4)")
    add("--pages", type=number(int, 1, 2_000), default=28, metavar="N", help=f"of {PAGE} tokens in the cache (28)")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--seed", type=int, default=0)
    add("--sessions", action="store_true", help="conversations under DSV4_SESSIONS, on the CPU, in a plain server")
    add("--store", action="store_true", help="conversations of a server that ends and starts again, over DSV4_STORE")
    add("--corrupt", action="store_true", help="flip one saved byte, to see the demo fail")
    add("--json", action="store_true", help="print the result as one JSON line, last")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; returns 1 on any mismatch or leak. Raises CommandError for a request it cannot meet."""
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)  # more of them wait for one another where other programs keep the cores busy
    try:
        settings = enabled_settings()
        if arguments.store:
            return demo_store.run(arguments, settings)
        if arguments.sessions:
            return demo_sessions.run(arguments, settings)
        arguments.requests = arguments.requests or REQUESTS
        arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
        _check(arguments)
        scheduler = _start(arguments, settings)
    except HostCopyError as error:
        raise CommandError(str(error)) from error
    started = time.perf_counter()
    _serve(scheduler, _jobs(arguments, scheduler.rng))
    memory = scheduler.pool.host.memory
    memory.check_integrity()
    leaks = memory.leaks + memory.copies + (scheduler.allocator.full_available_size() != arguments.pages * PAGE)
    result = scheduler.result
    _report(result, arguments, settings, leaks, time.perf_counter() - started)
    return 1 if result.mismatches or leaks or result.exact != result.resumes else 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SettingError("--device cuda: torch sees no CUDA device here; use --device cpu")
    least = least_pages(arguments.longest)
    if arguments.pages < least:
        raise SettingError(
            f"--pages {arguments.pages} hold {arguments.pages * PAGE} tokens; with --longest {arguments.longest} at "
            f"least {least} are needed"
        )


def _start(arguments: argparse.Namespace, settings: Settings) -> Scheduler:
    """Returns the scheduler, its pool and the host memory, reserved as a server reserves it at start."""
    boot()
    install_hooks()
    sizes = {"pages": arguments.pages, "swa_pages": arguments.pages, "requests": 12, "device": arguments.device}
    spec = PoolSpec(**MODELS[arguments.model], **sizes)
    scheduler = Scheduler(spec, random.Random(arguments.seed), arguments.corrupt)
    scheduler.pool.attach_host(settings)
    scheduler.pool.require_host()
    return scheduler


def _jobs(arguments: argparse.Namespace, rng: random.Random) -> list[Job]:
    return [
        Job(number, int(arguments.longest ** rng.random()), rng.randint(20, MOST_OUTPUT))
        for number in range(arguments.requests)
    ]


def _serve(scheduler: Scheduler, waiting: list[Job]) -> None:
    total, steps, result = len(waiting), scheduler.serve(waiting), scheduler.result
    seconds = max(1.0, CORE_SECONDS * total)
    print(f"{total} requests, every byte compared; about {seconds:.0f} s of one core", flush=True)
    done, started = 0, time.monotonic()
    last = started
    for finished in steps:
        done += len(finished)
        now = time.monotonic()
        if now - last >= EVERY:
            last = now
            note = f"retracts {result.retracts}, exact {result.exact} of {result.resumes}"
            print(f"{now - started:.0f} s: {done} of {total} requests, {note}", flush=True)


def _report(result: Result, arguments: argparse.Namespace, settings: Settings, leaks: int, seconds: float) -> None:
    rows = {
        "retracts / resumes from a copy": f"{result.retracts} / {result.resumes}",
        "bytes saved": f"{result.saved_bytes / 1e6:.1f} MB",
        "exact / resumed": f"{result.exact} / {result.resumes}",
        "save, median / longest": _times(result.save_ms),
        "load, median / longest": _times(result.load_ms),
        "fallbacks (no host memory)": str(result.fallbacks),
        "leaked units, copies or slots": str(leaks),
        "DSV4_TRANSFER / DSV4_VERIFY": f"{settings.transfer} / {int(settings.verify)}",
        "time": f"{seconds:.1f} s",
    }
    print(facts(f"sglang {engine_version()} on {arguments.device}, {arguments.model}", rows))
    for text in result.mismatches[:5]:
        print(f"MISMATCH {text}")
    if arguments.json:
        counts = {name: count for name, count in vars(result).items() if isinstance(count, int)}
        found = {"device": arguments.device, "leaks": leaks, "seconds": seconds, **counts}
        print(json.dumps(found | {"mismatches": len(result.mismatches)}))


def _times(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} / {max(values):.2f} ms" if values else "-"
