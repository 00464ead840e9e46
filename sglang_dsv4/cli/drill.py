"""Provoke what goes wrong, and see what happens: before the first night on call.

    sglang-dsv4 drill [NAME ...] [--list] [--json]       faults: real pools, real errors and log lines, on any machine
    sglang-dsv4 drill clients --model-path MODEL ...     a live server whose clients leave, abort, flush and pause
    sglang-dsv4 drill weights --model-path MODEL ...     a live pair whose weights are updated while requests are away
    sglang-dsv4 drill plain --model-path MODEL ...       live plain servers, and each way out of the engine's queue

clients, weights and plain start servers and need a GPU; each has its own --help. Without a name every fault is played.
Exit status 1 when a scene is not as it must be, or a bound is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from sglang_dsv4.command_line import Parser

if TYPE_CHECKING:
    from sglang_dsv4.livetest.faults.scene import Drill, Scene

LIVE = ("clients", "weights", "plain")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the faults; those of the live drills are their own."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to play; all when none is given")
    parser.add_argument("--list", action="store_true", help="print the names of all drills and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")


def main(argv: Sequence[str]) -> int:
    """A live drill where the first word names one, else faults."""
    if argv and argv[0] in LIVE:
        return _live()[argv[0]].main(argv[1:])  # type: ignore[no-any-return]
    parser = Parser("sglang-dsv4 drill", description=__doc__)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    if set(arguments.names) & set(LIVE):
        parser.error(f"{' and '.join(LIVE)} stand alone, before their own options")
    drills = _faults()
    unknown = set(arguments.names) - {drill.name for drill in drills}
    if unknown:
        parser.error(f"no drill {', '.join(sorted(unknown))}; see --list")
    if arguments.list:
        return _list(drills)
    return _play([drill for drill in drills if not arguments.names or drill.name in arguments.names], arguments.json)


def _live() -> dict[str, Any]:
    """The modules of the live drills, by name."""
    from sglang_dsv4.livetest import clients, plain, weights  # noqa: PLC0415 - they import torch

    return dict(zip(LIVE, (clients, weights, plain), strict=True))


def _faults() -> tuple[Drill, ...]:
    """The faults, over an engine with this package's hooks."""
    # The pools are on the CPU everywhere, and the last fault forks.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch  # noqa: PLC0415 - it reads that variable

    from sglang_dsv4.testing.standalone import boot, install_hooks  # noqa: PLC0415

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # what the engine prints when it is imported
        boot()
        install_hooks()
        from sglang_dsv4.livetest.faults import DRILLS  # noqa: PLC0415 - it imports the hooked engine
    return DRILLS


def _list(drills: Sequence[Drill]) -> int:
    console = Console()
    titles = [(drill.name, drill.title) for drill in drills]
    for name, module in _live().items():
        titles.append((name, str(module.__doc__).split("\n", 1)[0]))
    for name, title in titles:
        console.print(f"{name:9} {title}", highlight=False, soft_wrap=True)
    return 0


def _play(drills: Sequence[Drill], as_json: bool) -> int:
    """Play and show them; 1 when a scene is not as it must be."""
    from sglang_dsv4.engine.releases import engine_version  # noqa: PLC0415

    console, missed = Console(), 0
    played: dict[str, list[dict[str, Any]]] = {}
    for drill in drills:
        started = time.perf_counter()
        scenes = list(drill.play())
        _show(console, drill, scenes, time.perf_counter() - started)
        played[drill.name] = [{**asdict(scene), "missed": scene.missed} for scene in scenes]
        missed += sum(bool(scene.missed) for scene in scenes)
    count = sum(map(len, played.values()))
    verdict = f"{count - missed} of {count} scenes as they must be, {len(played)} drills, sglang {engine_version()}"
    console.print(Text(verdict, "red" if missed else "green"))
    if as_json:
        print(json.dumps({"ok": not missed, "drills": played}))
    return int(missed > 0)


def _show(console: Console, drill: Drill, scenes: Sequence[Scene], seconds: float) -> None:
    """One panel a scene, then what to do."""
    console.rule(Text(f"{drill.name}: {drill.title}", "bold"))
    for scene in scenes:
        missed = scene.missed
        parts = [Text(f"{scene.where}:", "dim"), Text(scene.seen)]
        parts += [Text(f"  {name}", "green" if true else "red") for name, true in scene.facts.items()]
        parts += [Text(f"MISSED {text}", "bold red") for text in missed]
        console.print(
            Panel(Group(*parts), title=Text(scene.what), title_align="left", border_style="red" if missed else "green")
        )
    console.print(Text.assemble(("what to do: ", "bold"), drill.todo, (f"  ({seconds:.1f} s)", "dim")))
