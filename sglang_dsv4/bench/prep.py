"""Decode metadata, ours against the engine's eager builder: equality, launches, time, a timeline, one JSON line last.

    sglang-dsv4 bench prep -- [--batches 1 8 32 128] [--context 65536]
    sglang-dsv4 bench prep -- --graph      inside graphs, see prep_graph.py

Needs a GPU and the stock engine; no server. The engine's builder is its real backend over real pools (see
engine/eager_builder.py), without the planners of DeepGEMM and top-k, which stay the engine's; their launches are
counted apart. One query a request is a plain decode step; two are a step that verifies one draft token.
Time on the forward stream is taken alone, on an idle device (launches show) and behind other work (device time only),
and in a loop of steps around a stand-in for the forward, where ours is in line, or comes from the prep stream: behind
the previous forward, as where the engine's barrier is in force, and beside it. Exit status 1 on a missed bound;
where a field differs, before anything is measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sglang_dsv4.bench import prep_graph, results
from sglang_dsv4.bench.stepping import trace
from sglang_dsv4.bench.stepping.fields import LONGEST, compare, random_lengths
from sglang_dsv4.bench.stepping.measure import counts, loop, plan_times, times
from sglang_dsv4.bench.stepping.report import ALONE, LOOP, columns
from sglang_dsv4.bench.stepping.steps import WARM_UP, Forward
from sglang_dsv4.command_line import COUNT, number, to_its_end
from sglang_dsv4.engine.eager_builder import PAGE, Engine, Sizes

QUERIES = (1, 2)  # query tokens a request: none or one of them a draft
PICTURED = range(8, 12)  # steps of a loop that the timeline shows
RATIO = "<= 0.3334"
PREPARED = {
    "behind": "prepared behind the previous forward",
    "beside": "prepared beside the previous forward",
    "in_line": "prepared in line",
}

Rows = list[dict[str, Any]]


def timeline(engine: Engine, lengths: Any, forward: Forward) -> Rows:
    """Measured spans of a few steps: on the CPU and on each stream, with the engine's builder and with ours."""
    batch = engine.place(lengths)
    rows = []
    for way in ("engine", "behind", "beside"):
        steady = loop(engine, batch, forward, way)
        steady.run(3)
        traced = trace.record(functools.partial(steady.run, PICTURED.stop - WARM_UP, named=True))
        spans = trace.spans(*traced, PICTURED)
        rows.append({"timeline": way, "batch": len(lengths), "queries": engine.sizes.queries, "spans": spans})
    return rows


def judge(faults: int, counted: Rows, timed: Rows, planned: Rows) -> Rows:
    """Every figure that is asked for."""
    bounds = [results.bound("fields that differ from the engine's", "<= 0", faults)]
    for row in counted:
        if row["builder"].startswith("ours"):
            where = f"{row['builder']}, batch {row['batch']}, {row['queries']} a request"
            bounds += [
                results.bound(f"{where}: kernels", "<= 2", row["kernels"] + row["other"]),
                results.bound(f"{where}: copies from the host", "<= 1", row["uploads"]),
                results.bound(f"{where}: static bytes uploaded", "<= 0", abs(row["static_bytes"])),
            ]
    for queries in sorted({row["queries"] for row in timed}):
        rows = [row for row in timed if row["queries"] == queries]
        batches = ", ".join(str(row["batch"]) for row in rows)
        # Verified lengths are known on the device alone, and their step is prepared in line.
        for way in ("behind", "beside") if queries == 1 else ("in_line",):
            worst = max(row[f"{way}_metadata_us"] / row["engine_metadata_us"] for row in rows)
            what = f"forward stream, {PREPARED[way]} / engine"
            bounds.append(results.bound(f"{what}, {queries} a request, worst of batches {batches}", RATIO, worst))
    for row in planned:
        what = f"plan on the CPU, batch {row['batch']}, {row['queries']} a request, us"
        bounds.append(results.bound(what, "<= 100", row["plan_us"]))
    return bounds


def show(title: str, rows: Rows) -> None:
    """Rows of equal keys as a table."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=200).print(table)


def write_report(result: Path, pictured: Rows) -> None:
    """The page and the picture beside ``result``. The spans are for the picture alone, and are not kept."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as spans:
        json.dump(pictured, spans)
        spans.flush()
        # In a process of its own: the engine may have imported modules that change what matplotlib does.
        subprocess.run([sys.executable, "-m", "sglang_dsv4.bench.stepping.report", result, spans.name], check=True)


def parse(argv: Sequence[str] | None = None, out: Path = results.DEFAULT_FOLDER) -> argparse.Namespace:
    """The command line; ``out``: the folder of the results where none is named."""
    parser = results.parser(__doc__, "prep", prog="sglang-dsv4 bench prep")
    batch, context = number(int, 1, 4096), number(int, 1, 1 << 22)
    parser.add_argument("--batches", type=batch, nargs="+", default=(1, 8, 32, 128), help="requests a step")
    parser.add_argument("--context", type=context, default=65536, help="columns of the engine's request table")
    parser.add_argument("--repeats", type=COUNT, default=100, help="of each timing, after warm-up")
    parser.add_argument("--forward-kernels", type=COUNT, default=150, help="launches of the stand-in for the forward")
    prep_graph.add_arguments(parser)
    results.add_out(parser, out)
    arguments = parser.parse_args(argv)
    if arguments.context < LONGEST + max(QUERIES):
        parser.error(f"--context must hold the longest random request: at least {LONGEST + max(QUERIES)}")
    return arguments


def main(argv: Sequence[str] | None = None, out: Path = results.DEFAULT_FOLDER) -> int:
    """Exit status 1 when a bound is missed, 3 without a GPU."""
    arguments = parse(argv, out)
    if arguments.graph:
        return prep_graph.main(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return 3
    largest = max(arguments.batches)
    most = max(largest, 32)  # those that are compared
    pages = (most + 1) * (-(-LONGEST // PAGE) + 1) + -(-arguments.context // PAGE)
    forward, short_forward = Forward(arguments.forward_kernels), Forward(max(1, arguments.forward_kernels // 3))
    faults: list[str] = []
    counted, timed, planned, pictured = [], [], [], []
    for queries in QUERIES:
        engine = Engine(Sizes(most, queries, arguments.context, pages, "cuda"))
        faults += compare(engine)
        if faults:
            break
        lengths = {batch: random_lengths(batch, seed=100 + batch) for batch in arguments.batches}
        counted += counts(engine, engine.place(lengths[largest]))
        timed += [times(engine, engine.place(lengths[batch]), forward, arguments.repeats) for batch in lengths]
        planned.append(plan_times(engine, engine.place(lengths[largest]), arguments.repeats))
        pictured += timeline(engine, lengths[largest], short_forward)
    print("\n".join(faults[:40]))
    if not faults:
        show("launches of one step", counted)
        show("alone on one stream, microseconds", columns(timed, ALONE))
        show("in a loop of steps, microseconds", columns(timed, LOOP))
        show("the plan, microseconds", planned)
    bounds = judge(len(faults), counted, timed, planned)
    path = results.write(arguments.name, [*counted, *timed, *planned], bounds, arguments.out)
    if not faults:
        write_report(path, [row for row in pictured if row["queries"] == QUERIES[0]])
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(to_its_end("sglang-dsv4 bench prep", main))
