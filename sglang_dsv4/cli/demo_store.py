"""Shows conversations that outlive their server, in a store of files: ``sglang-dsv4 demo --store``."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dsv4.cli.demo_sessions import MODELS, SHORTEST, start_engine
from sglang_dsv4.cli.tables import size, table
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.errors import SettingError
from sglang_dsv4.settings import Settings

if TYPE_CHECKING:
    from sglang_dsv4.testing.demo_store import Life

CONVERSATIONS = 8
CORE_SECONDS, START_SECONDS = 1.0, 8.0  # of one core: a conversation, the start of a store's process
HOST_GB = "0.05"  # where DSV4_HOST_GB is not set
ROOM = 1 << 30
FIRST, WITHOUT, WITH = "first life", "second, without", "second, with"


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Plays two lives; returns 1 on a wrong byte, a leak, or where nothing comes from the store."""
    if arguments.sessions:
        raise SettingError("--store with --sessions: choose one")
    start_engine("--store", arguments, settings)
    require_disk()
    count, started = arguments.requests or CONVERSATIONS, time.perf_counter()
    seconds = 2 * START_SECONDS + CORE_SECONDS * count
    print(
        f"{count} conversations in two lives, every byte read is judged; about {seconds:.0f} s of one core", flush=True
    )
    with tempfile.TemporaryDirectory(prefix="sglang_dsv4-store-") as folder:
        lives, stored = _play(arguments, count, Path(folder))
    _report(lives, stored, arguments, settings, time.perf_counter() - started)
    return int(bool(_faults(lives)))


def require_disk() -> None:
    """Raises SettingError where the disk of temporary files has too little room for a store, which leaves much free."""
    from sglang_dsv4.store.client import LEAST_FREE  # noqa: PLC0415 - it needs numpy

    folder = tempfile.gettempdir()
    if (free := shutil.disk_usage(folder).free) < LEAST_FREE + ROOM:
        raise SettingError(
            f"{folder} has {size(free)} free, of which a store of files leaves {size(LEAST_FREE)}: set TMPDIR to a "
            "folder of a larger disk"
        )


def _play(arguments: argparse.Namespace, count: int, folder: Path) -> tuple[dict[str, Life], int]:
    """Plays the lives, up to one with a fault; returns them, and the bytes of the store."""
    from sglang_dsv4.testing import demo_store as demo  # noqa: PLC0415 - it imports the hooked engine

    rng, host_gb = random.Random(arguments.seed), os.environ.get("DSV4_HOST_GB", HOST_GB)
    spec: dict[str, Any] = {"pages": arguments.pages, **MODELS[arguments.model]}
    first = demo.Server(folder, host_gb, arguments.corrupt, **spec)
    lives = {FIRST: first.play(demo.prompts(rng, count, SHORTEST, arguments.longest))}
    turns = demo.next_turns(rng, first.answered)
    for name, where in ((WITHOUT, None), (WITH, folder)):
        if not any(life.mismatches for life in lives.values()):
            lives[name] = demo.Server(where, host_gb, **spec).play(turns)
    return lives, sum(path.stat().st_size for path in folder.iterdir())


def _faults(lives: Mapping[str, Life]) -> list[str]:
    """Returns what must not be."""
    faults = [f"MISMATCH {name}: {text}" for name, life in lives.items() for text in life.mismatches]
    faults += [f"LEAK {name}: {life.leaks}" for name, life in lives.items() if life.leaks]
    if not faults and not lives[WITH].stored:
        faults.append(f"NOTHING came from the store, to which the first life wrote {lives[FIRST].put} units")
    return faults


def _report(
    lives: Mapping[str, Life], stored: int, arguments: argparse.Namespace, settings: Settings, seconds: float
) -> None:
    columns = ("the server's life", "turns", "prompt tokens", "cached", "from the store", "computed", "of them, %")
    rows = []
    for name, life in lives.items():
        computed = life.tokens - life.cached
        numbers = (life.turns, life.tokens, life.cached, life.stored, computed)
        rows.append((name, *(f"{number:,}" for number in numbers), f"{100 * computed / max(1, life.tokens):.0f}"))
    print(table(f"sglang {engine_version()}, {arguments.model}: a server ends, and starts again", columns, rows))
    first, last = lives[FIRST], lives.get(WITH)
    facts = {
        "points / units written": f"{first.points} / {first.put}, {size(stored)} in the store",
        "units read / found wrong": f"{last.got} / {last.wrong}" if last else "-",
        "DSV4_STORE_SECRET": "set" if settings.store_secret else "not set",
        "leaked pages, slots, copies or units": str(sum(life.leaks for life in lives.values())),
        "time": f"{seconds:.1f} s",
    }
    print("\n".join(f"{name}: {fact}" for name, fact in facts.items()))
    print("".join(f"{text}\n" for text in _faults(lives)), end="")
    if arguments.json:
        found = {"stored_bytes": stored, "seconds": seconds, "faults": _faults(lives)}
        print(json.dumps(found | {"lives": {name: asdict(life) for name, life in lives.items()}}))
