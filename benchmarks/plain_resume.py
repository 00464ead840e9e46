#!/usr/bin/env python3
"""Times a restored request against the recompute of the same request, on one live plain server, by turns.

    python3 -m benchmarks.plain_resume --config benchmarks/flash_config.json --experts 48 --sweep 128 --repeats 2 \\
        -- --mem-fraction-static 0.9

The longer of two requests is retracted again and again. Every other save is refused, so the request comes back from its
copy, and is computed again by the engine, by turns. Both times are from the begin of the scheduler's pass that admits
it to its next token at the client. The prefix tree is made to miss: a restore loads the whole request, and a recompute
is of the whole request. The small --sweep tells from how many tokens a copy is worth it.
Arguments after -- go to the server. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import client
from benchmarks.in_server import around, note, read
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers

BOUNDS = {4096: 9, 16384: 30, 65536: 100}  # times faster, by tokens
RESTORED, RECOMPUTED = "restore", "recompute"
# The engine's default window pool holds less than a chunk here, and a long prompt then waits for ever.
SERVER = ["--swa-full-tokens-ratio", "0.5"]


def install(notes: Path) -> None:
    """Installs a refusal of every other save in this process, and notes of each request.

    admitted: when its pass began. had: tokens of its answer. extend: tokens that the pass prefills of it; none, or one,
    where it was restored.
    """
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415 - in the server alone, as all below

    from sglang_dsv4.errors import HostMemoryExhausted  # noqa: PLC0415
    from sglang_dsv4.pools.token_to_kv import TokenToKVPool  # noqa: PLC0415

    number = itertools.count()

    def save(original: Any, *args: Any, **kwargs: Any) -> Any:
        if next(number) % 2:
            raise HostMemoryExhausted("this one is left to the engine, to be timed beside a restore")
        return original(*args, **kwargs)

    def a_pass(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        waiting = {req.rid for req in scheduler.waiting_queue if req.is_retracted}
        began = time.time()
        plan = original(scheduler, *args, **kwargs)
        taken = [(req, 0) for req in plan.running_batch.reqs] if waiting else []
        if waiting and plan.batch_to_run is not None:
            taken += zip(plan.batch_to_run.reqs, plan.batch_to_run.extend_lens, strict=True)
        for req, extend in taken:
            if req.rid in waiting:
                note(notes, rid=req.rid, admitted=began, had=len(req.output_ids), extend=int(extend))
        return plan

    around(TokenToKVPool, "get_cpu_copy", save)
    around(Scheduler, "get_new_batch_prefill", a_pass)


def waits(returns: list[dict[str, Any]], arrived: dict[int, float]) -> dict[str, list[float]]:
    """Returns milliseconds from each return to the first new token, by how the request came back."""
    found: dict[str, list[float]] = {RESTORED: [], RECOMPUTED: []}
    for line in returns:
        later = [at for number, at in arrived.items() if number > line["had"]]
        if later:
            found[RESTORED if line["extend"] <= 1 else RECOMPUTED].append((min(later) - line["admitted"]) * 1e3)
    return found


def row_of(tokens: int, found: dict[str, list[float]], step_ms: float) -> dict[str, Any]:
    """Returns counts, medians and worst of one length; how many times faster a restore is."""
    row: dict[str, Any] = {"tokens": tokens, "decode_step_ms": step_ms}
    for name, times in found.items():
        row |= {f"{name}s": len(times)}
        if times:
            row |= {f"{name}_ms": statistics.median(times), f"{name}_ms_worst": max(times)}
    if all(found.values()):
        row["faster"] = row[f"{RECOMPUTED}_ms"] / row[f"{RESTORED}_ms"]
    return row


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one row a length. Raises ServerDied."""
    rows = []
    given = [*SERVER, "--chunked-prefill-size", str(arguments.chunk)]
    missing = {"SGLANG_RADIX_FORCE_MISS": "1"}
    with client.retracting("plain", "benchmarks.plain_resume", given, missing, arguments) as (asked, notes):
        for length in [*arguments.sweep, *arguments.tokens]:
            found: dict[str, list[float]] = {RESTORED: [], RECOMPUTED: []}
            for number in range(arguments.repeats + 1):
                arrived = asked.generate(length, arguments.new_tokens)
                if number:  # the first one warms up
                    mine = [line for line in read(notes) if line["rid"] == asked.rid]
                    for name, times in waits(mine, arrived).items():
                        found[name] += times
            rows.append(row_of(length, found, client.typical_gap(arrived)))
            results.show(rows[-1:])
    return rows


def worth_it_from(rows: list[dict[str, Any]]) -> int | None:
    """Returns the fewest tokens from which on every restore was faster; None where the longest was not."""
    found = None
    for row in sorted(rows, key=lambda row: -row["tokens"]):
        if row.get("faster", 0) < 1:
            break
        found = row["tokens"]
    return found


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the bounds: both ways seen at each bounded length, and a restore that many times faster."""
    bounds = []
    for row in (row for row in rows if row["tokens"] in BOUNDS):
        where, least = f"at {row['tokens']} tokens", f">= {BOUNDS[row['tokens']]}"
        bounds += [
            results.bound(f"restores seen {where}", ">= 3", row["restores"]),
            results.bound(f"recomputes seen {where}", ">= 3", row["recomputes"]),
            results.bound(f"admission to token, recompute by restore, {where}", least, row.get("faster", 0)),
        ]
    return bounds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = client.parser(__doc__, "plain-resume", tuple(BOUNDS), 20)
    parser.add_argument("--sweep", type=int, nargs="*", default=(128, 512), help="small lengths")
    return servers.parse(parser, argv)


def main() -> int:
    arguments = parse()
    servers.end_when_told()
    rows = measure(arguments)
    bounds = judge(rows)
    return results.finish(arguments, [*rows, {"worth_it_from": worth_it_from(rows)}], bounds)


if __name__ == "__main__":
    sys.exit(main())
