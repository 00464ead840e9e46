#!/usr/bin/env python3
"""A restored request leaves its pages to the prefix tree, and the next turn of its conversation reads them.

    python3 -m benchmarks.plain.second_turn --model-path MODEL

One plain server with this package, DSV4_VERIFY=1. A first turn is retracted (retract_at) where n, its saved tokens, is
1 to 127 behind a page's edge: the window of such a copy begins in the page before, whose other rows were not loaded.
It ends a few tokens later, every other one a page later. Then its second turn is read: how likely is each token behind
the last whole page? Once as the tree finds it, and once more when the cache was flushed and all of it is computed.
Equal but for rounding, if the tree holds nothing wrong. How far rounding goes say the control's conversations, the same
ones never retracted. A third run zeroes a cache family in each copy before it is loaded: that must show.
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
from benchmarks.plain.conversations import PAGE, ending_behind_an_edge
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import Load, Run, warm_up
from sglang_dsv4.livetest.retract_stats import counted_at, read_log, together
from sglang_dsv4.livetest.zeroing import OFF, VARIABLE

CHECKOUT = Path(__file__).resolve().parents[2]
CONTROL, RESTORED = "never retracted", "restored"
FEW_TOKENS = 256  # behind what the tree holds; a copy of no more is not loaded
KEEPER = 64  # prompt of the request that runs beside: the engine never retracts the last one
NEAR, FAR = (4, 60), (160, 300)  # tokens of an answer behind its retract: the last whole page was loaded, or not
SPREADS = 2  # how far beyond the control's largest difference a difference may be


@dataclass
class Turn:
    """One first turn: its prompt, after how many tokens of the answer it is retracted, and how many there are."""

    prompt: list[int]
    retract_at: int
    new_tokens: int
    follow_up: list[int]


def turns_of(arguments: argparse.Namespace) -> list[Turn]:
    """Seeded; each is retracted with more tokens behind its prompt than are left to the engine."""
    draw = random.Random(arguments.seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(10, arguments.vocabulary) for _ in range(count)]

    found = []
    for number in range(arguments.conversations):
        prompt = tokens(draw.randint(*arguments.prompt))
        at = ending_behind_an_edge(len(prompt), FEW_TOKENS + draw.randint(2, 60))
        rest = draw.randint(*(NEAR, FAR)[number % 2])
        found.append(Turn(prompt, at, at + rest, tokens(draw.randint(20, 60))))
    return found


class Reader:
    """Runs conversations at one server, and reads their second turns."""

    def __init__(self, server: servers.Server, turns: list[Turn], arguments: argparse.Namespace) -> None:
        self.server, self.turns, self.arguments = server, turns, arguments

    def run(self, name: str, retracted: bool) -> dict[str, Any]:
        """Every conversation, then every second turn on a flushed cache; the row of the result."""
        start = self.server.log.stat().st_size
        found, lost = [], 0
        with self._keeper() if retracted else contextlib.nullcontext():
            for number, turn in enumerate(self.turns):
                first = self._first_turn(name, number, turn, retracted)
                lost += first is None
                if first is not None:
                    found.append((first, turn, *self._second_turn(first, turn)))
        loads = read_log(self.server.log, start)["loads"]
        self._flush()
        differences, cached = [], []
        for first, turn, warm, hits in found:
            cold, still_cached = self._second_turn(first, turn)
            if still_cached:
                raise RuntimeError(f"{still_cached} tokens were cached after a flush")
            differences.append([abs(a - b) for a, b in zip(warm, cold, strict=True)])
            cached.append(hits / edge_of(first))
        self._flush()
        return row_of(name, differences, cached, lost, loads)

    def _first_turn(self, name: str, number: int, turn: Turn, retracted: bool) -> list[int] | None:
        """The tokens of prompt and answer; None where the request was lost."""
        rid = f"{name} {number}" + (f"@{turn.retract_at}" if retracted else "")
        run = Run(Load([turn.prompt], [turn.new_tokens]), self.arguments, self.server.url, None, None)
        answer = run.ask(turn.prompt, turn.new_tokens, 0, {"rid": rid})
        if answer.outcome != "finished":
            print(f"  {rid}: {answer.outcome}: {answer.error}", flush=True)
            return None
        return [*turn.prompt, *answer.tokens]

    def _second_turn(self, first: list[int], turn: Turn) -> tuple[list[float], int]:
        edge, tokens = edge_of(first), [*first, *turn.follow_up]
        return score.read(self.server.url, tokens[: edge + 1], tokens[edge + 1 :], self.arguments.timeout)

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


def row_of(name: str, differences: list[list[float]], cached: list[float], lost: int, loads: int) -> dict[str, Any]:
    """What a run says: how far log probabilities are apart, each conversation's mean, and of all tokens."""
    means = [statistics.mean(found) for found in differences]
    return {
        "run": name, "conversations": len(differences), "lost": lost, "loads": loads,
        "tokens": sum(map(len, differences)),
        "cached": statistics.mean(cached) if cached else 0.0, "found_nothing": cached.count(0.0),
        "difference_median": statistics.median(means) if means else 0.0, "difference_largest": max(means, default=0.0),
        "token_largest": max((max(found) for found in differences), default=0.0),
    }  # fmt: skip


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a run, and one of what the server counted. Raises ServerDied."""
    turns = turns_of(arguments)
    folder = arguments.logs / arguments.name
    folder.mkdir(parents=True, exist_ok=True)
    word = (folder / "zero_family.txt").resolve()
    word.write_text(OFF)
    environment = {
        **servers.model_package("benchmarks.plain.retract_at", CHECKOUT), VARIABLE: str(word), "DSV4_VERIFY": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }  # fmt: skip
    given = ["--enable-metrics", *arguments.server]
    server = servers.launch("plain", arguments.model_path, given, environment, folder)
    try:
        servers.wait_until_up([server], arguments.patience)
        warm_up([server.url], arguments.vocabulary, arguments.timeout)
        reader = Reader(server, turns, arguments)
        rows = [reader.run(CONTROL, retracted=False), reader.run(RESTORED, retracted=True)]
        rows.append({"run": "server", **together(counted_at(server.url), read_log(server.log))})
        word.write_text(arguments.zero)
        rows.append(reader.run(f"{arguments.zero} zeroed", retracted=True))
    finally:
        server.stop()
    return rows


def judge(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every retracted conversation was restored, and its second turn differs no more than the control's."""
    control, restored, server, zeroed = rows
    largest = f"{SPREADS * control['difference_largest']:.6f}"
    middle = f"{SPREADS * control['difference_median']:.6f}"
    name = "mean difference of a second turn's log probabilities"
    return [
        results.bound("first turns lost", "<= 0", control["lost"] + restored["lost"]),
        results.bound("loads, never retracted", "<= 0", control["loads"]),
        results.bound("loads, restored", f">= {arguments.conversations}", restored["loads"]),
        results.bound("loads not compared with their copy", "<= 0", server["loads"] - server.get("verified", 0)),
        results.bound("trouble in the log", "<= 0", len(server["trouble"])),
        results.bound("host memory held at the end, bytes", "<= 0", server.get("held_bytes_at_end", 0)),
        results.bound("second turns that found a prefix, restored", f">= {arguments.conversations // 2}",
                      restored["conversations"] - restored["found_nothing"]),
        results.bound(f"{name}, restored: median", f"<= {middle}", restored["difference_median"]),
        results.bound(f"{name}, restored: largest", f"<= {largest}", restored["difference_largest"]),
        results.bound(f"{name}, {zeroed['run']}: largest", f">= {largest}", zeroed["difference_largest"]),
    ]  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside.add_arguments(parser)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--prompt", type=int, nargs=2, default=(300, 2500), help="shortest and longest first prompt")
    parser.add_argument("--zero", metavar="FAMILY", default="c4_kv", help="the family of the damaged run (c4_kv)")
    parser.add_argument("--name", default="plain-second-turn")
    return servers.parse(parser, argv)


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    rows = measure(arguments)
    results.show(rows)
    bounds = judge(rows, arguments)
    results.write(arguments.name, rows, bounds, arguments.out)
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
