#!/usr/bin/env python3
"""What the plugin costs each process of a server, in fresh processes; see README.md beside this file."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_dsv4.bench import results

ROOT = Path(__file__).resolve().parents[2]

# What each process has imported when it calls load_plugins; whether it then builds a DeepSeek-V4 pool.
PROCESSES = {
    "detokenizer": ("sglang.srt.managers.detokenizer_manager", False),
    "scheduler of a Llama": ("sglang.srt.managers.scheduler", False),
    "scheduler of a DeepSeek-V4": ("sglang.srt.managers.scheduler", True),
}
FIGURES = ("seconds", "modules", "engine_modules", "mib")

CHILD = """
import asyncio, importlib, importlib.util, json, os, sys, time
from unittest import mock
import psutil, torch
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    kept = torch.library.Library("torchvision", "DEF")
    kept.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    kept.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
absent = [name for name in ("uvloop", "fastapi") if importlib.util.find_spec(name) is None]
for name in absent:  # of the HTTP server; environments for tests lack them
    sys.modules[name] = mock.MagicMock(__spec__=None, EventLoopPolicy=asyncio.DefaultEventLoopPolicy)
if "fastapi" in absent:
    sys.modules["fastapi.responses"] = mock.MagicMock(__spec__=None)
module, builds = sys.argv[1], sys.argv[2] == "1"
importlib.import_module(module)
from sglang.srt.plugins import load_plugins
rss = psutil.Process().memory_info
modules, memory, began = set(sys.modules), rss().rss, time.perf_counter()
load_plugins()
if builds and importlib.util.find_spec("sglang_dsv4.engine.installation"):
    from sglang_dsv4.engine import installation
    landing = installation.install()  # the first pool does this
    assert landing.hooks and not landing.missing()
seconds, grown = time.perf_counter() - began, rss().rss - memory
new = set(sys.modules) - modules
print(json.dumps({"seconds": seconds, "modules": len(new), "mib": grown / 2**20,
                  "engine_modules": sum(name.split(".")[0] == "sglang" for name in new)}))
"""


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The project as of ``commit``, in a folder that goes away."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def measured(code: Path | None, process: str) -> dict[str, float]:
    """One fresh process with the plugin of ``code``; None: without it."""
    module, builds = PROCESSES[process]
    env = {name: value for name, value in os.environ.items() if not name.startswith("DSV4_")}
    env.update(PYTHONPATH=str(code or ROOT), OMP_NUM_THREADS="1", SGLANG_PLUGINS="sglang_dsv4" if code else "none")
    words = [sys.executable, "-W", "ignore", "-c", CHILD, module, str(int(builds and code is not None))]
    done = subprocess.run(words, env=env, cwd=code or ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(codes: dict[str, Path | None], times: int) -> list[dict[str, Any]]:
    """A row a process and a code: the medians."""
    taken: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(times):
        for process in PROCESSES:
            for name in list(codes) if number % 2 else list(reversed(codes)):
                taken.setdefault((process, name), []).append(measured(codes[name], process))
    rows = []
    for (process, name), found in sorted(taken.items()):
        medians = {figure: statistics.median(each[figure] for each in found) for figure in FIGURES}
        rows.append({"process": process, "plugin": name, "processes": len(found),
                     **{figure: round(value, 4) for figure, value in medians.items()}})  # fmt: skip
    return rows


def bounds_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the plugin adds to a process that serves no DeepSeek-V4."""
    by_name = {(row["process"], row["plugin"]): row for row in rows}
    found = []
    for process in ("detokenizer", "scheduler of a Llama"):
        ours, without = by_name[process, "this"], by_name[process, "none"]
        for figure, limit in (("seconds", 0.1), ("modules", 30), ("engine_modules", 0), ("mib", 4)):
            found.append(results.bound(f"{process}: {figure} added", f"<= {limit}", ours[figure] - without[figure]))
    return found


def main() -> int:
    """Exit status 1 when a bound is missed."""
    parser = results.parser(__doc__, "load-plugins")
    parser.add_argument("--before", metavar="COMMIT", help="measure the plugin of that commit too")
    parser.add_argument("--times", type=int, default=5, help="fresh processes for each figure")
    results.add_out(parser, ROOT / "docs" / "results")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        codes: dict[str, Path | None] = {"none": None, "this": ROOT}
        if arguments.before:
            codes["before"] = stack.enter_context(checkout(arguments.before))
        rows = measure(codes, arguments.times)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    bounds = bounds_of(rows)
    return results.finish(arguments, rows, bounds)


if __name__ == "__main__":
    sys.exit(main())
