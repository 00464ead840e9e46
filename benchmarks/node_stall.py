#!/usr/bin/env python3
"""Times the scheduler's thread during a retract, in a live server.

    python3 -m benchmarks.node_stall --config CONFIG --layers 43

A decode server with this package (fake transfer) retracts the longer of two requests again and again. *Own* is all that
this package does on the thread from the retract to the load: the save, the stream's wait, the question whether the
request was right, waits for pages. ``--layers`` stretches a small config to the cache of a large model.
Arguments after -- go to the server. The result is written after each request. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import client
from benchmarks.in_server import around, note, read
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers

OWN = ("save", "order", "settle", "pages")
PARTS = (*OWN, "load")
MOST_OWN, LEAST_SEEN = 1.0, 40


def install(notes: Path) -> None:
    """Notes each retract in this process when its request is loaded: its tokens, and milliseconds by part.

    order, settle, pages: the stream's wait, the question whether the request was right, the wait before a transfer.
    A part within the save or the load is not counted twice.
    """
    from sglang_dsv4.pools.copy_service import CopyService  # noqa: PLC0415 - in the server alone, as all below
    from sglang_dsv4.pools.token_to_kv import TokenToKVPool  # noqa: PLC0415
    from sglang_dsv4.transfer.pages_in_use import PagesInUse  # noqa: PLC0415

    retract: dict[str, Any] = {}
    within: list[str] = []

    def timed(part: str) -> Callable[..., Any]:
        def hook(original: Any, *args: Any, **kwargs: Any) -> Any:
            if part == "save":
                retract.clear()
            started = time.perf_counter()
            within.append(part)
            try:
                found = original(*args, **kwargs)
            finally:
                within.pop()
            if not within:
                retract[part] = retract.get(part, 0.0) + (time.perf_counter() - started) * 1e3
            if part == "load":
                note(notes, tokens=args[1].tokens, **retract)
                retract.clear()
            return found

        return hook

    for owner, name, part in (
        (TokenToKVPool, "get_cpu_copy", "save"), (PagesInUse, "wait_on_the_stream", "order"),
        (CopyService, "check_search", "settle"), (PagesInUse, "wait", "pages"), (CopyService, "load", "load"),
    ):  # fmt: skip
        around(owner, name, timed(part))


def summarise(notes: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Returns one row of the retracts of at least ``tokens`` tokens, or none."""
    mine = [found for found in notes if found["tokens"] >= tokens and "save" in found]
    if not mine:
        return []
    own = sorted(sum(found.get(part, 0.0) for part in OWN) for found in mine)
    row = {"tokens": tokens, "retracts": len(mine), "own_ms": statistics.median(own),
           "own_ms_99": own[max(0, -(-len(own) * 99 // 100) - 1)], "own_ms_worst": own[-1]}  # fmt: skip
    return [row | {f"{part}_ms": statistics.median(found.get(part, 0.0) for found in mine) for part in PARTS}]


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the bounds: enough retracts, and at most a millisecond of its own."""
    bounds = [results.bound("retracts", f">= {LEAST_SEEN}", sum(row["retracts"] for row in rows))]
    for row in rows:
        bounds += [
            results.bound("own time of a retract, ms, median", f"<= {MOST_OWN}", row["own_ms"]),
            results.bound("own time of a retract, ms, 99 of 100", f"<= {MOST_OWN}", row["own_ms_99"]),
        ]
    return bounds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = client.parser(__doc__, "node-stall", (65536,), 12)
    parser.set_defaults(new_tokens=500)
    return servers.parse(parser, argv)


def main() -> int:
    arguments, bounds = parse(), list[dict[str, Any]]()
    servers.end_when_told()
    tokens = max(arguments.tokens)
    with client.retracting("decode", "benchmarks.node_stall", [], {}, arguments) as (asked, notes):
        warm = 0
        for number in range(arguments.repeats + 1):
            asked.generate(tokens, arguments.new_tokens)
            if not number:
                warm = len(read(notes))  # the first one compiles
                continue
            rows = summarise(read(notes)[warm:], tokens)
            results.show(rows)
            bounds = judge(rows)
            results.write(arguments.name, rows, bounds, arguments.out)
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
