#!/usr/bin/env python3
"""What a transfer from a prefill to a decode server costs, by how their pages lie.

    python3 -m benchmarks.packed.transfer --config CONFIG --layers 43
    python3 -m benchmarks.packed.transfer --config CONFIG --layers 43 --devices 0 1 --name packed-two-gpus

One pair of servers for each of --layouts, side by side, asked in turn: stock, runs of pages, page-major. *cold*: the
prompt is new, and each chunk of its prefill is sent when it is computed. *warm*: the prefill server has all of it, and
sends it at once. With fresh pools, and with pools that are worn down (timed_transfers.churn), in the order of --pools.
The first request of each kind is compared, page by page on both ends, and not clocked; where it differs, the result
says where, and who changed it (differences). Arguments after -- go to the servers. The result is written after each
request; with --seconds it ends with what it has. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.packed.differences import difference, differs, looks, region_names
from benchmarks.packed.pairs import Pair, ordering, pairs_up, prompt_of
from benchmarks.shapes import write_model
from sglang_dsv4.bench import results
from sglang_dsv4.cli.plan_config import Variant, read_model
from sglang_dsv4.livetest import servers

STOCK, PAGE_MAJOR = "stock", "page-major"
FRESH, WORN = "fresh", "worn down"
AT = 65536  # tokens of the bound
FASTER = 5  # times, to post a worn-down request of that length
MARGIN = 128  # pages that worn-down pools have free beside the longest request
Seen = dict[tuple[str, str, int, str], list[dict[str, float]]]


class Out(Exception):
    """Of time."""


class Measurement:
    """The requests of a run; ``seen`` by layout, state of the pools, tokens and way."""

    def __init__(
        self, arguments: argparse.Namespace, pairs: list[Pair], vocabulary: int, regions: Sequence[str] = ()
    ) -> None:
        self.arguments, self.pairs, self.vocabulary, self.regions = arguments, pairs, vocabulary, regions
        self.seen: Seen = defaultdict(list)
        self.seed = 0
        self.state = FRESH  # of all pools
        self.until = time.monotonic() + arguments.seconds

    def run(self) -> None:
        """Everything, or what there is time for: each kind of request is compared and clocked before one is again."""
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
        """All pools, unless they are in it."""
        if state == self.state:
            return
        self.state = state
        for pair in self.pairs:
            if state == WORN:
                pair.wear_down(max(self.arguments.tokens) // 256 + MARGIN, self.arguments.timeout)
            else:
                pair.renew()

    def measure(self, state: str, tokens: int, numbers: Sequence[int]) -> None:
        """Every pair in turn; round number 0 is compared."""
        for number in numbers:
            turn = number % len(self.pairs)
            for pair in [*self.pairs[turn:], *self.pairs[:turn]]:
                if time.monotonic() > self.until:
                    raise Out
                self.one(pair, state, tokens, compared=not number)
                report(self)

    def one(self, pair: Pair, state: str, tokens: int, compared: bool) -> None:
        """A prompt that is new, then again as often as asked."""
        self.seed += 1
        prompt = prompt_of(tokens, self.seed, self.vocabulary)
        for again in range(1 if compared else 1 + self.arguments.warm):
            _, first_ms = pair.ask(prompt, self.arguments.timeout, compared=compared)
            if not compared:
                sends = [note for note in pair.noted("prefill") if note.get("room") == pair.room and note["kv"]]
                way = "warm" if again else "cold"
                if sends:  # else nobody saw its transfer, and it was not clocked
                    self.seen[pair.layout, state, tokens, way].append(total(sends) | {"first_token_ms": first_ms})


def total(sends: list[dict[str, Any]]) -> dict[str, float]:
    """Of all transfers of one request's history. posting: until all is described and posted."""
    return {
        "sends": len(sends),
        "descriptors": sum(note["descriptors"] for note in sends),
        "pieces": sum(note["pieces"] for note in sends),
        "posting_ms": sum(note["build_ms"] + note["post_ms"] for note in sends),
        "transfer_ms": sum(note["wire_ms"] for note in sends),
    }


def rows_of(seen: Seen) -> list[dict[str, Any]]:
    """Medians, one row a kind of request."""
    return [
        {"layout": layout, "pools": state, "tokens": tokens, "way": way, "requests": len(found)}
        | {name: statistics.median(one[name] for one in found) for name in found[0]}
        for (layout, state, tokens, way), found in seen.items()
    ]


def compared(pairs: list[Pair], regions: Sequence[str]) -> list[dict[str, Any]]:
    """Of each pair: requests that were looked at on both ends, and those that differ."""
    found = []
    for pair in pairs:
        notes = [note for role in pair.notes for note in pair.noted(role)]
        both = looks(notes)
        different = {room: sides for room, sides in both.items() if differs(sides)}
        found.append(
            {"layout": pair.layout, "compared": len(both), "pages": sum(one["sent"]["pages"] for one in both.values()),
             "different": len(different),
             "differences": [difference(room, sides, regions) for room, sides in different.items()],
             "lagged": sum("lagged" in note for note in notes),
             "runs_sent": [sides["sent"]["runs"] for sides in both.values()],
             "runs_arrived": [sides["arrived"]["runs"] for sides in both.values()],
             "transports": pair.transports(), **ordering(notes)}
        )  # fmt: skip
    return found


