"""Compares this package's decode metadata with the engine's, field by field, and times it inside graphs.

    sglang-dsv4 bench prep -- [--contexts 65536 1048576] [--batches 1 8 32 128]

Needs a GPU and the stock engine; no server. The engine's builder is its real backend over real pools. First the eager
steps' metadata is compared, prepared beside the forward and in line. Then both ways are captured into graphs with the
engine's own raw inputs, replayed with other lengths, slots and tables, compared, and timed: one build among several in
one graph, on random requests of up to 8192 tokens. Exit status 1 on a missed bound.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch

from sglang_dsv4.bench import results
from sglang_dsv4.bench.prep_fields import LONGEST, compare
from sglang_dsv4.bench.prep_graphs import compare_in_graph, graph_times
from sglang_dsv4.command_line import COUNT, number, to_its_end
from sglang_dsv4.settings import enabled_settings
from sglang_dsv4.testing.eager_builder import PAGE, Engine, Sizes

EAGER_QUERIES = (1, 2)  # query tokens a request: none or one of them a draft
QUERIES = (1, 4, 8)  # in graphs: no drafts, 3 and 7
WIDE = 1 << 20  # the model's own context
RATIO = "<= 0.25"  # of the engine's time at WIDE

Rows = list[dict[str, Any]]


def judge(rows: Rows) -> Rows:
    """Returns the bounds: every field equal; one kernel, no more memory, no slower anywhere."""
    graphs = [row for row in rows if row["way"] == "graph"]
    bounds = [
        results.bound(f"{way}: fields that differ from the engine's", "<= 0", sum(row["differ"] for row in found))
        for way, found in (("eager steps", [row for row in rows if row["way"] == "eager"]), ("graphs", graphs))
    ]
    memory = max(row["ours_bytes"] / row["engine_bytes"] for row in graphs)
    bounds += [
        results.bound("ours: kernels, worst", "<= 1", max(row["ours_kernels"] for row in graphs)),
        results.bound("memory, ours / engine, worst", "<= 1.0", memory),
    ]
    for context in sorted({row["context"] for row in graphs}):
        worst = max(row["ratio"] for row in graphs if row["context"] == context)
        limit = RATIO if context == WIDE else "<= 1.0"
        bounds.append(results.bound(f"time at a context of {context}, ours / engine, worst", limit, worst))
    return bounds


def engine_of(context: int, queries: int, batches: Sequence[int]) -> Engine:
    """Pools for the largest batch, and for one request as long as the table is wide."""
    largest = max(*batches, 32)
    pages = (largest + 1) * (-(-LONGEST // PAGE) + 1) + -(-context // PAGE)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Engine(Sizes(largest, queries, context, pages, device))


def row_of(faults: list[str], cases: int, **facts: Any) -> dict[str, Any]:
    """Returns a row of a comparison, whose first faults are printed."""
    print("\n".join(faults[:10]), end="\n" if faults else "", flush=True)
    return {**facts, "cases": cases, "differ": len(faults)}


def measure(arguments: argparse.Namespace) -> Rows:
    """Returns a row for each kind of eager step and for each graph, the widest context first."""
    rows: Rows = []
    for queries in EAGER_QUERIES:
        found = compare(engine_of(min(arguments.contexts), queries, arguments.batches))
        rows.append(row_of(*found, way="eager", queries=queries))
    for context in sorted(arguments.contexts, reverse=True):
        for queries in QUERIES:
            engine = engine_of(context, queries, arguments.batches)
            for batch in arguments.batches:
                facts = {"way": "graph", "context": context, "batch": batch, "queries": queries}
                row = row_of(*compare_in_graph(engine, batch), **facts)
                rows.append(row | graph_times(engine, batch, arguments.repeats))
                results.show(rows[-1:])
            del engine
            gc.collect()
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = results.parser(__doc__, "prep", prog="sglang-dsv4 bench prep")
    batch, context = number(int, 1, 4096), number(int, LONGEST + max(QUERIES), 1 << 22)
    parser.add_argument("--batches", type=batch, nargs="+", default=(1, 8, 32, 128), help="requests a step")
    parser.add_argument("--contexts", type=context, nargs="+", default=(65536, WIDE), help="columns of the table")
    parser.add_argument("--repeats", type=COUNT, default=100, help="of each timing, after warm-up")
    results.add_out(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns exit status 1 when a bound is missed, 3 without a GPU."""
    enabled_settings()
    arguments = parse(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return 3
    rows = measure(arguments)
    return results.finish(arguments, rows, judge(rows))


if __name__ == "__main__":
    sys.exit(to_its_end("sglang-dsv4 bench prep", main))
