#!/usr/bin/env python3
"""A restored request leaves its pages to the prefix tree, and the next turn of its conversation reads them.

    python3 -m benchmarks.plain.second_turn --model-path MODEL

One plain server with this package, DSV4_VERIFY=1. A first turn is retracted (retract_at) where n, its saved tokens, is
half a window or more behind a page's edge: the window of such a copy begins in the page before, whose other rows were
not loaded, and are poison. It ends a few tokens later, or a page later. Then it is read as its second turn reads it:
how likely is each token of the answer behind the last whole page? Once as the tree finds it, and once more when the
cache was flushed and all of it is computed. If the tree holds nothing wrong, the first is no lower: how far rounding
goes say conversations that were never retracted. A last run publishes the half-loaded page: that must show.
Arguments after -- go to the server. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.plain import beside
from benchmarks.plain.conversations import PAGE, WINDOW
from benchmarks.plain.retract_at import AT, UNREPAIRED
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import Load, Run, warm_up
from sglang_dsv4.livetest.retract_stats import counted_at, read_log, together

CHECKOUT = Path(__file__).resolve().parents[2]
CONTROL, SOON, LATER, DAMAGED = "never retracted", "restored, ends soon", "restored, ends a page later", "not repaired"
READ = WINDOW // 2  # tokens behind the last whole page: further ones hardly see what is wrong in it
BEHIND = (READ, WINDOW - 4)  # tokens saved behind a page's edge
AFTER = {SOON: (4, 60), LATER: (PAGE + 4, PAGE + 60)}  # tokens of an answer behind its retract
PROMPT = (200, 250)  # tokens of a prompt behind its whole pages, which stay in the tree
PAGES = (1, 4)  # those pages
KEEPER = 64  # prompt of the request that runs beside: the engine never retracts the last one


@dataclass
class Turn:
    """One first turn: its prompt, after how many tokens of the answer it is retracted, and how many there are."""

    prompt: list[int]
    retract_at: int
    new_tokens: int


def turns_of(arguments: argparse.Namespace, after: tuple[int, int]) -> list[Turn]:
    """Seeded; ``after``: fewest and most tokens behind the retract."""
    draw, found = random.Random(f"{arguments.seed} {after}"), []
    for _ in range(arguments.conversations):
        length = draw.randint(*PAGES) * PAGE + draw.randint(*PROMPT)
        # One page behind what the tree has, and more: no shorter copy is loaded.
        saved = (length // PAGE + 1) * PAGE + draw.randint(*BEHIND)
        at = saved - length + 1
        found.append(
            Turn([draw.randrange(10, arguments.vocabulary) for _ in range(length)], at, at + draw.randint(*after))
        )
    return found


class Reader:
    """Runs conversations at one server, and reads their second turns."""

    def __init__(self, server: servers.Server, arguments: argparse.Namespace) -> None:
        self.server, self.arguments = server, arguments

    def run(self, name: str, turns: list[Turn], sign: str = "") -> dict[str, Any]:
        """Every conversation, then every second turn on a flushed cache; the row of the result.

        sign: behind a request's name, before its token; without one it is not retracted.
        """
        start = self.server.log.stat().st_size
        found, lost = [], 0
        with self._keeper() if sign else contextlib.nullcontext():
            for number, turn in enumerate(turns):
                first = self._first_turn(f"{name} {number}" + (sign and f"{sign}{turn.retract_at}"), turn)
                lost += first is None
                if first is not None:
                    found.append((first, *self._read(first)))
        loads = read_log(self.server.log, start)["loads"]
        self._flush()
        cold = [self._read(first) for first, *_ in found]
        self._flush()
        if any(hits for _, hits in cold):
            raise RuntimeError("tokens were cached after a flush")
        return {
            "run": name, "conversations": len(found), "lost": lost, "loads": loads,
            "cached": statistics.mean(hits / edge_of(first) for first, _, hits in found) if found else 0.0,
            **score.fall([warm for _, warm, _ in found], [[values for values, _ in cold]]),
        }  # fmt: skip

    def _first_turn(self, rid: str, turn: Turn) -> list[int] | None:
        """The tokens of prompt and answer; None where the request was lost."""
        run = Run(Load([turn.prompt], [turn.new_tokens]), self.arguments, self.server.url, None, None)
        answer = run.ask(turn.prompt, turn.new_tokens, 0, {"rid": rid})
        if answer.outcome != "finished":
            print(f"  {rid}: {answer.outcome}: {answer.error}", flush=True)
            return None
        return [*turn.prompt, *answer.tokens]

    def _read(self, first: list[int]) -> tuple[list[float], int]:
        """Log probabilities of the tokens behind the last whole page, and how many before it the tree had."""
        start = edge_of(first) + 1
        return score.read(self.server.url, first[:start], first[start : start + READ], self.arguments.timeout)

    def _flush(self) -> None:
        servers.post(self.server.url, "/flush_cache?timeout=30", {}, 60)

    @contextlib.contextmanager
    def _keeper(self) -> Iterator[None]:
        """A request that runs inside, and has more tokens than any other one."""
        stop = threading.Event()
        body = {
            "input_ids": list(range(20, 20 + KEEPER)),
            "sampling_params": {"max_new_tokens": 1 << 15, "temperature": 0, "ignore_eos": True},
        }

        def keep() -> None:
            for _ in servers.stream(self.server.url, body, self.arguments.timeout):
                if stop.is_set():
                    return

        keeper = threading.Thread(target=keep, daemon=True)
        keeper.start()
        time.sleep(1)
        try:
            yield
        finally:
            stop.set()
            keeper.join()


def edge_of(first: list[int]) -> int:
    """Tokens of the whole pages that a first turn leaves to the tree; the last token's cache was not made."""
    return (len(first) - 1) // PAGE * PAGE


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a run, and one of what the server counted. Raises ServerDied."""
    turns = {name: turns_of(arguments, after) for name, after in AFTER.items()}
    environment = {
        **servers.model_package("benchmarks.plain.retract_at", CHECKOUT), "DSV4_VERIFY": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }  # fmt: skip
    given = ["--enable-metrics", *arguments.server]
    server = servers.launch("plain", arguments.model_path, given, environment, arguments.logs / arguments.name)
    try:
        servers.wait_until_up([server], arguments.patience)
        warm_up([server.url], arguments.vocabulary, arguments.timeout)
        reader = Reader(server, arguments)
        rows = [reader.run(CONTROL, turns[SOON]), *(reader.run(name, turns[name], AT) for name in AFTER)]
        rows.append(reader.run(DAMAGED, turns[SOON], UNREPAIRED))
        rows.append({"run": "server", **together(counted_at(server.url), read_log(server.log))})
    finally:
        server.stop()
    return rows


def judge(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every retracted conversation was restored, and what it left falls no lower than rounding; the damage does."""
    control, *restored, damaged, server = rows
    # Decoding chose the tokens that its own cache makes likely: the control may well rise, which is not asked for.
    least = min(control["fall"], 0.0) - score.ERRORS * control["fall_error"]

    def highest(row: dict[str, Any], sign: str) -> dict[str, Any]:
        value = row["fall"] + score.ERRORS * row["fall_error"]
        name = f"fall of a second turn's log probabilities and {score.ERRORS} standard errors, {row['run']}"
        return results.bound(name, f"{sign} {least:.6f}", value)

    return [
        results.bound("first turns lost", "<= 0", sum(row["lost"] for row in rows[:-1])),
        results.bound("loads, never retracted", "<= 0", control["loads"]),
        *(results.bound(f"loads, {row['run']}", f">= {arguments.conversations}", row["loads"])
          for row in (*restored, damaged)),
        results.bound("loads not compared with their copy", "<= 0", server["loads"] - server.get("verified", 0)),
        results.bound("trouble in the log", "<= 0", len(server["trouble"])),
        results.bound("host memory held at the end, bytes", "<= 0", server.get("held_bytes_at_end", 0)),
        *(results.bound(f"of a second turn, found in the prefix tree, {row['run']}", ">= 0.3", row["cached"])
          for row in (*restored, damaged)),
        *(highest(row, ">=") for row in restored),
        highest(damaged, "<="),
    ]  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for the server."""
    parser = results.parser(__doc__, "plain-second-turn")
    beside.add_arguments(parser)
    parser.add_argument("--conversations", type=int, default=12, help="of each run")
    return servers.parse(parser, argv)


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    rows = measure(arguments)
    results.show(rows)
    bounds = judge(rows, arguments)
    return results.finish(arguments, rows, bounds)


if __name__ == "__main__":
    sys.exit(main())