def judge(
    rows: list[dict[str, Any]], checked: list[dict[str, Any]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Bytes equal, nothing left out, and a worn-down request of 64K is posted so many times faster than with the stock
    layout. Where the card lags and the engine sends early, a layout whose worker does not wait is the control: bytes
    that are equal there, too, say nothing of the one whose worker waits.
    """
    early = arguments.lag and not arguments.no_early_send
    kinds = len(arguments.pools) * len(arguments.tokens)
    asked = len(checked) * kinds * (1 + bool(arguments.warm)) * bool(arguments.repeats)
    bounds = [results.bound("kinds of requests that were not clocked", "<= 0", asked - len(rows))]
    for row in checked:
        bounds.append(results.bound(f"{row['layout']}: requests compared on both ends", f">= {kinds}", row["compared"]))
        if early and row["layout"] != PAGE_MAJOR:
            caught = sum(one.get("written_after_posting", 0) > 0 for one in row["differences"])
            bounds.append(results.bound(f"{row['layout']}: requests sent before they were written", ">= 1", caught))
        else:
            bounds.append(results.bound(f"{row['layout']}: requests whose bytes differ", "<= 0", row["different"]))
        if arguments.lag:
            bounds.append(results.bound(f"{row['layout']}: forwards that lagged", ">= 1", row["lagged"]))
    at = {(row["layout"], row["way"]): row for row in rows if row["pools"] == WORN and row["tokens"] == AT}
    for way in ("warm", "cold"):
        if (STOCK, way) in at and (PAGE_MAJOR, way) in at:
            faster = at[STOCK, way]["posting_ms"] / at[PAGE_MAJOR, way]["posting_ms"]
            bounds.append(results.bound(f"posting 64K, worn down, {way}: stock / {PAGE_MAJOR}", f">= {FASTER}", faster))
    return bounds


def report(measurement: Measurement) -> list[dict[str, Any]]:
    """Write what there is; its bounds."""
    arguments, rows = measurement.arguments, rows_of(measurement.seen)
    checked = compared(measurement.pairs, measurement.regions)
    bounds = judge(rows, checked, arguments)
    path = results.write(arguments.name, [*rows, *checked], bounds, arguments.out)
    note = "; ".join(f"{row['layout']}: {', '.join(row['transports']) or 'transport not said'}" for row in checked)
    results.page(path, "What a transfer between servers costs, by how pages lie", f"UCX: {note}.", table(rows))
    print("\n".join(table(rows)), flush=True)
    return bounds


def table(rows: list[dict[str, Any]]) -> list[str]:
    """As Markdown."""
    names = ("requests", "sends", "descriptors", "pieces", "posting_ms", "transfer_ms", "first_token_ms")
    lines = [f"| pools | tokens | way | layout | {' | '.join(names)} |", f"|{'---|' * (4 + len(names))}"]
    for row in sorted(rows, key=lambda row: (row["pools"], row["tokens"], row["way"])):
        cells = [row["pools"], str(row["tokens"]), row["way"], row["layout"], *(f"{row[name]:.6g}" for name in names)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for the servers."""
    parser = results.parser(__doc__, "packed-transfer")
    parser.add_argument("--config", type=Path, required=True, help="config.json of the model")
    parser.add_argument("--experts", type=int, default=8, help="routed experts, so that all servers fit the card")
    parser.add_argument("--layers", type=int, help="as many layers, with the config's ratios in turn")
    parser.add_argument("--layouts", nargs="+", choices=(STOCK, PAGE_MAJOR), default=(STOCK, PAGE_MAJOR))
    parser.add_argument("--devices", type=int, nargs=2, default=(0, 0), help="of the prefill and the decode servers")
    parser.add_argument("--pools", nargs="+", choices=(FRESH, WORN), default=(FRESH, WORN), help="in this order")
    parser.add_argument("--tokens", type=int, nargs="+", default=(65536, 4096, 131072), help="multiples of 256")
    parser.add_argument("--pool-tokens", type=int, default=1 << 20, help="of each server")
    parser.add_argument("--repeats", type=int, default=2, help="new prompts that are clocked")
    parser.add_argument("--warm", type=int, default=3, help="times that each is sent again")
    parser.add_argument("--seconds", type=float, default=110, help="of measuring, when all servers are up")
    parser.add_argument("--patience", type=float, default=420, help="seconds for the servers to come up")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one request; the first ones compile")
    parser.add_argument(
        "--no-early-send",
        action="store_true",
        help="prefill servers send a chunk when its forward has ended, not before",
    )
    parser.add_argument(
        "--lag", type=float, default=0, help="milliseconds by which the card is behind in each forward of a prefill"
    )
    arguments = servers.parse(parser, argv)
    if any(tokens % 256 for tokens in arguments.tokens):
        parser.error("--tokens: multiples of 256, so that a decode step writes to no page that is compared")
    return arguments


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    model, facts = write_model(arguments.config, arguments.logs / "model", arguments.experts, arguments.layers)
    regions = region_names(read_model(str(model), Variant()).geometry)
    with pairs_up(arguments, model) as pairs:
        measurement = Measurement(arguments, pairs, facts["vocab_size"], regions)
        measurement.run()
        bounds = report(measurement)
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
