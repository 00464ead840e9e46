#!/usr/bin/env python3
"""Compares second turns behind restored requests with the same turns on a flushed cache, on a plain server.

    python3 -m benchmarks.second_turns --model-path MODEL -- --chunked-prefill-size 512 --mem-fraction-static 0.8
    python3 -m benchmarks.second_turns --model-path MODEL --name hicache-stress -- --enable-hierarchical-cache ...

A restored request publishes its pages, loaded ones too, and the next turn of its conversation reads them, with
HiCache from the host perhaps. Two turns of each conversation run under forced retracts, every load compared. Then some
tokens behind them are scored as the prefix cache has the conversation, and again on a flushed cache. The distance of
both is rounding where the cache is right. How far that goes tells stock beside it, which retracts nothing by force,
with the same arguments and conversations. In a last run each loaded copy loses a family: that must show.

--sessions: this package keeps the conversations (DSV4_SESSIONS). They are read after other requests evicted their
windows from the device, when the windows alone are loaded, and after all was evicted, as the damaged run reads them.

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

from benchmarks.client import add_requests
from benchmarks.plain_pressure import HICACHE, PACKAGE, PAGE, STOCK, Conversations, package_and_stock
from sglang_dsv4.bench import results
from sglang_dsv4.command_line import CONCURRENCY, COUNT, COUNT_OR_ZERO, number
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import Load, Run, check_lengths, count_outcomes
from sglang_dsv4.livetest.retract_stats import RetractStats, counted_at
from sglang_dsv4.livetest.runs import SETTLES
from sglang_dsv4.livetest.zeroing import OFF, switched_by

DAMAGED = "a family zeroed in each load"
SERVER = ["--swa-full-tokens-ratio", "0.5", "--enable-metrics"]  # windows of many conversations
SMALL = ["--max-total-tokens", "16384"]  # with HiCache: too little for the conversations, so that pages go to the host
READ = 64  # most tokens scored behind the last whole page of a conversation
FURTHER = 24  # tokens that follow it, which no model chose
FOUND = 0.3  # of a conversation, in the prefix cache
LEAST_LOADS = 100  # young requests have fewer tokens behind their prompt than a window: those are computed
COUNTED = (
    "engine_retracts", "saves", "loads", "verified", "fallbacks", "copies_alive_at_end", "held_bytes_at_end", "trouble",
    "sessions",
)  # fmt: skip
WINDOWS, PAGES = "windows lost", "all lost"  # on the device, before the conversations are read
KINDS = ("window", "pages")  # of the loads that answer
OTHERS = {WINDOWS: (160, 300), PAGES: (400, 1000)}  # requests and their tokens, too few for a session of their own
# Room for 768 pages and 130 windows: the first of the others take all windows and 160 pages, the second ones all pages.
KEEPS = ["--max-total-tokens", "196608", "--swa-full-tokens-ratio", "0.17", "--enable-metrics"]
LEAST_HITS = 0.5  # of the conversations; some have too few tokens for a session


def converse(server: servers.Server, name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs and reads all conversations on a flushed cache; returns a row of the result for each way to read them."""
    servers.flush(server.url)
    talks = Conversations.of(str(arguments.seed), arguments)
    stats = RetractStats(server.url, server.log)
    first = Run(talks.first, arguments, server.url, None, None).execute(f"{name}, first turns")
    heard = zip(talks.first.prompts, first.answers, talks.follow_ups, strict=True)
    load = Load([[*prompt, *answer.tokens, *more] for prompt, answer, more in heard], talks.later_tokens)
    second = Run(load, arguments, server.url, None, None).execute(f"{name}, second turns")
    answers = [*first.answers, *second.answers]
    whole = [
        [*prompt, *answer.tokens]
        for prompt, answer in zip(load.prompts, second.answers, strict=True)
        if answer.outcome == "whole"
    ]
    rows = Reading(server, whole, arguments).rows(name)
    time.sleep(SETTLES)
    counted = stats.read()
    facts = {
        **count_outcomes(answers),
        "from_host": sum(answer.on_host for answer in answers),
        **{key: counted[key] for key in COUNTED if key in counted},
    }
    return [row | facts for row in rows]


