#!/usr/bin/env python3
"""Times transfers from a prefill to a decode server over NIXL, with stock pools and with page-major ones.

    python3 -m benchmarks.packed_transfer --config CONFIG --layers 43 --no-early-send

One pair of servers for each of --layouts, side by side, asked in turn. *cold*: the prompt is new, and each chunk of its
prefill is sent when it is computed. *warm*: the prefill server has all of it, and sends it at once. With fresh pools,
and with pools that are worn down (packed_in_server.churn), in the order of --pools. The first request of each kind is
compared, page by page on both ends, and not clocked. Without --no-early-send the engine of stock pools sends a chunk
before its forward has written all of it, so that bytes may differ there. Arguments after -- go to the servers. The
result is written after each request; with --seconds it ends with its rows so far. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
import urllib.error
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.client import prompt, write_model
from benchmarks.in_server import environment, read
from benchmarks.packed_in_server import CHURN
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Load, Run

STOCK, PAGE_MAJOR = "stock", "page-major"
FRESH, WORN = "fresh", "worn down"
AT, FASTER = 65536, 10  # tokens of the bound; times, to post a worn-down request of that length
MARGIN = 128  # pages that worn-down pools have free beside the longest request
PORTS_APART = 50
EARLY_SEND = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
IDLE = 20  # looks, half a second apart, until a server is idle and can be flushed
Seen = dict[tuple[str, str, int, str], list[dict[str, float]]]


class Out(Exception):
    """Reports that the time is over."""


@dataclass
class Pair:
    """Runs the servers of one layout, by role, with the files of their notes. room: of its next request."""

    layout: str
    servers: dict[str, servers.Server]
    bootstrap_port: int
    notes: dict[str, Path]
    room: int = 2

    def ask(self, tokens: list[int], timeout: float, *, compared: bool = False, rid: str | None = None) -> float:
        """Sends one request of a few tokens; returns the milliseconds to its first one."""
        self.room += 2
        urls = self.servers["decode"].url, self.servers["prefill"].url
        given = argparse.Namespace(timeout=timeout)
        run = Run(Load([], []), given, *urls, self.room + compared, self.bootstrap_port)
        started = time.monotonic()
        answer = run.ask(tokens, 2, 0, {"rid": rid} if rid else None)
        if answer.outcome != "finished":
            logs = ", ".join(str(server.log) for server in self.servers.values())
            raise servers.ServerDied(f"{self.layout}: {answer.error} (logs: {logs})")
        return (answer.arrived[0][0] - started) * 1e3

    def renew(self) -> None:
        """Makes both servers' pages as fresh; their prefix trees are forgotten."""
        for server in self.servers.values():
            flush(server)

    def wear_down(self, leave: int, timeout: float) -> None:
        """Wears down both servers' pages, as hours of serving would, with ``leave`` of them free."""
        self.renew()
        self.ask([11] * 300, timeout, rid=f"{CHURN}{leave}-{self.layout}-{self.room}")

    def noted(self) -> list[dict[str, Any]]:
        return [line for notes in self.notes.values() for line in read(notes)]


def flush(server: servers.Server) -> None:
    """Empties the server's prefix tree, which has its pages back. Raises ServerDied where it is never idle."""
    for _ in range(IDLE):
        with contextlib.suppress(urllib.error.HTTPError):
            servers.post(server.url, "/flush_cache", {}, 30)
            return
        time.sleep(0.5)
    raise servers.ServerDied(f"the {server.role} server is never idle: {server.log}")


@contextlib.contextmanager
def pairs_up(arguments: argparse.Namespace, model: Path) -> Iterator[list[Pair]]:
    """Starts a pair for each of ``--layouts``; all end with the block. Raises ServerDied."""
    started: list[Pair] = []
    try:
        for number, layout in enumerate(arguments.layouts):
            pair = Pair(layout, {}, servers.BOOTSTRAP_PORT + PORTS_APART * number, {})
            started.append(pair)
            for role, device in zip(("prefill", "decode"), arguments.devices, strict=True):
                launch(pair, role, device, PORTS_APART * number, arguments, model)
        servers.wait_until_up([server for pair in started for server in pair.servers.values()], arguments.patience)
        yield started
    finally:
        for server in (server for pair in started for server in pair.servers.values()):
            server.kill()


