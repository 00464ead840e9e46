#!/usr/bin/env python3
"""Computes again the compressed row of each block of 128 tokens that a retract interrupts, with online compression.

    python3 -m benchmarks.online_stress --model-path MODEL -- --chunked-prefill-size 512 --mem-fraction-static 0.3

With SGLANG_OPT_USE_ONLINE_COMPRESS=1 each step folds its token into the one state row of a request's open block, in
place. A copy that is one token late is valid bytes: DSV4_VERIFY does not see it, and only the block's compressed row is
wrong. Rows of two servers differ by rounding, as their batches do, and so do hashes. So the decode server itself keeps
the inputs that each step gives its compressor, by request and position, and when a block closes it computes the row
from all of them at once. Inputs of the prefill server come as the state row that a request's first step finds.

A prefill and a decode server, cache over NIXL, eager steps, under forced retracts; how far rounding goes tell the
blocks without a retract. A second start, with fewer requests, copies beside the step in flight: that must show.
Its options are those of ``sglang-dsv4 stress``; given ones win. Arguments after -- go to the servers.
Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.in_server import around, environment, note, read
from sglang_dsv4.bench import results
from sglang_dsv4.cli import stress
from sglang_dsv4.command_line import Parser
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Load
from sglang_dsv4.livetest.runs import serve_and_run

LATE = "BENCHMARK_LATE"  # an environment variable
BLOCK = 128
WHOLE, RETRACTED, LATE_COPIES = "never retracted", "retracted", "retracted, copied one token late"
ROUNDING = 2  # times the largest error of a block without a retract
FEWEST = 1e-6  # an error that any sum of 128 numbers may have
WORDS = (  # noqa: SIM905
    "--transfer nixl --score 0 --requests 80 --concurrency 8 --interval 10 --at-least 300 --prompt 30 1000 "
    "--new-tokens 300 600 --name online-stress"
).split()
LATE_REQUESTS = 24  # of the second start
LEAST_ROWS = 100  # compared; one block may be retracted several times

# ---------------------------------------------------------------------- in the decode server


@dataclass
class OpenBlock:
    """Holds the inputs of a request's open block in one layer, by offset: (kv, score).

    begins: the state row (maximum, sum, kv) that its first step found; None where that was the block's first token.
    """

    begins: torch.Tensor | None
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    retracted: bool = False

    def row(self, bias: torch.Tensor) -> torch.Tensor:
        """Returns the block's compressed row: in each dimension the mean of kv, weighted by exp(score + bias)."""
        offsets = sorted(self.inputs)
        kv, score = torch.stack([self.inputs[offset] for offset in offsets]).double().unbind(1)
        score = score + bias[offsets].double()
        if self.begins is not None:
            most, total, before = self.begins.double()
            kv, score = torch.cat([before[None], kv]), torch.cat([(most + total.log())[None], score])
        return (kv * score.softmax(0)).sum(0)


class Rows:
    """Compares each compressed row of decode steps with the one of its block's inputs, and notes the error."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.blocks: dict[str, dict[int, OpenBlock]] = defaultdict(dict)  # by request and layer
        self._running: tuple[Any, int] | None = None  # forward batch and layer

    def layer(self, original: Any, backend: Any, x: Any, forward_batch: Any, layer_id: int, compressor: Any) -> Any:
        """Runs AROUND forward_core_compressor."""
        decodes = forward_batch.forward_mode.is_decode() and compressor.ratio == BLOCK
        self._running = (forward_batch, layer_id) if decodes else None
        try:
            return original(backend, x, forward_batch, layer_id, compressor)
        finally:
            self._running = None

    def compress(self, original: Any, **given: Any) -> torch.Tensor:
        """Runs AROUND compress_forward, which changes the state rows in place and returns the compressed ones."""
        if self._running is None:
            return original(**given)
        batch, layer = self._running
        width = given["head_dim"]
        offsets = [(length - 1) % BLOCK for length in batch.seq_lens_cpu.tolist()]
        states = given["kv_score_buffer"].view(-1, 3, width)
        for at, rid in enumerate(batch.rids):
            if layer not in self.blocks[rid]:
                begins = states.index_select(0, batch.req_pool_indices[at : at + 1].long())[0] if offsets[at] else None
                self.blocks[rid][layer] = OpenBlock(begins)
        out = original(**given)
        for at, (rid, offset) in enumerate(zip(batch.rids, offsets, strict=True)):
            block = self.blocks[rid][layer]
            block.inputs[offset] = given["kv_score_input"][at].view(2, width).clone()
            if offset == BLOCK - 1:
                expected = block.row(given["ape"])
                error = ((out[at] - expected).abs().max() / expected.abs().max()).item()
                note(self.notes, layer=layer, retracted=block.retracted, error=error)
                del self.blocks[rid][layer]
        return out

    def release(self, original: Any, batch: Any, index: int, *args: Any, **kwargs: Any) -> Any:
        """Runs AROUND ScheduleBatch.release_req."""
        for block in self.blocks[batch.reqs[index].rid].values():
            block.retracted = True
        return original(batch, index, *args, **kwargs)


def install(notes: Path) -> None:
    """Puts the comparison into this process; with LATE set, copies do not wait for the step in flight."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend  # noqa: PLC0415
    from sglang.srt.layers.attention.dsv4 import compressor_v2  # noqa: PLC0415
    from sglang.srt.managers.schedule_batch import ScheduleBatch  # noqa: PLC0415

    from sglang_dsv4.engine import memory, release_req  # noqa: PLC0415

    rows = Rows(notes)
    around(DeepseekV4AttnBackend, "forward_core_compressor", rows.layer)
    around(compressor_v2, "compress_forward", rows.compress)
    around(ScheduleBatch, "release_req", rows.release)
    if os.environ.get(LATE):
        around(memory, "steps_in_flight", lambda *_: 0)
        around(release_req, "spares_the_retract", lambda *_: False)


