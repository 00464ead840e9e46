"""Shows conversations that go on from the cache of their last turn: ``sglang-dsv4 demo --sessions``."""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sglang_dsv4.cli.tables import table
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.errors import SettingError
from sglang_dsv4.sessions.store import FEWEST_TOKENS
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import boot, install_hooks

if TYPE_CHECKING:
    from sglang_dsv4.testing.demo_sessions import Conversations

# Of three layers: every family of rows.
MODELS: dict[str, dict[str, Any]] = {"v4": {"ratios": (0, 4, 128)}, "v41": {"ratios": (0, 2, 1), "sources": (1, 2)}}
TURNS = 24
CORE_SECONDS = 0.15  # of one core a turn
SHORTEST = FEWEST_TOKENS + 256  # of first prompts: shorter ones leave no point
HOST_GB = "0.01"  # where DSV4_HOST_GB is not set: so little that old points make room for new ones


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    """Plays conversations; returns 1 on a wrong byte or a leak. Raises HostCopyError for a request it cannot meet."""
    conversations = _start(arguments, settings)
    turns, started = arguments.requests or TURNS, time.perf_counter()
    seconds = max(1.0, CORE_SECONDS * turns)
    print(f"{turns} turns, every byte read is judged; about {seconds:.0f} s of one core", flush=True)
    conversations.play(turns, arguments.longest)
    _report(conversations, arguments, time.perf_counter() - started)
    result = conversations.result
    return int(bool(result.mismatches or result.leaks))


def start_engine(option: str, arguments: argparse.Namespace, settings: Settings) -> None:
    """Loads the hooked engine for conversations. option: asked for them. Raises SettingError where it cannot be."""
    if arguments.device == "cuda":
        raise SettingError(f"--device cuda: with {option} the server plays on the CPU; leave --device out")
    if arguments.longest < SHORTEST:
        raise SettingError(f"--longest {arguments.longest}: with {option} at least {SHORTEST} tokens are needed")
    if settings.plain == "off":
        raise SettingError("DSV4_PLAIN=off: plain servers alone keep sessions; unset it")
    if not settings.sessions.kept:
        raise SettingError("DSV4_SESSIONS=off: there would be no sessions to show; unset it")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    boot()
    install_hooks()
    from sglang_dsv4.testing import demo_sessions  # noqa: PLC0415 - it imports the hooked engine

    least = demo_sessions.least_pages(arguments.longest)
    if arguments.pages < least:
        raise SettingError(
            f"--pages {arguments.pages}: with {option} and --longest {arguments.longest} at least {least} are needed"
        )


def _start(arguments: argparse.Namespace, settings: Settings) -> Conversations:
    start_engine("--sessions", arguments, settings)
    from sglang_dsv4.testing import demo_sessions  # noqa: PLC0415 - it imports the hooked engine

    host_gb = os.environ.get("DSV4_HOST_GB", HOST_GB)
    world = demo_sessions.server(host_gb, pages=arguments.pages, **MODELS[arguments.model])
    return demo_sessions.Conversations(world, random.Random(arguments.seed), SHORTEST, arguments.corrupt)


def _report(played: Conversations, arguments: argparse.Namespace, seconds: float) -> None:
    result, counters = played.result, played.store.counters
    columns = ("the device lost", "turns", "window loaded", "pages loaded", "tokens", "computed", "stock computes")
    rows = []
    for lost, row in result.lost.items():
        computed = row.tokens - row.cached
        numbers = (row.turns, row.by_window, row.by_pages, row.tokens, computed, computed + row.loaded)
        rows.append((lost, *(f"{number:,}" for number in numbers)))
    title = f"sglang {engine_version()}, {arguments.model}: turns, and the tokens of their prompts"
    print(table(title, columns, rows))
    facts = {
        "saved / loaded": f"{counters.saved_bytes / 1e6:.1f} / {counters.loaded_bytes / 1e6:.1f} MB",
        "points kept / evicted for newer ones": f"{result.points} / {counters.evicted['room']}",
        "leaked pages, slots, copies or units": str(result.leaks),
        "time": f"{seconds:.1f} s",
    }
    for name, fact in facts.items():
        print(f"{name}: {fact}")
    for text in result.mismatches:
        print(f"MISMATCH {text}")
    if arguments.json:
        print(json.dumps({"turns": result.turns, "seconds": seconds, **asdict(result)}))