class Reading:
    """Scores tokens behind each conversation of ``whole``: as the cache has it, and flushed."""

    def __init__(self, server: servers.Server, whole: Sequence[list[int]], arguments: argparse.Namespace) -> None:
        self.server, self.arguments = server, arguments
        draw = random.Random(arguments.seed)
        self.texts = [[*said, *(draw.randrange(10, arguments.vocabulary) for _ in range(FURTHER))] for said in whole]
        self.edges = [(len(said) - 1) // PAGE * PAGE for said in whole]  # the last token's cache was not made

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Returns a row for each way to read; leaves a flushed cache.

        hits: loads of sessions meanwhile, by kind. cached: the share of the conversations that the cache had;
        cached_flushed: tokens that it had after a flush. distance: between both readings.
        """
        found = []
        for lost in ways(name, self.arguments):
            if lost is not None:
                lose(self.server, lost, self.arguments)
            before = session_hits(self.server)
            warm = [self._read(at) for at in reversed(range(len(self.texts)))][::-1]  # a miss evicts the oldest
            hits = {kind: count - before.get(kind, 0) for kind, count in session_hits(self.server).items()}
            found.append((name if lost is None else f"{name}, {lost}", warm, hits))
        cold = []
        for at in range(len(self.texts)):
            servers.flush(self.server.url)  # before each: prompts share their beginnings
            cold.append(self._read(at))
        servers.flush(self.server.url)
        return [{"run": run, "hits": hits, **self._compare(warm, cold)} for run, warm, hits in found]

    def _read(self, at: int) -> tuple[list[float], int]:
        text, start = self.texts[at], self.edges[at] + 1
        return score.read(self.server.url, text[:start], text[start : start + READ], self.arguments.timeout)

    def _compare(
        self, warm: Sequence[tuple[list[float], int]], cold: Sequence[tuple[list[float], int]]
    ) -> dict[str, Any]:
        each = [
            statistics.mean(abs(one - other) for one, other in zip(found, computed, strict=True))
            for (found, _), (computed, _) in zip(warm, cold, strict=True)
        ]
        return {
            "read": len(each), "cached": sum(hits for _, hits in warm) / max(1, sum(self.edges)),
            "cached_flushed": sum(hits for _, hits in cold), "distance": statistics.mean(each) if each else 0.0,
            "distance_error": statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0,
        }  # fmt: skip


def ways(name: str, arguments: argparse.Namespace) -> tuple[str | None, ...]:
    """Returns what the device loses before each reading of the run ``name``; None: nothing."""
    if not arguments.sessions or name == STOCK:
        return (None,)
    return (WINDOWS, PAGES) if name == PACKAGE else (PAGES,)


def lose(server: servers.Server, lost: str, arguments: argparse.Namespace) -> None:
    """Lets other requests evict the windows of all conversations from the device, or everything."""
    draw, (count, tokens) = random.Random(lost), OTHERS[lost]
    prompts = [[draw.randrange(10, arguments.vocabulary) for _ in range(tokens)] for _ in range(count)]
    Run(Load(prompts, [1] * count), arguments, server.url, None, None).execute(lost)


def session_hits(server: servers.Server) -> dict[str, int]:
    """Returns how many requests of ``server`` went on from a session so far, by kind of the load."""
    return dict(counted_at(server.url).get("sessions", {}).get("hits", {}))


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns rows of stock, of this package, and of it damaged. Raises ServerDied."""
    word = (arguments.logs / arguments.name / "zero_family.txt").resolve()
    tested = {
        **switched_by(word), "DSV4_VERIFY": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", **servers.forced_retracts(arguments.interval),
        "DSV4_SESSIONS": "auto" if arguments.sessions else "off",
        **({"DSV4_HOST_GB": str(arguments.host_gb)} if arguments.sessions else {}),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    with package_and_stock(arguments, tested) as both:
        for name, server, said in (
            (STOCK, both[STOCK], OFF), (PACKAGE, both[PACKAGE], OFF), (DAMAGED, both[PACKAGE], arguments.zero),
        ):  # fmt: skip
            word.write_text(said)
            with server.awake():
                found = converse(server, name, arguments)
            results.show(found)
            rows += found
    return rows


def farther(row: dict[str, Any], stock: dict[str, Any]) -> float:
    """Returns by how much second turns are farther from a flushed cache than stock's, beyond chance."""
    chance = score.ERRORS * math.hypot(row["distance_error"], stock["distance_error"])
    return float(row["distance"] - stock["distance"] - chance)


def judge(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the bounds: nothing lost, loads and hits seen, second turns as on a flushed cache, damaged ones not."""
    stock, *read, damaged = rows
    ours = read[0]
    explained = ours["loads"] + sum(ours["fallbacks"].values())
    bounds = [
        results.bound("turns without a whole answer", "<= 0", ours["asked"] - ours["whole"]),
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
    if arguments.sessions:
        bounds += judge_sessions(read, arguments)
    name = f"second turns from a flushed cache, beyond stock's and {score.ERRORS} standard errors"
    return [
        *bounds,
        *(results.bound(f"{name}, {row['run']}", "<= 0", farther(row, stock)) for row in read),
        results.bound(f"{name}, {damaged['run']}", ">= 0.0001", farther(damaged, stock)),
    ]


def judge_sessions(read: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the bounds: each loss answered by its kind of load, all compared, and nothing left by a flush."""
    least, counted = f">= {arguments.conversations * LEAST_HITS:g}", read[0].get("sessions", {})
    not_compared = sum(counted.get("hits", {}).values()) - counted.get("verified", 0)
    return [
        *(
            results.bound(f"conversations loaded, {row['run']}: {kind}", least, row["hits"].get(kind, 0))
            for row, kind in zip(read, KINDS, strict=True)
        ),
        results.bound("loads of sessions not compared with their copy", "<= 0", not_compared),
        results.bound("points left after a flush", "<= 0", counted.get("points", 0)),
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
    parser.add_argument("--sessions", action="store_true", help="read conversations that the device lost")
    parser.add_argument("--host-gb", type=number(float, 0.1), default=4, help="DSV4_HOST_GB with --sessions")
    add_requests(parser)
    arguments = servers.parse(parser, argv)
    check_lengths(parser, arguments)
    if arguments.sessions and HICACHE in arguments.server:
        parser.error(f"--sessions: a server with {HICACHE} keeps none")
    given = KEEPS if arguments.sessions else [*SERVER, *(SMALL if HICACHE in arguments.server else ())]
    arguments.server = [*given, *arguments.server]
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Returns exit status 1 when a bound is missed."""
    arguments = parse(argv)
    servers.end_when_told()
    rows = measure(arguments)
    return results.finish(arguments, rows, judge(rows, arguments))


if __name__ == "__main__":
    sys.exit(main())
