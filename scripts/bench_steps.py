#!/usr/bin/env python3
"""A decode step with this package's hooks against the same step without them, in turn in one running server.

    python3 scripts/bench_steps.py --model-path MODEL [--batches 1 4 16] [--rounds 2] [--fours 40]
    python3 scripts/bench_steps.py --model-path MODEL --prep stream -- --disable-cuda-graph

``bench_decode.py`` compares two servers, and two starts of the same server differ by several percent. Here one server
takes its hooks out and puts them back every few steps (scripts/alternating). A four of such blocks gives one ratio: the
time of its two blocks without, by that of its two blocks with; above 1, the package is faster. What else the package
changes in a server (the pools' subclasses, a pinned arena) is on both sides. No request is ever retracted.

Each round is one start, all up at once, suspended but for the one that is measured. The interval is that of the median
four (bootstrap: fours are drawn within their round).
Arguments after -- go to the server.
Exit status 1 on a lost request, or where a step may be more than 1 % slower, or the interval is too wide to tell.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import results
from alternating.switch import FILE, SEED, SETTLING, STEPS
from bench_decode import PORTS_APART, check_kind, load_of
from decode_pairs import CONFIDENCE, DRAWS, RESOLUTION, SLOW

from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Run
from sglang_dsv4.livetest.retract_stats import read_log

MARGIN = 0.99  # of stock's speed: less than this, and a step is slower
BLOCKS = 4  # of a four
SPARE = 1  # fours that a ramp, or a request that joins late, may cost


@dataclass(frozen=True)
class Block:
    """Some steps of one server, with the hooks or without."""

    round: int
    four: int
    batch: int
    hooked: bool
    as_meant: bool
    prepared: int
    ns: tuple[int, ...]


def whole_fours(blocks: Sequence[Block], batch: int) -> dict[int, list[list[Block]]]:
    """The fours of ``batch`` that were not cut off, by round."""
    fours: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for block in blocks:
        if block.batch == batch:
            fours[block.round, block.four].append(block)
    found: dict[int, list[list[Block]]] = defaultdict(list)
    for (round_, _), four in sorted(fours.items()):
        if len(four) == BLOCKS:
            found[round_].append(four)
    return dict(found)


def ratio_of(four: Sequence[Block]) -> float:
    """Time without the hooks / time with them."""
    without, with_ = (sum(sum(block.ns) for block in four if block.hooked is hooked) for hooked in (False, True))
    return without / with_


def interval(ratios: Sequence[Sequence[float]], seed: int) -> tuple[float, float, float]:
    """(median, low, high) over the fours of every round."""
    draw = np.random.default_rng(seed)
    drawn = np.concatenate([np.array(r)[draw.integers(len(r), size=(DRAWS, len(r)))] for r in ratios], axis=1)
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(np.median(drawn, axis=1), [tail, 100 - tail])
    return float(np.median(np.concatenate(ratios))), float(low), float(high)


def summarise(blocks: Sequence[Block], batches: Sequence[int]) -> list[dict[str, Any]]:
    """One row a batch. slow: steps of SLOW times the fastest quarter's time, which a median does not show."""
    rows = []
    for batch in batches:
        rounds = whole_fours(blocks, batch)
        if not rounds:
            raise RuntimeError(f"no whole four of batch {batch}: ask for more --fours, or see the server's log")
        ratios = {round_: [ratio_of(four) for four in fours] for round_, fours in rounds.items()}
        middle, low, high = interval(list(ratios.values()), batch)
        kept = [block for fours in rounds.values() for four in fours for block in four]
        row: dict[str, Any] = {
            "batch": batch, "fours": sum(map(len, ratios.values())), "ratio": middle, "low": low, "high": high,
            "not_as_meant": sum(not block.as_meant for block in kept),
            "ratio_by_round": {round_: statistics.median(found) for round_, found in ratios.items()},
        }  # fmt: skip
        fast = np.percentile([span for block in kept for span in block.ns], 25)
        for name, hooked in (("without", False), ("with", True)):
            same = [block for block in kept if block.hooked is hooked]
            spans = np.array([span for block in same for span in block.ns])
            row |= {
                f"{name}_steps": len(spans), f"{name}_ms": float(np.median(spans)) / 1e6,
                f"{name}_p99_ms": float(np.percentile(spans, 99)) / 1e6,
                f"{name}_slow": int((spans > SLOW * fast).sum()),
                f"{name}_prepared": sum(block.prepared for block in same), f"{name}_blocks": len(same),
            }  # fmt: skip
        rows.append(row)
    return rows


@dataclass
class Requests:
    """What became of those that should all run undisturbed."""

    lost: int = 0
    retracted: int = 0


