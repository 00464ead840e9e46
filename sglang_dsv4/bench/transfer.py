"""Times saves and loads of a request against the pinned copy and the peers; prints a table, a last JSON line.

    sglang-dsv4 bench transfer [-- --model flash|pro|v41|tiny --tokens 2047 16383 ...]

End to end: ``get_cpu_copy`` until the bytes are on the host; ``load_cpu_copy`` until the device has them. Pages are
scattered at random, another set each time. Every figure is a ratio to the 1 GiB pinned copy of the same run. On a GPU
each row also tells when the transfer's kernels and copies ran: when the copy engine began, how long it stood still, how
fast it was meanwhile; arena: one long copy from or to the memory that copies lie in. point_load_ms: of a session whose
next turn goes on one token later. point_save_ms: the scheduler's time for the save of ten pages more, when that ends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from sglang_dsv4.bench import results
from sglang_dsv4.bench.peers import engine_kernels, gather, reference
from sglang_dsv4.bench.subject import TURN, Subject, link_limit
from sglang_dsv4.command_line import COUNT, number, to_its_end
from sglang_dsv4.settings import enabled_settings
from sglang_dsv4.testing.standalone import (
    FLASH41_RATIOS,
    FLASH41_SOURCES,
    FLASH_RATIOS,
    PRO_RATIOS,
    TINY_RATIOS,
    boot,
    install_hooks,
)

# Ratios, and the layers that own what others read.
MODELS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "flash": (FLASH_RATIOS, ()), "pro": (PRO_RATIOS, ()), "tiny": (TINY_RATIOS, ()),
    "v41": (FLASH41_RATIOS, FLASH41_SOURCES),
}  # fmt: skip
TOKENS = (1023, 2047, 4095, 8191, 16383, 32767, 65535, 131071, 262143)
ENQUEUED = {2047, 65535}  # lengths whose host time is measured
BOUNDS = {  # share of the link, of a save and of a load
    2047: (">= 0.78", ">= 0.87"), 16383: (">= 0.90", ">= 0.95"),
    65535: (">= 0.96", ">= 0.98"), 262143: (">= 0.98", ">= 0.99"),
}  # fmt: skip
POINT, POINT_BOUND = 65536, "<= 1.1"  # tokens of a session; its load, by that of a request
TURN_BOUND = "<= 0.5"  # ms of the host, for the save of a turn
COLUMNS = (
    f"{'tokens':>8} {'MB':>8} {'save ms':>9} {'GB/s':>6} {'%':>5} {'load ms':>9} {'GB/s':>6} {'%':>5}"
    "  peers (save/load ms)"
)


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = results.parser(__doc__, "transfer", prog="sglang-dsv4 bench transfer")
    parser.add_argument("--model", choices=MODELS, default="flash")
    parser.add_argument("--tokens", type=number(int, 1, 1 << 20), nargs="+", default=TOKENS)
    parser.add_argument("--count", type=COUNT, default=15, help="saves and loads of each length")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    results.add_out(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes the result; returns exit status 1 when a bound is missed."""
    enabled_settings()
    arguments = arguments_of(argv)
    boot()
    install_hooks()
    cuda = arguments.device == "cuda"
    if not cuda:
        print("no CUDA device in use: this is a copy from memory to memory, and says nothing about a link")
    limits = link_limit(arguments.device)
    print(f"limit: save {limits[0] / 1e9:.1f} GB/s, load {limits[1] / 1e9:.1f} GB/s")
    ratios, sources = MODELS[arguments.model]
    pages = -(-(max(arguments.tokens) + TURN) // 256) * 5 // 4 + 8
    subject = Subject(ratios, pages, arguments.device, sources)
    arena = subject.arena_limit()
    print(f"of the arena's memory: save {arena[0] / 1e9:.1f} GB/s, load {arena[1] / 1e9:.1f} GB/s")
    rows: list[dict[str, Any]] = []
    bounds: list[dict[str, Any]] = []
    print(COLUMNS)
    for tokens in arguments.tokens:
        row = measure(subject, tokens, arguments.count, limits, cuda)
        row |= {"save_arena_gbps": arena[0] / 1e9, "load_arena_gbps": arena[1] / 1e9}
        rows.append(row)
        if cuda:
            bounds += [*link_bounds(row, arguments.model), *point_bounds(row)]
        if not sources:
            bounds += peer_bounds(row)
    if cuda and not sources and subject.has_copier:  # what host time and peers cost was asked of V4
        bounds += device_bounds(subject, arguments, rows)
    return results.finish(arguments, rows, bounds)


def link_bounds(row: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """Returns the bounded shares of the link; V4.1's copies are half as large, with none at the ends."""
    tokens = row["tokens"] + 1
    limits = () if model == "v41" and tokens not in (16384, 65536) else BOUNDS.get(row["tokens"], ())
    ways = zip(("save", "load"), limits, strict=False)
    return [results.bound(f"{way} {tokens} of the link", limit, row[f"{way}_of_link"]) for way, limit in ways]


def point_bounds(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the bounds of a session's load and of a turn's save, in the row of its length."""
    if row["tokens"] + 1 != POINT or "point_load_ms" not in row:
        return []
    name = f"load of a session at {POINT}, by a request's"
    return [
        results.bound(name, POINT_BOUND, row["point_load_ms"] / row["load_ms"]),
        results.bound(f"host's time for the save of a turn at {POINT}, ms", TURN_BOUND, row["point_save_ms"]),
    ]


def measure(subject: Subject, tokens: int, count: int, limits: tuple[float, float], cuda: bool) -> dict[str, Any]:
    """Returns one line of the table."""
    nbytes = subject.live_bytes(tokens)
    save, load = subject.measure(tokens, count)
    row: dict[str, Any] = {"tokens": tokens, "bytes": nbytes}
    for way, seconds, limit in (("save", save, limits[0]), ("load", load, limits[1])):
        row |= {
            f"{way}_ms": seconds * 1e3, f"{way}_gbps": nbytes / seconds / 1e9,
            f"{way}_of_link": nbytes / seconds / limit, f"{way}_limit_gbps": limit / 1e9,
        }  # fmt: skip
    point = subject.measure_point(tokens + 1, count)
    if point is not None:
        row |= {"point_load_ms": point[0] * 1e3, "point_save_ms": point[1] * 1e3}
    peers = ""
    if 2047 <= tokens <= 16383:
        found = reference(subject, tokens, 3)
        row |= {"reference_save_ms": found[0] * 1e3, "reference_load_ms": found[1] * 1e3}
        peers += f"  reference {found[0] * 1e3:.1f}/{found[1] * 1e3:.1f}"
    if cuda and tokens <= 65535 and (times := engine_kernels(subject, tokens, 5)):
        paged = subject.page_bytes(tokens)  # they move the pages alone
        row |= {"engine_save_ms": times[0] * 1e3, "engine_load_ms": times[1] * 1e3}
        row |= {"engine_save_gbps": paged / times[0] / 1e9, "engine_load_gbps": paged / times[1] / 1e9}
        peers += f"  engine {times[0] * 1e3:.2f}/{times[1] * 1e3:.2f}"
    print(
        f"{tokens:>8} {nbytes / 1e6:>8.1f} "
        f"{save * 1e3:>9.3f} {row['save_gbps']:>6.1f} {row['save_of_link'] * 100:>5.1f} "
        f"{load * 1e3:>9.3f} {row['load_gbps']:>6.1f} {row['load_of_link'] * 100:>5.1f}{peers}",
        flush=True,
    )
    return row


def peer_bounds(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns ratios to the peers of one line."""
    found = []
    if row["tokens"] == 16383 and "reference_save_ms" in row:
        found.append(results.bound("save 16384 x reference", ">= 15", row["reference_save_ms"] / row["save_ms"]))
        found.append(results.bound("load 16384 x reference", ">= 8", row["reference_load_ms"] / row["load_ms"]))
    if "engine_save_ms" in row and row["tokens"] >= 16383:
        for way in ("save", "load"):
            ratio = row[f"{way}_gbps"] / row[f"engine_{way}_gbps"]
            found.append(results.bound(f"{way} {row['tokens'] + 1} x engine kernels", ">= 1.0", ratio))
    return found


def device_bounds(subject: Subject, arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measures host time until a transfer is enqueued, and the gather."""
    found = []
    by_tokens = {row["tokens"]: row for row in rows}
    for tokens in sorted(ENQUEUED & by_tokens.keys()):
        row = by_tokens[tokens]
        row["save_enqueue_us"], row["load_enqueue_us"] = (seconds * 1e6 for seconds in subject.enqueuing(tokens))
        if tokens == min(ENQUEUED):
            found.append(results.bound("load 2048 enqueued, us", "<= 250", row["load_enqueue_us"]))
        else:
            share = row["load_enqueue_us"] / 1e3 / row["load_ms"]
            found.append(results.bound("load 65536 enqueued, share of the load", "<= 0.10", share))
        print(f"{tokens}: enqueued after us: save {row['save_enqueue_us']:.0f}, load {row['load_enqueue_us']:.0f}")
    if arguments.model == "flash":
        row = gather(arguments.device)
        print("get_k_and_s, 65536 rows:", {key: round(value, 3) for key, value in row.items()})
        found.append(results.bound("get_k_and_s x torch gather", ">= 20", row["x_torch"]))
        found.append(results.bound("get_k_and_s of the device copy", ">= 0.70", row["of_copy"]))
    return found


if __name__ == "__main__":
    sys.exit(to_its_end("sglang-dsv4 bench transfer", main))
