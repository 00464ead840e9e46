#!/usr/bin/env python3
"""Provoke each failure and show what the user sees: real errors and log lines, of real pools, on any machine.

    python3 scripts/failure_drills.py [NAME ...] [--list] [--json]

Exit status 1 when a scene is not as it must be.
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
from typing import TYPE_CHECKING

import results  # noqa: F401  # a checkout that is not installed
import torch
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.engine.standalone import boot, install_hooks

if TYPE_CHECKING:
    from drills.scene import Drill, Scene


def show(console: Console, drill: Drill, scenes: Sequence[Scene], seconds: float) -> None:
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


def main(argv: list[str] | None = None) -> int:
    """Play the drills; 1 when a scene is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="drills to play; all when none is given")
    parser.add_argument("--list", action="store_true", help="print their names and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # what the engine prints when it is imported
        boot()
        install_hooks()
        from drills import DRILLS  # noqa: PLC0415  # it imports the hooked engine
    unknown = set(arguments.names) - {drill.name for drill in DRILLS}
    if unknown:
        parser.error(f"no drill {', '.join(sorted(unknown))}; see --list")
    console = Console()
    if arguments.list:
        for drill in DRILLS:
            console.print(f"{drill.name:9} {drill.title}", highlight=False)
        return 0
    played, missed = {}, 0
    for drill in DRILLS:
        if not arguments.names or drill.name in arguments.names:
            started = time.perf_counter()
            scenes = list(drill.play())
            show(console, drill, scenes, time.perf_counter() - started)
            played[drill.name] = [{**asdict(scene), "missed": scene.missed} for scene in scenes]
            missed += sum(bool(scene.missed) for scene in scenes)
    count = sum(map(len, played.values()))
    verdict = f"{count - missed} of {count} scenes as they must be, {len(played)} drills, sglang {engine_version()}"
    console.print(Text(verdict, "red" if missed else "green"))
    if arguments.json:
        print(json.dumps({"ok": not missed, "drills": played}))
    return int(missed > 0)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the pools are on the CPU everywhere, and the last drill forks
    sys.exit(main())
