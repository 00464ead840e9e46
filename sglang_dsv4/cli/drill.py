"""Provokes five faults in real pools, on any machine, and shows the user's view of each.

    sglang-dsv4 drill [NAME ...] [--json]

Without a name every fault is played. Exit status 1 when one of them does not look as it must.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from sglang_dsv4.settings import enabled_settings

if TYPE_CHECKING:
    from sglang_dsv4.livetest.faults import Scene

NAMES = ("memory", "hooks", "damage", "sessions", "store")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``sglang-dsv4 drill``."""
    parser.add_argument("names", nargs="*", type=_name, metavar="NAME", help=" or ".join(NAMES))
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.set_defaults(run=run)


def _name(text: str) -> str:
    if text not in NAMES:
        raise argparse.ArgumentTypeError(f"no fault {text[:40]!r}, there are {', '.join(NAMES)}")
    return text


def run(arguments: argparse.Namespace) -> int:
    """Plays the faults; returns 1 when one does not look as it must."""
    enabled_settings()
    faults = _faults()
    scenes = {name: faults[name]() for name in arguments.names or NAMES}
    _show(scenes)
    missed = {name: scene.missed for name, scene in scenes.items()}
    if arguments.json:
        played = {name: {**asdict(scene), "missed": missed[name]} for name, scene in scenes.items()}
        print(json.dumps({"ok": not any(missed.values()), "drills": played}))
    return int(any(missed.values()))


def _faults() -> dict[str, Callable[[], Scene]]:
    """Returns the faults by name, over an engine with this package's hooks."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the pools are on the CPU everywhere
    import torch  # noqa: PLC0415 - it reads that variable

    from sglang_dsv4.testing.standalone import boot, install_hooks  # noqa: PLC0415

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # the engine prints when it is imported
        boot()
        install_hooks()
        from sglang_dsv4.cli import drill_store  # noqa: PLC0415 - it imports the hooked engine
        from sglang_dsv4.livetest import faults  # noqa: PLC0415 - likewise
    return {**faults.SCENES, "store": drill_store.scene}


def _show(scenes: Mapping[str, Scene]) -> None:
    """Prints what is seen of each fault, then the verdict."""
    from sglang_dsv4.engine.releases import engine_version  # noqa: PLC0415

    for name, scene in scenes.items():
        print(f"{name}: {scene.title}\n{scene.where}:\n{scene.seen}")
        print("".join(f"  {fact}: {'yes' if true else 'NO'}\n" for fact, true in scene.facts.items()), end="")
        print("".join(f"MISSED {text}\n" for text in scene.missed), end="")
        print(f"what to do: {scene.todo}\n")
    good = sum(not scene.missed for scene in scenes.values())
    print(f"{good} of {len(scenes)} faults look as they must, sglang {engine_version()}")