# ---------------------------------------------------------------------- the run


def measure(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the rows and the bounds: of stress, and of the compressed rows of both starts. Raises ServerDied."""
    notes = arguments.logs / arguments.name / "rows.jsonl"
    found = serve_and_run(arguments, Load.of(arguments), (), environment("benchmarks.online_stress", notes))
    rows, bounds = stress.judged(found, arguments)
    errors: dict[str, list[float]] = {RETRACTED: [], WHOLE: [], LATE_COPIES: []}
    for line in read(notes):
        errors[RETRACTED if line["retracted"] else WHOLE].append(line["error"])
    late = argparse.Namespace(**vars(arguments) | {"name": f"{arguments.name}-late"})
    notes = late.logs / late.name / "rows.jsonl"
    load = Load.of(arguments).first(LATE_REQUESTS)
    serve_and_run(late, load, (), {**environment("benchmarks.online_stress", notes), LATE: "1"})
    errors[LATE_COPIES] = [line["error"] for line in read(notes) if line["retracted"]]
    summaries = [summary(name, of_rows) for name, of_rows in errors.items()]
    results.show(summaries)
    return [*rows, *summaries], [*bounds, *judge(summaries, found.log)]


def summary(name: str, errors: Sequence[float]) -> dict[str, Any]:
    """Returns the row of blocks whose compressed rows have these errors."""
    middle, most = (statistics.median(errors), max(errors)) if errors else (0.0, 0.0)
    return {"run": f"blocks, {name}", "rows": len(errors), "error_p50": middle, "error_max": most}


def judge(rows: Sequence[dict[str, Any]], counted: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the bounds: rows behind a retract are those of their inputs, but for rounding; late copies show."""
    retracted, whole, late = rows
    least = max(FEWEST, ROUNDING * whole["error_max"])
    return [
        results.bound("retracts without a copy", "<= 0", sum(counted["fallbacks"].values())),
        results.bound(f"rows compared, {WHOLE}", f">= {LEAST_ROWS}", whole["rows"]),
        results.bound(f"rows compared, {RETRACTED}", f">= {LEAST_ROWS}", retracted["rows"]),
        results.bound(f"largest error of a row by rounding's, {RETRACTED}", "<= 1", retracted["error_max"] / least),
        results.bound(f"rows compared, {LATE_COPIES}", ">= 1", late["rows"]),
        results.bound(f"median error of a row by rounding's, {LATE_COPIES}", ">= 10", late["error_p50"] / least),
    ]


def words(argv: Sequence[str]) -> list[str]:
    """Returns the command line of stress: the usual words, those given, and for the servers eager steps."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [*WORDS, *argv[:end], "--", "--disable-cuda-graph", *argv[end + 1 :]]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns exit status 1 when a bound is missed."""
    given = sys.argv[1:] if argv is None else argv
    arguments = stress.parse(words(given))
    if arguments.attach or arguments.plain or arguments.stock or arguments.score or arguments.transfer != "nixl":
        Parser("online_stress").error("this is a pair of servers over NIXL that is started here, without scores")
    os.environ["SGLANG_OPT_USE_ONLINE_COMPRESS"] = "1"  # of both servers
    servers.end_when_told()
    rows, bounds = measure(arguments)
    return results.finish(arguments, rows, bounds)


if __name__ == "__main__":
    sys.exit(main())
