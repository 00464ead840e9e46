#!/usr/bin/env python3
"""Compares second turns behind restored requests with the same turns on a flushed cache, on a plain server.

    python3 -m benchmarks.second_turns --model-path MODEL -- --chunked-prefill-size 512 --mem-fraction-static 0.8
    python3 -m benchmarks.second_turns --model-path MODEL --name hicache-stress -- --enable-hierarchical-cache ...

A restored request publishes its pages, loaded ones too, and the next turn of its conversation reads them, with
HiCache from the host perhaps. Two turns of each conversation run under forced retracts, every load compared. Then some
tokens behind them are scored as the prefix cache has the conversation, and again on a flushed cache. The distance of
both is rounding where the cache is right. How far that goes tells stock beside it, which retracts nothing by force,
with the same arguments and conversations. In a last run each loaded copy loses a family: that must show.

Arguments after -- go to both servers. With HiCache among them, a run without tokens from the host misses its bound.
Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.plain_pressure import HICACHE, PACKAGE, PAGE, STOCK, Conversations, package_and_stock
from sglang_dsv4.bench import results
from sglang_dsv4.command_line import CONCURRENCY, COUNT, COUNT_OR_ZERO, SECONDS
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import VOCABULARY, Load, Run, check_lengths
from sglang_dsv4.livetest.retract_stats import RetractStats
from sglang_dsv4.livetest.runs import SETTLES
from sglang_dsv4.livetest.zeroing import OFF, VARIABLE

DAMAGED = "a family zeroed in each load"
SERVER = ["--swa-full-tokens-ratio", "0.5", "--enable-metrics"]  # windows of many conversations
SMALL = ["--max-total-tokens", "16384"]  # with HiCache: too little for the conversations, so that pages go to the host
READ = 64  # most tokens scored behind the last whole page of a conversation
FURTHER = 24  # tokens that follow it, which no model chose
FOUND = 0.3  # of a conversation, in the prefix cache
LEAST_LOADS = 100  # young requests have fewer tokens behind their prompt than a window: those are computed
COUNTED = (
    "engine_retracts", "saves", "loads", "verified", "fallbacks", "copies_alive_at_end", "held_bytes_at_end", "trouble",
)  # fmt: skip


def converse(server: servers.Server, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs and reads all conversations on a flushed cache; returns the row of the result."""
    flush(server)
    talks = Conversations.of(str(arguments.seed), arguments)
    stats = RetractStats(server.url, server.log)
    first = Run(talks.first, arguments, server.url, None, None).execute(f"{name}, first turns")
    heard = zip(talks.first.prompts, first.answers, talks.follow_ups, strict=True)
    load = Load([[*prompt, *answer.tokens, *more] for prompt, answer, more in heard], talks.later_tokens)
    second = Run(load, arguments, server.url, None, None).execute(f"{name}, second turns")
    time.sleep(SETTLES)
    counted = stats.read()
    answers = [*first.answers, *second.answers]
    whole = [
        [*prompt, *answer.tokens]
        for prompt, answer in zip(load.prompts, second.answers, strict=True)
        if answer.outcome == "finished"
    ]
    return {
        "run": name,
        **{outcome: sum(a.outcome == outcome for a in answers) for outcome in ("finished", "refused", "lost")},
        "from_host": sum(answer.on_host for answer in answers),
        **{key: counted[key] for key in COUNTED if key in counted},
        **distances(server, whole, arguments),
    }


