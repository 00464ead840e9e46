#!/usr/bin/env python3
"""What the scheduler's thread spends on a retract, with the waits on the host and without, in one live server.

    python3 -m benchmarks.stall.run --config CONFIG --layers 43 --tokens 65536

A decode server with this package, fake transfer and forced retracts: the longer of two requests is retracted again and
again, and every other of its retracts waits as all did once (timed_retracts). *Own* is all that this package does on
the thread from the retract to the load: the save, its order, its question, waits for pages. Arguments after -- go to
the server. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.resume.run import KEEPER, Client, lines, room
from benchmarks.shapes import write_model
from benchmarks.stall.timed_retracts.switch import FILE
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers

CHECKOUT = Path(__file__).resolve().parents[2]
EDGES = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)  # milliseconds, of the histogram
OWN = ("save", "order", "settle", "pages")
PARTS = ("locate", "enqueue", "copy", "forward", "order", "settle", "pages", "load", "gap", "step")
MOST_OWN, LEAST_SEEN = 1.0, 20
WAYS = {True: "waits on the host", False: "enqueued"}


def own(note: dict[str, Any]) -> float:
    """Milliseconds of the scheduler's thread."""
    return sum(note.get(part, 0.0) for part in OWN)


def summarise(notes: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """One row a way: of the retracts of at least ``tokens`` tokens."""
    rows = []
    for waits, way in WAYS.items():
        mine = [note for note in notes if note["waits"] is waits and note["tokens"] >= tokens]
        if not mine:
            continue
        times = sorted(own(note) for note in mine)
        row = {"way": way, "tokens": tokens, "retracts": len(mine), "own_ms": statistics.median(times),
               "own_ms_99": times[max(0, -(-len(times) * 99 // 100) - 1)], "own_ms_worst": times[-1]}  # fmt: skip
        for part in PARTS:
            found = [note[part] for note in mine if note.get(part) is not None]
            row[f"{part}_ms"] = statistics.median(found) if found else 0.0
        rows.append(row | {"histogram": histogram(times)})
    return rows


def histogram(times: list[float]) -> dict[str, int]:
    """How many are below each edge and not below the one before."""
    bounds = [0.0, *EDGES, float("inf")]
    return {
        f"< {high:g}" if high != bounds[-1] else f">= {low:g}": sum(low <= one < high for one in times)
        for low, high in itertools.pairwise(bounds)
    }


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Enough of each way, and at most a millisecond of its own."""
    seen = {row["way"]: row for row in rows}
    bounds = [
        results.bound(f"retracts, {way}", f">= {LEAST_SEEN}", seen[way]["retracts"] if way in seen else 0)
        for way in WAYS.values()
    ]
    after = seen.get(WAYS[False])
    if after is not None:
        bounds += [
            results.bound("own time of a retract, ms, median", f"<= {MOST_OWN}", after["own_ms"]),
            results.bound("own time of a retract, ms, 99 of 100", f"<= {MOST_OWN}", after["own_ms_99"]),
        ]
    return bounds


def report(arguments: argparse.Namespace, notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write what there is; the bounds."""
    rows = summarise(notes, arguments.tokens)
    bounds = judge(rows)
    path = results.write(arguments.name, rows, bounds, arguments.out)
    results.page(path, "What a retract costs the scheduler's thread", "", table(rows))
    print("\n".join(table(rows)), flush=True)
    return bounds


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The parts, then the histogram."""
    if not rows:
        return ["no retract was seen"]
    names = ("retracts", "own_ms", "own_ms_99", "own_ms_worst", *(f"{part}_ms" for part in PARTS))
    found = [f"| median, ms | {' | '.join(row['way'] for row in rows)} |", f"|---|{'---|' * len(rows)}"]
    found += [f"| {name} | {' | '.join(f'{row[name]:.3g}' for row in rows)} |" for name in names]
    found += ["", f"| own time, ms | {' | '.join(row['way'] for row in rows)} |", f"|---|{'---|' * len(rows)}"]
    found += [
        f"| {edge} | {' | '.join(str(row['histogram'][edge]) for row in rows)} |" for edge in rows[0]["histogram"]
    ]
    return found


def measure(arguments: argparse.Namespace, model: Path, vocabulary: int) -> list[dict[str, Any]]:
    """Start the server and retract; the bounds of the last report."""
    folder = arguments.logs / arguments.name
    folder.mkdir(parents=True, exist_ok=True)
    out = folder.resolve() / "retracts.jsonl"
    out.unlink(missing_ok=True)
    environment = {
        **servers.model_package("benchmarks.stall.timed_retracts", CHECKOUT), FILE: str(out),
        **servers.forced_retracts(arguments.interval),
    }  # fmt: skip
    space = room(argparse.Namespace(tokens=[arguments.tokens]))
    server = servers.launch("decode", str(model), [*space, *arguments.server], environment, folder)
    bounds: list[dict[str, Any]] = []
    try:
        servers.wait_until_up([server], arguments.patience)
        client, stop = Client(server.url, vocabulary), threading.Event()
        keeper = threading.Thread(target=client.generate, args=(KEEPER, 1 << 14, stop))
        keeper.start()
        time.sleep(2)
        for number in range(arguments.rounds + 1):
            client.generate(arguments.tokens, arguments.new_tokens)
            if not number:
                warm = len(lines(out))  # the first one compiles
                continue
            bounds = report(arguments, lines(out)[warm:])
        stop.set()
        keeper.join()
    finally:
        server.stop()
    return bounds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for the server."""
    parser = results.parser(__doc__, "node-stall")
    parser.add_argument("--config", type=Path, required=True, help="config.json of the model")
    parser.add_argument("--experts", type=int, help="routed experts that fit the card")
    parser.add_argument("--layers", type=int, help="as many layers, with the config's ratios in turn")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=3, help="requests, after one to warm up")
    parser.add_argument("--new-tokens", type=int, default=500)
    parser.add_argument("--interval", type=int, default=12, help="forward steps between forced retracts")
    parser.add_argument("--patience", type=float, default=420)
    return servers.parse(parser, argv)


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    model, facts = write_model(arguments.config, arguments.logs / "model", arguments.experts, arguments.layers)
    bounds = measure(arguments, model, facts["vocab_size"])
    return results.status(bounds) if bounds else 1


if __name__ == "__main__":
    sys.exit(main())
