#!/usr/bin/env python3
"""Two revisions measured in two runs differ by the machine as much as by the code; here they take turns in one run.

Each revision has a process and a pool of its own on the same card. Only one of them moves bytes at a time, in the order
A B B A, and each turn gives the median of a few saves and loads. The interval is that of the median ratio, by bootstrap
over the turns. The link, a pinned copy of 1 GiB, is measured between the turns.

    git worktree add ../before REVISION
    python3 -m benchmarks.transfer.before_after --before ../before --out docs/results
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from sglang_dsv4.bench import results
from sglang_dsv4.bench.subject import link_limit

ROOT = Path(__file__).resolve().parents[2]
TOKENS = (2047, 16383, 65535, 262143)
WORKER = """
import json, sys
from sglang_dsv4.bench.subject import Subject
from sglang_dsv4.engine.standalone import FLASH_RATIOS, boot, install_hooks
boot(); install_hooks()
device, pages = sys.argv[1], int(sys.argv[2])
subject = Subject(FLASH_RATIOS, pages, device, {}, "auto")
print("ready", flush=True)
for line in sys.stdin:
    tokens, count = map(int, line.split())
    print(json.dumps([subject.live_bytes(tokens), *subject.measure(tokens, count)]), flush=True)
"""


class Revision:
    """One checkout's worker process."""

    def __init__(self, root: Path, device: str, pages: int) -> None:
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", WORKER, device, str(pages)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ, PYTHONPATH=path), cwd=root,
        )  # fmt: skip

    def _line(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("[", "ready")):  # the engine's imports print too
                return line
        sys.exit(f"a worker ended with status {self._process.wait()}")

    def wait_ready(self) -> None:
        """Return when the pool is built."""
        self._line()

    def turn(self, tokens: int, count: int) -> tuple[int, float, float]:
        """(bytes, seconds of a save, seconds of a load), medians of ``count``."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{tokens} {count}\n")
        self._process.stdin.flush()
        nbytes, save, load = json.loads(self._line())
        return nbytes, save, load

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def interval(before: list[float], after: list[float]) -> tuple[float, float, float]:
    """Median of before / after over pairs of turns (above 1: the new one is faster), and its 99% bootstrap interval."""
    ratios = [b / a for b, a in zip(before, after, strict=True)]
    draws = random.Random(1)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(4000))
    tail = len(medians) // 200
    return statistics.median(ratios), medians[tail], medians[-tail - 1]


def measure(before: Revision, after: Revision, tokens: int, turns: int, count: int, link: Any) -> dict[str, Any]:
    """One row: both revisions at one length."""
    times: dict[Any, dict[str, list[float]]] = {r: {"save": [], "load": []} for r in (before, after)}
    shares: dict[str, list[float]] = {"save": [], "load": []}
    nbytes = 0
    for number in range(turns):
        limits = link()
        for revision in (before, after) if number % 2 == 0 else (after, before):
            nbytes, save, load = revision.turn(tokens, count)
            times[revision]["save"].append(save)
            times[revision]["load"].append(load)
        for way, limit in zip(("save", "load"), limits, strict=True):
            shares[way].append(nbytes / times[after][way][-1] / limit)
    row: dict[str, Any] = {"tokens": tokens + 1, "bytes": nbytes, "turns": turns}
    for way in ("save", "load"):
        ratio, low, high = interval(times[before][way], times[after][way])
        row |= {
            f"{way}_before_ms": round(statistics.median(times[before][way]) * 1e3, 4),
            f"{way}_after_ms": round(statistics.median(times[after][way]) * 1e3, 4),
            f"{way}_faster": round(ratio, 4), f"{way}_interval": [round(low, 4), round(high, 4)],
            f"{way}_of_link": round(statistics.median(shares[way]), 4),
        }  # fmt: skip
    return row


def main() -> int:
    """Measure, write the result; 1 when a bound is missed."""
    parser = results.parser(__doc__, "transfer-before-after")
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the earlier revision")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--count", type=int, default=5, help="saves and loads a turn")
    parser.add_argument("--device", default="cuda")
    results.add_out(parser)
    arguments = parser.parse_args()
    pages = -(-max(arguments.tokens) // 256) * 5 // 4 + 8
    before, after = (Revision(root.resolve(), arguments.device, pages) for root in (arguments.before, ROOT))
    for revision in (before, after):
        revision.wait_ready()
    rows, bounds = [], []
    for tokens in arguments.tokens:
        turns = max(6, arguments.turns // (4 if tokens > 100_000 else 1))
        row = measure(before, after, tokens, turns, arguments.count, lambda: link_limit(arguments.device))
        rows.append(row)
        print(row, flush=True)
        for way in ("save", "load"):
            low = row[f"{way}_interval"][0]
            bounds.append(results.bound(f"{way} {tokens + 1}, before / after, low end", ">= 0.99", low))
    for revision in (before, after):
        revision.stop()
    return results.finish(arguments, rows, bounds)


if __name__ == "__main__":
    sys.exit(main())