def distances(server: servers.Server, whole: Sequence[list[int]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Scores tokens behind each conversation, as the cache has it and flushed; returns how far both differ.

    cached: the share that the prefix cache had; cached_flushed: tokens that it had after a flush.
    """
    draw = random.Random(arguments.seed)
    texts = [[*said, *(draw.randrange(10, arguments.vocabulary) for _ in range(FURTHER))] for said in whole]
    edges = [(len(said) - 1) // PAGE * PAGE for said in whole]  # the last token's cache was not made

    def read(number: int) -> tuple[list[float], int]:
        text, start = texts[number], edges[number] + 1
        return score.read(server.url, text[:start], text[start : start + READ], arguments.timeout)

    warm = [read(number) for number in reversed(range(len(texts)))][::-1]  # a miss evicts the oldest
    cold = []
    for number in range(len(texts)):
        flush(server)  # before each: prompts share their beginnings
        cold.append(read(number))
    each = [
        statistics.mean(abs(one - other) for one, other in zip(found, computed, strict=True))
        for (found, _), (computed, _) in zip(warm, cold, strict=True)
    ]
    return {
        "read": len(each), "cached": sum(hits for _, hits in warm) / max(1, sum(edges)),
        "cached_flushed": sum(hits for _, hits in cold), "distance": statistics.mean(each) if each else 0.0,
        "distance_error": statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0,
    }  # fmt: skip


def flush(server: servers.Server) -> None:
    """Empties the prefix cache, on the host too."""
    servers.post(server.url, "/flush_cache?timeout=30", {}, 60)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row of stock, one of this package, and one of it damaged. Raises ServerDied."""
    word = (arguments.logs / arguments.name / "zero_family.txt").resolve()
    word.parent.mkdir(parents=True, exist_ok=True)
    word.write_text(OFF)
    tested = {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.livetest.zeroing", VARIABLE: str(word), "DSV4_VERIFY": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", **servers.forced_retracts(arguments.interval),
    }  # fmt: skip
    rows = []
    with package_and_stock(arguments, tested) as both:
        for name, server, said in (
            (STOCK, both[STOCK], OFF), (PACKAGE, both[PACKAGE], OFF), (DAMAGED, both[PACKAGE], arguments.zero),
        ):  # fmt: skip
            word.write_text(said)
            with server.awake():
                rows.append(converse(server, name, arguments))
            results.show(rows[-1:])
    return rows


def farther(row: dict[str, Any], stock: dict[str, Any]) -> float:
    """Returns by how much second turns are farther from a flushed cache than stock's, beyond chance."""
    chance = score.ERRORS * math.hypot(row["distance_error"], stock["distance_error"])
    return float(row["distance"] - stock["distance"] - chance)


def judge(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the bounds: nothing lost, loads and hits seen, second turns as on a flushed cache, damaged ones not."""
    stock, ours, damaged = rows
    explained = ours["loads"] + sum(ours["fallbacks"].values())
    bounds = [
        results.bound("turns lost or refused", "<= 0", ours["lost"] + ours["refused"]),
        results.bound("trouble in the log", "<= 0", len(ours["trouble"])),
        results.bound("retracts", f">= {arguments.at_least}", ours["engine_retracts"]),
        results.bound("retracts answered by a load", f">= {LEAST_LOADS}", ours["loads"]),
        results.bound("retracts with neither a load nor a reason", "<= 0", ours["engine_retracts"] - explained),
        results.bound("loads not compared with their copy", "<= 0", ours["loads"] - ours.get("verified", 0)),
        results.bound("copies alive at the end", "<= 0", ours["copies_alive_at_end"]),
        results.bound("metrics of this package", ">= 1", int("held_bytes_at_end" in ours)),
        results.bound("host memory held at the end, bytes", "<= 0", ours.get("held_bytes_at_end", 0)),
    ]
    if HICACHE in arguments.server:
        bounds.append(results.bound("tokens of prompts that HiCache brought from the host", ">= 1", ours["from_host"]))
    for row in rows:
        bounds += [
            results.bound(f"second turns read, {row['run']}", f">= {arguments.conversations}", row["read"]),
            results.bound(f"of them, found in the prefix cache, {row['run']}", f">= {FOUND}", row["cached"]),
            results.bound(f"tokens found after a flush, {row['run']}", "<= 0", row["cached_flushed"]),
        ]
    name = f"second turns from a flushed cache, beyond stock's and {score.ERRORS} standard errors"
    return [
        *bounds,
        results.bound(f"{name}, {PACKAGE}", "<= 0", farther(ours, stock)),
        results.bound(f"{name}, {DAMAGED}", ">= 0.0001", farther(damaged, stock)),
    ]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line; the arguments behind ``--`` are for both servers."""
    parser = results.parser(__doc__, "second-turns")
    parser.add_argument("--model-path", type=servers.model_path, required=True)
    parser.add_argument("--conversations", type=COUNT, default=40, help="of two turns each")
    # The youngest request is retracted. Among few it is old enough for a load that leaves whole pages behind.
    parser.add_argument("--concurrency", type=CONCURRENCY, default=4)
    parser.add_argument("--interval", type=COUNT, default=15, help="forward steps between forced retracts")
    parser.add_argument("--at-least", type=COUNT_OR_ZERO, default=300, help="retracts that there must be")
    parser.add_argument("--shared", type=COUNT_OR_ZERO, default=256, help="tokens of the beginnings that prompts share")
    parser.add_argument("--prompt", type=COUNT, nargs=2, default=(100, 600), help="fewest and most tokens behind them")
    parser.add_argument("--new-tokens", type=COUNT, nargs=2, default=(300, 500), help="of each turn's answer")
    parser.add_argument("--zero", metavar="FAMILY", default="c4_kv", help="damage the last run by this one")
    parser.add_argument("--vocabulary", type=VOCABULARY, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=SECONDS, default=servers.PATIENCE, help="seconds for the servers to come up")
    parser.add_argument("--timeout", type=SECONDS, default=300, help="seconds for one request")
    arguments = servers.parse(parser, argv)
    check_lengths(parser, arguments)
    arguments.server = [*SERVER, *(SMALL if HICACHE in arguments.server else ()), *arguments.server]
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Returns exit status 1 when a bound is missed."""
    arguments = parse(argv)
    servers.end_when_told()
    rows = measure(arguments)
    return results.finish(arguments, rows, judge(rows, arguments))


if __name__ == "__main__":
    sys.exit(main())