def judge(rows: Sequence[dict[str, Any]], requests: Requests, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Nothing lost, not slower, a narrow interval; the builder at work in all steps with the hooks, in none without."""
    bounds = [
        results.bound("requests lost", "<= 0", requests.lost),
        results.bound("requests retracted", "<= 0", requests.retracted),
    ]
    for row in rows:
        where = f"batch {row['batch']}, without / with"
        bounds += [
            results.bound(f"batch {row['batch']}: blocks that ran otherwise than meant", "<= 0", row["not_as_meant"]),
            results.bound(f"{where}, low end", f">= {MARGIN}", row["low"]),
            results.bound(f"{where}, width of the interval", f"<= {RESOLUTION}", row["high"] - row["low"]),
        ]
        if arguments.prep == "stream":
            share = row["with_prepared"] / (row["with_blocks"] * arguments.steps)
            bounds.append(results.bound(f"batch {row['batch']}: steps with the hooks, prepared here", ">= 1.0", share))
        bounds.append(
            results.bound(f"batch {row['batch']}: steps without them, prepared here", "<= 0", row["without_prepared"])
        )
    return bounds


def table_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as Markdown."""
    lines = [
        "| batch | fours | step ms: without, with | without / with (interval) | by start | p99 ms | slow steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            str(row["batch"]),
            str(row["fours"]),
            f"{row['without_ms']:.3f}, {row['with_ms']:.3f}",
            f"{row['ratio']:.4f} ({row['low']:.4f} to {row['high']:.4f})",
            ", ".join(f"{found:.4f}" for found in row["ratio_by_round"].values()),
            f"{row['without_p99_ms']:.2f}, {row['with_p99_ms']:.2f}",
            f"{row['without_slow']}, {row['with_slow']} of {row['with_steps']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def launch(round_: int, arguments: argparse.Namespace) -> tuple[servers.Server, Path]:
    """A server, not yet up, and the file that it writes its blocks to."""
    folder = arguments.logs / f"{arguments.name}-{round_}"
    folder.mkdir(parents=True, exist_ok=True)
    out = folder.resolve() / "blocks.jsonl"
    out.write_text("")
    environment = {
        "SGLANG_HOST_IP": "127.0.0.1", "DSV4_ENABLED": "1",
        **servers.model_package("alternating", Path(__file__).parent),
        FILE: str(out), STEPS: str(arguments.steps), SEED: str(round_),
        **({"DSV4_PREP": arguments.prep} if arguments.prep else {}),
    }  # fmt: skip
    apart = PORTS_APART * round_
    return servers.launch("decode", arguments.model_path, arguments.server, environment, folder, apart=apart), out


def measure(arguments: argparse.Namespace) -> tuple[list[Block], Requests]:
    """The blocks of every round. Raises ServerDied or WrongServer."""
    started = []
    blocks: list[Block] = []
    requests = Requests()
    try:
        started += [launch(round_, arguments) for round_ in range(arguments.rounds)]
        servers.wait_until_up([server for server, _ in started], arguments.patience)
        for server, _ in started:
            check_kind("package", arguments.prep, server.log)
            server.suspend()
        for round_, (server, out) in enumerate(started):
            with server.awake():
                requests.lost += send_all(server, f"start {round_}", arguments)
            said = read_log(server.log)
            requests.retracted += said["saves"] + sum(said["fallbacks"].values())
            lines = [json.loads(line) for line in out.read_text().splitlines()]
            blocks += [Block(round_, **(line | {"ns": tuple(line["ns"])})) for line in lines]
    finally:
        servers.stop_all([server for server, _ in started], patience=0)
    return blocks, requests


def send_all(server: servers.Server, label: str, arguments: argparse.Namespace) -> int:
    """Every batch; how many requests were lost. Raises ServerDied."""
    lost, room = 0, 1
    for batch in arguments.batches:
        client = argparse.Namespace(concurrency=batch, timeout=arguments.timeout)
        run = Run(load_of(batch, arguments), client, server.url, None, room).execute(f"{label}, batch {batch}")
        if run.gone:
            raise servers.ServerDied(f"the server: {server.log}")
        room += batch
        lost += sum(answer.outcome != "finished" for answer in run.answers)
    return lost


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 4, 16), help="requests at once")
    parser.add_argument("--rounds", type=int, default=2, help="starts of the server")
    parser.add_argument("--fours", type=int, default=40, help="for each batch in a round")
    parser.add_argument("--steps", type=int, default=32, help="in a block")
    parser.add_argument("--prep", choices=("stream", "auto"), help="DSV4_PREP of the server")
    parser.add_argument("--prompt", type=int, nargs=2, default=(300, 2000), help="shortest and longest prompt")
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=420, help="seconds for the server to come up")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one request")
    parser.add_argument("--name", default="steps")
    arguments = servers.parse(parser, argv)
    if arguments.steps <= SETTLING or min(arguments.rounds, arguments.fours) < 1:
        parser.error(f"--rounds and --fours start at 1, --steps at {SETTLING + 1}")
    arguments.new_tokens = (arguments.fours + SPARE) * BLOCKS * arguments.steps
    return arguments


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    blocks, requests = measure(arguments)
    rows = summarise(blocks, arguments.batches)
    bounds = judge(rows, requests, arguments)
    lines = table_of(rows)
    print("\n".join(lines))
    path = results.write(arguments.name, rows, bounds, arguments.out)
    results.page(
        path,
        f"Decode steps with the hooks{f' and DSV4_PREP={arguments.prep}' if arguments.prep else ''}, and without",
        f"Hooks in and out every {arguments.steps} steps of one server, the first {SETTLING} not looked at; "
        f"{arguments.rounds} starts; {CONFIDENCE:.0%} intervals of the median four.",
        lines,
    )
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
