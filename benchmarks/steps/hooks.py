#!/usr/bin/env python3
"""What the hooks add to a decode step in which nothing is retracted: our code behind the engine's own hook wrappers.

    python3 -m benchmarks.steps.hooks [--loops 200000]

The hooks that a step passes through are put, by the engine's hook registry, on stand-ins that do nothing; the same
stand-ins without hooks are the baseline. Needs no GPU and no server.
Exit status 1 when a step costs more than the bound.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_dsv4.bench import results
from sglang_dsv4.engine.hooks import Hook, hooks_of, line_of
from sglang_dsv4.engine.standalone import boot, engine_version

BOUND_US = 10.0  # of a step: under 1 % of the fastest one recorded on a live server
ROUNDS = 15


class DecodePreallocQueue:
    """As the engine's while no request is retracted."""

    def __init__(self) -> None:
        self.retracted_queue: list[Any] = []
        self.held_rebootstrap_reqs: list[Any] = []

    def resume_retracted_reqs(self, rids_to_check: Any = None) -> list[Any]:
        """Nothing."""
        return [] if rids_to_check is None else list(rids_to_check)


# Every hooked function that a step calls when graphs make the metadata and no request waits, with its object.
EACH_STEP: dict[str, tuple[type, tuple[Any, ...]]] = {
    "DecodePreallocQueue.resume_retracted_reqs": (DecodePreallocQueue, ()),
}


def hooks_of_a_step(line: str) -> dict[str, Hook]:
    """The table's entries for EACH_STEP, by class and method."""
    found = {hook.target.split(".", hook.target.count(".") - 1)[-1]: hook for hook in hooks_of(line, prep=True)}
    return {name: found[name] for name in EACH_STEP}


def nanoseconds(call: Callable[..., Any], given: tuple[Any, ...], loops: int) -> float:
    """One call: the median of ROUNDS means."""
    means = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        for _ in range(loops):
            call(*given)
        means.append((time.perf_counter_ns() - began) / loops)
    return statistics.median(means)


def measure(line: str, loops: int) -> list[dict[str, Any]]:
    """One row a hook: the stand-in bare, behind the hook, and the difference."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    bare = {name: nanoseconds(getattr(made(), name.split(".")[1]), given, loops)
            for name, (made, given) in EACH_STEP.items()}  # fmt: skip
    here = importlib.import_module(__name__)
    for name, hook in hooks_of_a_step(line).items():
        HookRegistry.register(f"{here.__name__}.{name}", hook.resolve(), HookType(hook.kind))
    HookRegistry.apply_hooks()
    rows = []
    for name, (made, given) in EACH_STEP.items():
        hooked = nanoseconds(getattr(made(), name.split(".")[1]), given, loops)
        rows.append({"hook": name, "bare_ns": bare[name], "hooked_ns": hooked, "added_ns": hooked - bare[name]})
    return rows


def main() -> int:
    """Exit status 1 when the bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, default=200_000, help="calls in each of the rounds")
    parser.add_argument("--out", type=Path, default=results.DEFAULT_FOLDER)
    parser.add_argument("--name", default="hooks")
    arguments = parser.parse_args()
    boot()
    line = line_of(engine_version())
    if line is None:
        parser.error(f"sglang {engine_version()} has no adapter")
    rows = measure(line, arguments.loops)
    for row in rows:
        print(f"{row['hook']:55} bare {row['bare_ns']:6.0f} ns, hooked {row['hooked_ns']:6.0f} ns")
    added = sum(row["added_ns"] for row in rows) / 1e3
    bounds = [results.bound("hooks of a step, us", f"<= {BOUND_US}", added)]
    results.write(arguments.name, rows, bounds, arguments.out)
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
