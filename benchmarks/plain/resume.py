#!/usr/bin/env python3
"""A restored request against the recompute of the same request, on a live plain server, in one run.

    python3 -m benchmarks.plain.resume --config benchmarks/resume/flash_config.json --experts 96 \\
        -- --mem-fraction-static 0.9

The longer of two requests is retracted again and again. Every other save is refused (timed_restores), so the same
request comes back from its copy, and is computed again by the engine, by turns. Both times are from the begin of the
scheduler's pass that admits it to its next token at the client. The prefix tree is made to miss: a restore loads the
whole request, and a recompute is of the whole request. That is a request whose prompt the tree has lost, as it does
when memory is short; where the tree still has the prompt, the engine computes the rest alone, and a restore loads it.

The model is --config with its routed experts cut to --experts, so that it fits the card (a token is still computed by
as many experts as before), random weights. The small --sweep tells from how many tokens a copy is worth it.
Arguments after -- go to the server. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.plain.timed_restores import VARIABLE
from benchmarks.resume.run import KEEPER, Client, lines, room, typical_gap
from benchmarks.shapes import write_model
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers

CHECKOUT = Path(__file__).resolve().parents[2]
BOUNDS = {4096: 8, 16384: 30, 65536: 100}  # times faster, by tokens
RESTORED, RECOMPUTED = "restore", "recompute"
# The engine's default window pool holds less than a chunk here, and a long prompt then waits for ever.
SERVER = ["--swa-full-tokens-ratio", "0.5"]


class PlainClient(Client):
    """Its requests have names instead of transfer rooms."""

    def names(self) -> dict[str, Any]:
        """See Client."""
        return {"rid": f"timed-{self.room}"}


def waits(returns: list[dict[str, Any]], arrived: dict[int, float]) -> dict[str, list[float]]:
    """Milliseconds from each return to the first token that was not there before it, by how the request came back."""
    found: dict[str, list[float]] = {RESTORED: [], RECOMPUTED: []}
    for line in returns:
        later = [at for number, at in arrived.items() if number > line["had"]]
        if later:
            found[RESTORED if line["extend"] <= 1 else RECOMPUTED].append((min(later) - line["admitted"]) * 1e3)
    return found


def row_of(tokens: int, found: dict[str, list[float]], step_ms: float) -> dict[str, Any]:
    """Counts, medians and worst of one length; how many times faster a restore is."""
    row: dict[str, Any] = {"tokens": tokens, "decode_step_ms": step_ms}
    for name, times in found.items():
        row |= {f"{name}s": len(times)}
        if times:
            row |= {f"{name}_ms": statistics.median(times), f"{name}_ms_worst": max(times)}
    if all(found.values()):
        row["faster"] = row[f"{RECOMPUTED}_ms"] / row[f"{RESTORED}_ms"]
    return row


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a length. Raises ServerDied."""
    model, facts = write_model(arguments.config, arguments.logs / "model", arguments.experts)
    folder = arguments.logs / arguments.name
    folder.mkdir(parents=True, exist_ok=True)
    out = folder.resolve() / "returns.jsonl"
    out.unlink(missing_ok=True)
    environment = {
        **servers.model_package("benchmarks.plain.timed_restores", CHECKOUT), VARIABLE: str(out),
        **servers.forced_retracts(arguments.interval),
        "SGLANG_RADIX_FORCE_MISS": "1",
    }  # fmt: skip
    given = [*SERVER, "--chunked-prefill-size", str(arguments.chunk), *room(arguments), *arguments.server]
    server = servers.launch("plain", str(model), given, environment, folder)
    try:
        servers.wait_until_up([server], arguments.patience)
        client = PlainClient(server.url, facts["vocab_size"])
        stop = threading.Event()
        keeper = threading.Thread(target=client.generate, args=(KEEPER, 1 << 14, stop), daemon=True)
        keeper.start()
        time.sleep(2)
        rows = [measure_length(client, out, length, arguments) for length in [*arguments.sweep, *arguments.tokens]]
        stop.set()
        keeper.join()
    finally:
        server.stop()
    return rows


def measure_length(client: PlainClient, out: Path, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The returns of ``--repeats`` requests; one more comes first and warms up."""
    found: dict[str, list[float]] = {RESTORED: [], RECOMPUTED: []}
    for number in range(arguments.repeats + 1):
        arrived = client.generate(length, arguments.new_tokens)
        if number:
            mine = [line for line in lines(out) if line["rid"] == client.names()["rid"]]
            for name, times in waits(mine, arrived).items():
                found[name] += times
    row = row_of(length, found, typical_gap(arrived))
    results.show([row])
    return row


def worth_it_from(rows: list[dict[str, Any]]) -> int | None:
    """The fewest tokens from which on every restore was faster; None where the longest was not."""
    found = None
    for row in sorted(rows, key=lambda row: -row["tokens"]):
        if row.get("faster", 0) < 1:
            break
        found = row["tokens"]
    return found


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both ways were seen at each length that has a bound, and a restore is that many times faster."""
    bounds = []
    for row in rows:
        if row["tokens"] in BOUNDS:
            where = f"at {row['tokens']} tokens"
            bounds += [
                results.bound(f"restores seen {where}", ">= 3", row["restores"]),
                results.bound(f"recomputes seen {where}", ">= 3", row["recomputes"]),
                results.bound(f"admission to token, recompute by restore, {where}", f">= {BOUNDS[row['tokens']]}",
                              row.get("faster", 0)),
            ]  # fmt: skip
    return bounds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for the server."""
    parser = results.parser(__doc__, "plain-resume")
    parser.add_argument("--config", type=Path, required=True, help="config.json of the model")
    parser.add_argument("--experts", type=int, required=True, help="routed experts that fit the card")
    parser.add_argument("--tokens", type=int, nargs="+", default=tuple(BOUNDS))
    parser.add_argument("--sweep", type=int, nargs="*", default=(128, 512), help="small lengths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=130)
    parser.add_argument("--interval", type=int, default=20, help="forward steps between forced retracts")
    parser.add_argument("--chunk", type=int, default=16384, help="--chunked-prefill-size of the server")
    parser.add_argument("--patience", type=float, default=420)
    return servers.parse(parser, argv)


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    rows = measure(arguments)
    bounds = judge(rows)
    rows.append({"worth_it_from": worth_it_from(rows)})
    return results.finish(arguments, rows, bounds)


if __name__ == "__main__":
    sys.exit(main())
