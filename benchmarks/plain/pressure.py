#!/usr/bin/env python3
"""A cache that is too small for its requests, with this package and without, in turns on one machine.

    python3 -m benchmarks.plain.pressure --model-path MODEL --name plain-pressure -- --mem-fraction-static 0.3

Two plain servers stand on one card: with this package, and stock (DSV4_ENABLED=0). Their window pool has the engine's
default size (a tenth), and --max-total-tokens is small: no retract is forced, and both retract. In each round both get
the same conversations (benchmarks/plain/conversations.py), one server after the other, the other one suspended; who is
first changes. More clients than run at once keep the queue full until the last conversation has begun, and the rate of
a round is that of the tokens until then. A server that takes longer than --most-seconds is cut off there. The interval
is that of the median round (bootstrap).

As many answers of both are then scored by the stock server when it is quiet: stock's are the control.
A table, a plot of the tokens in each second and one JSON line last. Arguments after -- go to both servers.
Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.plain import beside
from benchmarks.plain.beside import PACKAGE, STOCK
from benchmarks.plain.conversations import Conversations, Talks, gaps_of
from benchmarks.steps.summary import CONFIDENCE, interval
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import Load
from sglang_dsv4.livetest.retract_stats import counted_at, read_log

mpl.use("Agg")
import matplotlib.pyplot as plt

SERVER = ["--max-total-tokens", "65536", "--enable-metrics"]
LEAST_RETRACTS = 50  # of each server, or there was no pressure
WARM_UP = -1  # the round before the first one
TOGETHER = 8  # answers scored at once
COUNTED = ("engine_retracts", "prefill_tokens", "saves", "loads", "fallbacks", "trouble")


def talk(server: servers.Server, name: str, round_: int, arguments: argparse.Namespace) -> tuple[Talks, dict[str, Any]]:
    """One server's part of a round: its answers, and the row of the result."""
    talks = Conversations.of(f"{arguments.seed}-{round_}", arguments)
    with server.awake():
        servers.post(server.url, "/flush_cache?timeout=30", {}, 60)
        start = server.log.stat().st_size
        run = Talks(talks, arguments, server.url).execute(f"round {round_}, {name}")
        servers.post(server.url, "/flush_cache?timeout=30", {}, 60)  # it is idle from here on
        said = read_log(server.log, start)
    row = {"run": name, "round": round_, **run.summary(), **{key: said[key] for key in COUNTED}}
    results.show([{key: value for key, value in row.items() if key != "each_second"}])
    return run, row


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each server and round, one for each server with what it counted, and those of the score."""
    runs: dict[str, list[Talks]] = {PACKAGE: [], STOCK: []}
    rows = []
    with beside.package_and_stock(arguments) as (package, stock):
        both = {PACKAGE: package, STOCK: stock}
        for server in both.values():
            server.suspend()
        few = argparse.Namespace(**vars(arguments) | {"conversations": arguments.concurrency})
        for name, server in both.items():  # not looked at: some shapes of batches compile here
            talk(server, name, WARM_UP, few)
        for round_ in range(arguments.rounds):
            for name in sorted(both, reverse=bool(round_ % 2)):
                run, row = talk(both[name], name, round_, arguments)
                runs[name].append(run)
                rows.append(row)
        package.wake()
        counted = {PACKAGE: counted_at(package.url), STOCK: {}}
        rows += [{"run": f"all of {name}", **gaps_of(done), **counted[name]} for name, done in runs.items()]
        stock.wake()
        given = ((score.CONTROL, runs[STOCK]), (PACKAGE, runs[PACKAGE]))
        rows += [scored(name, stock.url, done, arguments) for name, done in given]
    return rows


def scored(name: str, url: str, runs: list[Talks], arguments: argparse.Namespace) -> dict[str, Any]:
    """The score of the first ``--score`` finished answers of ``runs``, or of all."""
    asked = [zip(run.load.prompts, run.load.new_tokens, run.answers, strict=True) for run in runs]
    finished = [one for one in itertools.chain.from_iterable(asked) if one[2].outcome == "finished"][: arguments.score]
    load = Load([prompt for prompt, _, _ in finished], [count for _, count, _ in finished])
    return score.scored(name, url, load, [answer for _, _, answer in finished], arguments.timeout, TOGETHER)


def of(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The rows of one server's rounds."""
    return [row for row in rows if row["run"] == name]


def total(rows: list[dict[str, Any]], name: str, key: str) -> int:
    """Of all rounds of one server."""
    return sum(row[key] for row in of(rows, name))


def ratios(rows: list[dict[str, Any]]) -> list[float]:
    """The rate with this package by stock's, round by round."""
    pairs = zip(of(rows, PACKAGE), of(rows, STOCK), strict=True)
    return [ours["busy_tokens_a_second"] / stocks["busy_tokens_a_second"] for ours, stocks in pairs]


