"""Decode metadata inside graphs, this package's kernel against the engine's: every field, kernels, time, memory.

    python3 -m benchmarks.prep.run --graph [--contexts 65536 1048576] [--batches 1 8 32 128]

Needs a GPU and the stock engine; no server. Both ways are captured with the engine's own raw inputs and replayed with
other lengths, slots and tables. Writes graph-fields, then graph-metadata, anew after each graph: a run that is cut off
has what it has. All take about 110 s on an H200. The time is that of one build among several in one graph, on random
requests of up to 8192 tokens: what a table of the model's context costs a batch that does not fill it.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_dsv4.bench import results
from sglang_dsv4.bench.stepping.fields import LONGEST
from sglang_dsv4.bench.stepping.graphs import compare_in_graph, graph_times
from sglang_dsv4.bench.stepping.report import table
from sglang_dsv4.command_line import SECONDS, file_name, number
from sglang_dsv4.engine.eager_builder import PAGE, Engine, Sizes

QUERIES = (1, 4, 8)  # query tokens a request: no drafts, 3 and 7
WIDE = 1 << 20  # the model's own context
RATIO = "<= 0.25"  # at WIDE
COLUMNS = ("context", "batch", "queries", "engine_kernels", "ours_kernels", "engine_us", "ours_us", "ratio",
           "engine_all_us", "ours_all_us", "all_ratio", "engine_bytes", "ours_bytes")  # fmt: skip

Rows = list[dict[str, Any]]


def judge_fields(rows: Rows) -> Rows:
    """Every field equal in every batch of every graph."""
    return [
        results.bound("fields that differ from the engine's", "<= 0", sum(row["differ"] for row in rows)),
        results.bound("graphs compared", ">= 1", len(rows)),
    ]


def judge_times(rows: Rows) -> Rows:
    """One kernel; no more memory than the engine's; no slower anywhere, and the asked share at the model's context."""
    bounds = [
        results.bound("ours: kernels, worst", "<= 1", max(row["ours_kernels"] for row in rows)),
        results.bound("memory, ours / engine, worst", "<= 1.0", max(r["ours_bytes"] / r["engine_bytes"] for r in rows)),
    ]
    for context in sorted({row["context"] for row in rows}):
        worst = max(row["ratio"] for row in rows if row["context"] == context)
        limit = RATIO if context == WIDE else "<= 1.0"
        bounds.append(results.bound(f"time at a context of {context}, ours / engine, worst", limit, worst))
    return bounds


def engine_of(context: int, queries: int, batches: Sequence[int]) -> Engine:
    """Pools for the largest batch, and for one request as long as the table is wide."""
    largest = max(*batches, 32)
    pages = (largest + 1) * (-(-LONGEST // PAGE) + 1) + -(-context // PAGE)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Engine(Sizes(largest, queries, context, pages, device))


def in_time(
    arguments: argparse.Namespace,
    row_of: Callable[[Engine, int], dict[str, Any]],
    write: Callable[[Rows, dict[str, Any]], int],
) -> int:
    """Give ``write`` the rows so far, one a graph, and the bound on those left out, after each graph; its last status.

    The widest context comes first. None but the first graph is begun too late.
    """
    rows: Rows = []
    status = 0
    kinds = [(context, queries) for context in sorted(arguments.contexts, reverse=True) for queries in QUERIES]
    for context, queries in kinds:
        engine = None
        for batch in arguments.batches:
            if rows and time.monotonic() > arguments.until:
                return status
            if engine is None:
                engine = engine_of(context, queries, arguments.batches)
            rows.append({"context": context, "batch": batch, "queries": queries, **row_of(engine, batch)})
            left_out = len(kinds) * len(arguments.batches) - len(rows)
            status = write(rows, results.bound("graphs left out for lack of time", "<= 0", left_out))
        del engine
        gc.collect()
    return status


def fields(arguments: argparse.Namespace) -> int:
    """The comparison; the exit status."""

    def compare(engine: Engine, batch: int) -> dict[str, Any]:
        faults, compared = compare_in_graph(engine, batch)
        print("\n".join(faults[:10]), end="\n" if faults else "", flush=True)
        return {"batches": compared, "differ": len(faults)}

    def write(rows: Rows, left_out: dict[str, Any]) -> int:
        bounds = [*judge_fields(rows), left_out]
        path = results.write(f"graph-fields{arguments.suffix}", rows, bounds, arguments.out)
        results.page(path, "Metadata in graphs: every field against the engine's", "", table(rows))
        return results.status(bounds)

    return in_time(arguments, compare, write)


def times(arguments: argparse.Namespace) -> int:
    """The measurement; the exit status."""

    def measure(engine: Engine, batch: int) -> dict[str, Any]:
        return graph_times(engine, batch, arguments.repeats)

    def write(rows: Rows, left_out: dict[str, Any]) -> int:
        bounds = [*judge_times(rows), left_out]
        results.show(rows[-1:])
        path = results.write(f"graph-metadata{arguments.suffix}", rows, bounds, arguments.out)
        note = "Microseconds and bytes of one build in a graph. all: with the planners of DeepGEMM and top-k."
        lines = table([{name: row[name] for name in COLUMNS} for row in rows])
        results.page(path, "Metadata in graphs: the engine's kernels and this package's", note, lines)
        return results.status(bounds)

    return in_time(arguments, measure, write)


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 when a bound is missed, 3 without a GPU."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return 3
    began = time.monotonic()
    arguments.until = began + arguments.seconds / 2
    status = fields(arguments)
    arguments.until = began + arguments.seconds
    return max(status, times(arguments))


def suffix(text: str) -> str:
    """The type of an argument: the end of a file's name."""
    return file_name(f"graph{text}").removeprefix("graph")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``--graph``."""
    parser.add_argument("--graph", action="store_true", help="inside graphs: writes graph-fields and graph-metadata")
    context = number(int, LONGEST + max(QUERIES), 1 << 22)
    parser.add_argument("--contexts", type=context, nargs="+", default=(65536, WIDE), help="of --graph")
    parser.add_argument("--suffix", type=suffix, default="", help="of the names of the results of --graph")
    parser.add_argument("--seconds", type=SECONDS, default=200, help="of --graph: begin no graph after that long")