def launch(pair: Pair, role: str, device: int, apart: int, arguments: argparse.Namespace, model: Path) -> None:
    """Starts one server of ``pair``, with small graphs, which start fast."""
    folder = arguments.logs / arguments.name / pair.layout
    pair.notes[role] = folder / f"{role}.jsonl"
    variables = {
        **environment("benchmarks.packed_in_server", pair.notes[role]), "SGLANG_HOST_IP": "127.0.0.1",
        "DSV4_LAYOUT": pair.layout, "DSV4_HOST_GB": "1", **({EARLY_SEND: "0"} if arguments.no_early_send else {}),
    }  # fmt: skip
    given = [
        "--context-length", str(max(arguments.tokens) + 1024), "--max-total-tokens", str(arguments.pool_tokens),
        "--max-running-requests", "4", "--cuda-graph-max-bs-decode", "4", "--mem-fraction-static", "0.9",
        "--base-gpu-id", str(device), "--disaggregation-bootstrap-port", str(pair.bootstrap_port), *arguments.server,
    ]  # fmt: skip
    pair.servers[role] = servers.launch(role, str(model), given, variables, folder, "nixl", apart)


class Measurement:
    """Makes the requests of a run; ``seen`` by layout, state of the pools, tokens and way."""

    def __init__(self, arguments: argparse.Namespace, pairs: list[Any], vocabulary: int) -> None:
        self.arguments, self.pairs, self.vocabulary = arguments, pairs, vocabulary
        self.seen: Seen = defaultdict(list)
        self.seed, self.state = 0, FRESH
        self.until = time.monotonic() + arguments.seconds

    def run(self) -> None:
        """Measures everything, or as much as time allows, each kind of request once before any again."""
        states, rounds = list(self.arguments.pools), range(self.arguments.repeats + 1)
        try:
            for numbers in (rounds[:2], rounds[2:]):
                for state in states if numbers else ():
                    self.bring_to(state)
                    for tokens in self.arguments.tokens:
                        self.measure(state, tokens, numbers)
                states.reverse()  # the pools are as the last one wants them
        except Out:
            print(f"  after {self.arguments.seconds:.0f} s: the rest is left out", flush=True)

    def bring_to(self, state: str) -> None:
        """Brings all pools to a state, unless they are in it."""
        if state == self.state:
            return
        self.state = state
        for pair in self.pairs:
            if state == WORN:
                pair.wear_down(max(self.arguments.tokens) // 256 + MARGIN, self.arguments.timeout)
            else:
                pair.renew()

    def measure(self, state: str, tokens: int, numbers: Sequence[int]) -> None:
        """Measures every pair in turn; round number 0 is compared."""
        for number in numbers:
            turn = number % len(self.pairs)
            for pair in [*self.pairs[turn:], *self.pairs[:turn]]:
                if time.monotonic() > self.until:
                    raise Out
                self.one(pair, state, tokens, compared=not number)
                report(self)

    def one(self, pair: Any, state: str, tokens: int, compared: bool) -> None:
        """Sends a prompt that is new, then again as often as asked."""
        self.seed += 1
        asked = prompt(tokens, self.seed, self.vocabulary)
        for again in range(1 if compared else 1 + self.arguments.warm):
            first_ms = pair.ask(asked, self.arguments.timeout, compared=compared)
            sends = [line for line in pair.noted() if line.get("room") == pair.room and line.get("kv")]
            if sends and not compared:  # else its transfer was not clocked
                way = "warm" if again else "cold"
                self.seen[pair.layout, state, tokens, way].append(total(sends) | {"first_token_ms": first_ms})


def total(sends: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the totals of all transfers of one request's history. posting: until all is described and posted."""
    return {
        "sends": len(sends),
        "descriptors": sum(line["descriptors"] for line in sends),
        "pieces": sum(line["pieces"] for line in sends),
        "posting_ms": sum(line["build_ms"] + line["post_ms"] for line in sends),
        "transfer_ms": sum(line["wire_ms"] for line in sends),
    }


def rows_of(seen: Seen) -> list[dict[str, Any]]:
    """Returns medians, one row a kind of request."""
    return [
        {"layout": layout, "pools": state, "tokens": tokens, "way": way, "requests": len(found)}
        | {name: statistics.median(one[name] for one in found) for name in found[0]}
        for (layout, state, tokens, way), found in seen.items()
    ]


def compared(pair: Any) -> dict[str, Any]:
    """Returns the row of a pair: requests compared on both ends, and those that differ."""
    sides: dict[str, dict[int, str]] = {"sent": {}, "arrived": {}}
    for line in pair.noted():
        if "side" in line:
            sides[line["side"]][line["room"]] = line["checksum"]
    both = sides["sent"].keys() & sides["arrived"].keys()
    different = sum(sides["sent"][room] != sides["arrived"][room] for room in both)
    return {"layout": pair.layout, "compared": len(both), "different": different}


def judge(rows: list[dict[str, Any]], checked: list[dict[str, Any]], arguments: argparse.Namespace) -> list[Any]:
    """Returns the bounds: bytes equal, nothing left out, a worn-down 64K request posted faster than with stock."""
    kinds = len(arguments.pools) * len(arguments.tokens)
    asked = len(checked) * kinds * (1 + bool(arguments.warm)) * bool(arguments.repeats)
    bounds = [results.bound("kinds of requests that were not clocked", "<= 0", asked - len(rows))]
    for row in checked:
        bounds += [
            results.bound(f"{row['layout']}: requests compared on both ends", f">= {kinds}", row["compared"]),
            results.bound(f"{row['layout']}: requests whose bytes differ", "<= 0", row["different"]),
        ]
    at = {(row["layout"], row["way"]): row for row in rows if row["pools"] == WORN and row["tokens"] == AT}
    for way in ("warm", "cold"):
        if (STOCK, way) in at and (PAGE_MAJOR, way) in at:
            faster = at[STOCK, way]["posting_ms"] / at[PAGE_MAJOR, way]["posting_ms"]
            bounds.append(results.bound(f"posting 64K, worn down, {way}: stock / page-major", f">= {FASTER}", faster))
    return bounds


def report(measurement: Measurement) -> list[dict[str, Any]]:
    """Writes the result so far; returns its bounds."""
    arguments, rows = measurement.arguments, rows_of(measurement.seen)
    checked = [compared(pair) for pair in measurement.pairs]
    bounds = judge(rows, checked, arguments)
    results.show(rows[-1:])
    results.write(arguments.name, [*rows, *checked], bounds, arguments.out)
    return bounds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line; the arguments behind ``--`` are for the servers."""
    parser = results.parser(__doc__, "packed-transfer")
    parser.add_argument("--config", type=Path, required=True, help="config.json of the model")
    parser.add_argument("--experts", type=int, default=8, help="routed experts, so that all servers fit the card")
    parser.add_argument("--layers", type=int, help="as many layers, with the config's ratios in turn")
    parser.add_argument("--layouts", nargs="+", choices=(STOCK, PAGE_MAJOR), default=(STOCK, PAGE_MAJOR))
    parser.add_argument("--devices", type=int, nargs=2, default=(0, 0), help="of the prefill and the decode servers")
    parser.add_argument("--pools", nargs="+", choices=(FRESH, WORN), default=(WORN, FRESH), help="in this order")
    parser.add_argument("--tokens", type=int, nargs="+", default=(65536, 4096), help="multiples of 256")
    parser.add_argument("--pool-tokens", type=int, default=1 << 20, help="of each server")
    parser.add_argument("--repeats", type=int, default=2, help="new prompts that are clocked")
    parser.add_argument("--warm", type=int, default=3, help="times that each is sent again")
    parser.add_argument("--seconds", type=float, default=110, help="of measuring, when all servers are up")
    parser.add_argument("--patience", type=float, default=420, help="seconds for the servers to come up")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one request; the first ones compile")
    parser.add_argument("--no-early-send", action="store_true", help="send a chunk when its forward has ended")
    arguments = servers.parse(parser, argv)
    if any(tokens % 256 for tokens in arguments.tokens):
        parser.error("--tokens: multiples of 256, so that a decode step writes to no page that is compared")
    return arguments


def main() -> int:
    arguments = parse()
    servers.end_when_told()
    model, facts = write_model(arguments.config, arguments.logs / "model", arguments.experts, arguments.layers)
    with pairs_up(arguments, model) as pairs:
        measurement = Measurement(arguments, pairs, facts["vocab_size"])
        measurement.run()
        bounds = report(measurement)
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