def judge(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Both retracted, nothing was lost, answers are as likely as stock's, and it is not slower than stock."""
    middle, low, _ = interval([ratios(rows)], arguments.seed)
    ours = next(row for row in rows if row["run"] == f"all of {PACKAGE}")
    scores = [row for row in rows if row["run"].startswith("score of ")]
    answers = max(1, min(arguments.score, *(total(rows, name, "finished") for name in (PACKAGE, STOCK))))
    lost = total(rows, PACKAGE, "lost") + total(rows, PACKAGE, "refused")
    trouble = sum(len(row["trouble"]) for row in of(rows, PACKAGE))
    return [
        results.bound("requests lost or refused", "<= 0", lost),
        results.bound("trouble in the log", "<= 0", trouble),
        *(
            results.bound(f"retracts, {name}", f">= {LEAST_RETRACTS}", total(rows, name, "engine_retracts"))
            for name in (PACKAGE, STOCK)
        ),
        results.bound("retracts answered by a load", ">= 1", total(rows, PACKAGE, "loads")),
        results.bound("metrics of this package", ">= 1", int("held_bytes_at_end" in ours)),
        results.bound("host memory held at the end, bytes", "<= 0", ours.get("held_bytes_at_end", 0)),
        results.bound("tokens a second, by stock's: median round", ">= 1.0", middle),
        results.bound(f"the same, low end of the {CONFIDENCE:.0%} interval", ">= 1.0", low),
        *score.judge(scores, answers, {PACKAGE: PACKAGE}),
    ]


def table(rows: list[dict[str, Any]], seed: int) -> list[str]:
    """Both servers side by side, as Markdown."""
    middle, low, high = interval([ratios(rows)], seed)
    whole = {name: next(row for row in rows if row["run"] == f"all of {name}") for name in (PACKAGE, STOCK)}
    means = {name: next(row["mean"] for row in rows if row["run"] == f"score of {called}")
             for name, called in ((PACKAGE, PACKAGE), (STOCK, score.CONTROL))}  # fmt: skip
    lines = [f"| | {PACKAGE} | {STOCK} |", "|---|---|---|"]

    def line(what: str, cell: Any) -> None:
        lines.append(f"| {what} | {cell(PACKAGE)} | {cell(STOCK)} |")

    def rate(name: str) -> str:
        found = sorted(row["busy_tokens_a_second"] for row in of(rows, name))
        return f"{found[0]:,.0f} to {found[-1]:,.0f}"

    line("tokens a second while the queue is full, by round", rate)
    line(
        "by stock's: median round (interval)",
        lambda n: f"{middle:.3f} ({low:.3f} to {high:.3f})" if n == PACKAGE else 1,
    )
    line("retracts", lambda n: total(rows, n, "engine_retracts"))
    line("answered by a load", lambda n: total(rows, n, "loads"))
    line("tokens prefilled", lambda n: f"{total(rows, n, 'prefill_tokens'):,}")
    for key, what in (("gap_p50_ms", "p50"), ("gap_p99_ms", "p99"), ("gap_max_ms", "longest")):
        line(f"{what} gap between tokens, ms", lambda n, key=key: f"{whole[n][key]:.1f}")
    line("of a second turn's prompt, found in the prefix tree",
         lambda n: f"{sum(row['second_turns_cached'] for row in of(rows, n)) / len(of(rows, n)):.1%}")  # fmt: skip
    line("mean log probability of a token", lambda n: f"{means[n]:.3f}")
    return lines


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens in each second, a panel a server, rounds side by side."""
    figure, axes = plt.subplots(2, 1, figsize=(11, 6), sharex=True, sharey=True)
    for axis, name, colour in zip(axes, (PACKAGE, STOCK), ("tab:blue", "tab:orange"), strict=True):
        begin = 0
        for row in of(rows, name):
            found = row["each_second"]
            axis.stairs(found, range(begin, begin + len(found) + 1), color=colour, fill=True, alpha=0.6)
            begin += len(found)
            axis.axvline(begin, color="grey", linewidth=0.5)
        axis.set_title(f"{name}: {total(rows, name, 'engine_retracts')} retracts, "
                       f"{total(rows, name, 'prefill_tokens'):,} tokens prefilled", fontsize=10)  # fmt: skip
        axis.set_ylabel("tokens a second")
        axis.grid(visible=True, alpha=0.3)
    axes[-1].set_xlabel("seconds of the server's own rounds (grey: the next round)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for both servers."""
    parser = results.parser(__doc__, "plain-pressure")
    beside.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=60, help="of a round; each has two turns")
    parser.add_argument("--concurrency", type=int, default=24, help="clients")
    parser.add_argument(
        "--most-seconds", type=float, default=30, help="of a server's part of a round; then it is cut off"
    )
    parser.add_argument("--shared", type=int, default=1024, help="tokens of the beginnings that prompts share")
    parser.add_argument("--prompt", type=int, nargs=2, default=(200, 2000), help="fewest and most tokens behind them")
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(300, 900))
    parser.add_argument("--score", type=int, default=60, help="answers of each server to score")
    arguments = servers.parse(parser, argv)
    arguments.server = [*SERVER, *arguments.server]
    return arguments


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    rows = measure(arguments)
    bounds = judge(rows, arguments)
    lines = table(rows, arguments.seed)
    print("\n".join(lines))
    path = results.write(arguments.name, rows, bounds, arguments.out)
    plot(rows, path.with_suffix(".png"))
    picture = f"![Tokens in each second]({path.stem}.png)"
    results.page(path, "A cache that is too small, with this package and without", "", [*lines, "", picture])
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
