#!/usr/bin/env python3
"""Compares a cache that is too small for its requests, with this package and without, in turns on one machine.

    python3 -m benchmarks.plain_pressure --model-path MODEL --rounds 4 --conversations 40 --most-seconds 13 \\
        -- --chunked-prefill-size 512 --mem-fraction-static 0.8
    python3 -m benchmarks.plain_pressure --sessions --turns 6 --prompt 500 3000 --new-tokens 100 500 \\
        --follow-up 50 200 --name sessions-pressure --model-path MODEL ...

Two plain servers stand on one card: with this package, and stock (DSV4_ENABLED=0). Their window pool has the engine's
default size (a tenth), and --max-total-tokens is small: no retract is forced, and both retract. In each round both get
the same conversations, one server after the other, the other one suspended; the first one changes. More clients than
run at once keep the queue full until the last conversation has begun, and the rate of a round is that of the tokens
until then. A server that takes longer than --most-seconds is cut off there.

--sessions: this package keeps the conversations, --turns of each. A client sends the next turn as soon as it has the
answer, and that turn waits for those of other conversations, which take the windows of this one, and of long ones the
pages. Then stock prefills the whole conversation again, and this package what the turn adds. The answers are those of
a chat, 100 to 500 tokens behind 1,500 to 4,000 of system prompt and question: of such a turn stock spends most of the
time in prefills. Where answers are much longer than questions, decode steps take the time of both servers.

As many answers of both are then scored by the stock server when it is quiet: stock's are the control.
Arguments after -- go to both servers. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.client import add_requests
from benchmarks.steps import CONFIDENCE, MARGIN, interval
from sglang_dsv4.bench import results
from sglang_dsv4.command_line import number
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import FOLLOW_UP, Answer, Load, Run, warm_up
from sglang_dsv4.livetest.retract_stats import counted_at, percentile, read_log

PACKAGE, STOCK = "with this package", "stock"
SERVER = ["--max-total-tokens", "65536", "--enable-metrics"]
LEAST_RETRACTS = 50  # of each server, or there was no pressure; with --sessions one: the pressure is that of turns
FASTER = 1.5  # times stock's tokens a second with --sessions
WARM_UP = -1  # the round before the first one
TOGETHER = 8  # answers scored at once
COUNTED = ("engine_retracts", "prefill_tokens", "saves", "loads", "fallbacks", "trouble")
PAGE, WINDOW = 256, 128
SHARED = 4  # beginnings

# ---------------------------------------------------------------------- conversations


@dataclass
class Conversations:
    """Makes seeded first turns with shared beginnings, and what each later turn adds, with lengths of the answers.

    Where a first turn's tokens less one are 1 to 127 behind a page's edge, a request that was restored leaves a last
    page whose states are not all there; a second turn would read them. Half of the first turns end there.
    """

    first: Load
    later: list[Load]  # for each later turn, the tokens that it puts behind the answer before it

    @classmethod
    def of(
        cls, seed: str, arguments: argparse.Namespace, turns: int = 2, follow_up: Sequence[int] = FOLLOW_UP
    ) -> Conversations:
        """Makes them of ``arguments``: conversations, shared, prompt, new_tokens and vocabulary."""
        draw = random.Random(seed)

        def tokens(count: int) -> list[int]:
            return [draw.randrange(10, arguments.vocabulary) for _ in range(count)]

        low, high = arguments.prompt
        beginnings = [tokens(arguments.shared) for _ in range(SHARED)]
        made = cls(Load([], []), [Load([], []) for _ in range(turns - 1)])
        for at in range(arguments.conversations):
            prompt = beginnings[at % SHARED] + tokens(round(low * (high / low) ** draw.random()))
            wanted = draw.randint(*arguments.new_tokens)
            made.first.prompts.append(prompt)
            made.first.new_tokens.append(ending_behind_an_edge(len(prompt), wanted) if at % 2 else wanted)
            for turn in made.later:
                turn.prompts.append(tokens(draw.randint(*follow_up)))
                turn.new_tokens.append(draw.randint(*arguments.new_tokens))
        return made


def ending_behind_an_edge(prompt: int, new_tokens: int) -> int:
    """Returns ``new_tokens`` or more, so that the tokens saved end 1 to 127 behind a page's edge."""
    over = (prompt + new_tokens - 1) % PAGE
    if 0 < over < WINDOW:
        return new_tokens
    return new_tokens + (-over) % PAGE + 1 + new_tokens % (WINDOW - 1)


class Talks(Run):
    """Runs all turns of each conversation; ``answers`` and ``load`` have those of the first one first, in their order.

    busy: the seconds at the beginning in which more requests wait to be sent. What is not done after ``most_seconds``
    is cut off: its outcome is "cut".
    """

    def __init__(self, talks: Conversations, arguments: argparse.Namespace, url: str) -> None:
        super().__init__(talks.first, arguments, url, None, None)
        self.talks = talks
        self._asked: dict[int, list[tuple[list[int], int, Answer]]] = {}
        self.began = self._last_begun = 0.0
        self._cut = False

    def execute(self, label: str) -> Talks:
        """Sends one, see Run."""
        self.began = self._last_begun = time.monotonic()
        timer = threading.Timer(self.arguments.most_seconds, self._cut_off)
        timer.start()
        try:
            super().execute(label)
        finally:
            timer.cancel()
        asked = [turn for number in range(len(self.answers)) for turn in self._asked[number]]
        self.load = Load([prompt for prompt, _, _ in asked], [count for _, count, _ in asked])
        self.answers = [answer for _, _, answer in asked]
        return self

    def _cut_off(self) -> None:
        self._cut = True
        self._last_begun = time.monotonic()  # requests waited until now
        servers.post(self.decode, "/abort_request", {"abort_all": True}, 30)

    def _one(self, number: int) -> Answer:
        if not self._cut:
            self._last_begun = max(self._last_begun, time.monotonic())
        prompt, wanted = self.talks.first.prompts[number], self.talks.first.new_tokens[number]
        answer = self._unless_cut(prompt, wanted, number)
        asked = [(prompt, wanted, answer)]
        for turn in self.talks.later:
            prompt, wanted = prompt + answer.tokens + turn.prompts[number], turn.new_tokens[number]
            if answer.outcome == "whole":
                answer = self._unless_cut(prompt, wanted, number)
            else:
                answer = Answer(answer.outcome, error="no turn before it")
            asked.append((prompt, wanted, answer))
        self._asked[number] = asked
        return asked[0][2]

    def _unless_cut(self, prompt: list[int], new_tokens: int, number: int) -> Answer:
        answer = Answer("cut") if self._cut else self.ask(prompt, new_tokens, number)
        if answer.outcome == "unsent" or (
            self._cut and answer.outcome in {"refused", "failed"}
        ):  # too late, or aborted
            answer.outcome = "cut"
        return answer

    def summary(self) -> dict[str, Any]:
        """Summarises as Run does, with the rate while requests wait, and the tokens of later turns that were cached."""
        turns = 1 + len(self.talks.later)
        each = list(zip(self.load.prompts, self.answers, strict=True))
        later = [one for number, one in enumerate(each) if number % turns]
        asked = sum(len(prompt) for prompt, answer in later if answer.outcome == "whole")
        busy = self._last_begun - self.began
        arrived = sum(count for at, count in arrivals(self.answers) if at <= self._last_begun)
        return {
            **super().summary(),
            "cut": sum(answer.outcome == "cut" for answer in self.answers), "busy_seconds": busy,
            "busy_tokens_a_second": arrived / busy if busy else 0.0,
            "later_turns_cached": sum(answer.cached for _, answer in later) / max(1, asked),
            "from_host": sum(answer.on_host for answer in self.answers),
        }  # fmt: skip


def arrivals(answers: Sequence[Answer]) -> list[tuple[float, int]]:
    """Returns when tokens came, and how many at once."""
    found = []
    for answer in answers:
        counts = [0, *(count for _, count in answer.arrived)]
        steps = [later - earlier for earlier, later in itertools.pairwise(counts)]
        found += [(at, step) for (at, _), step in zip(answer.arrived, steps, strict=True)]
    return found


# ---------------------------------------------------------------------- the run


@contextlib.contextmanager
def package_and_stock(
    arguments: argparse.Namespace, more: Mapping[str, str] | None = None
) -> Iterator[dict[str, servers.Server]]:
    """Starts two plain servers of one model and the same arguments, warm and suspended. Raises ServerDied.

    more: environment of the one with this package, which keeps no sessions unless that says so.
    """
    ours = {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models", "DSV4_ENABLED": "1", "DSV4_SESSIONS": "off",
        **(more or {}),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stock = score.launch_stock(arguments, "plain", {}, score.APART, arguments.server)
        stack.callback(stock.stop)
        folder = arguments.logs / arguments.name
        package = servers.launch("plain", arguments.model_path, arguments.server, ours, folder)
        stack.callback(package.stop)
        servers.wait_until_up([package, stock], arguments.patience)
        warm_up([package.url, stock.url], arguments.vocabulary, arguments.timeout)
        for server in (package, stock):
            server.suspend()
        yield {PACKAGE: package, STOCK: stock}


def talk(server: servers.Server, name: str, round_: int, arguments: argparse.Namespace) -> tuple[Talks, dict[str, Any]]:
    """Runs one server's part of a round; returns its answers, and the row of the result."""
    talks = Conversations.of(f"{arguments.seed}-{round_}", arguments, arguments.turns, arguments.follow_up)
    with server.awake():
        servers.post(server.url, "/flush_cache?timeout=30", {}, 60)
        start = server.log.stat().st_size
        run = Talks(talks, arguments, server.url).execute(f"round {round_}, {name}")
        servers.post(server.url, "/flush_cache?timeout=30", {}, 60)  # it is idle from here on
        said = read_log(server.log, start)
    row = {"run": name, "round": round_, **run.summary(), **{key: said[key] for key in COUNTED}}
    results.show([row])
    return run, row


def measure(both: dict[str, servers.Server], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each server and round, one for each server with its counts, and those of the score."""
    runs: dict[str, list[Talks]] = {PACKAGE: [], STOCK: []}
    rows = []
    few = argparse.Namespace(**vars(arguments) | {"conversations": arguments.concurrency, "turns": 2})
    for name, server in both.items():  # not looked at: some shapes of batches compile here
        talk(server, name, WARM_UP, few)
    for round_ in range(arguments.rounds):
        for name in sorted(both, reverse=bool(round_ % 2)):
            run, row = talk(both[name], name, round_, arguments)
            runs[name].append(run)
            rows.append(row)
    both[PACKAGE].wake()
    counted = {PACKAGE: counted_at(both[PACKAGE].url), STOCK: {}}
    rows += [{"run": f"all of {name}", **gaps_of(done), **counted[name]} for name, done in runs.items()]
    both[STOCK].wake()
    given = ((score.CONTROL, runs[STOCK]), (PACKAGE, runs[PACKAGE]))
    return rows + [scored(name, both[STOCK].url, done, arguments) for name, done in given]


def gaps_of(runs: Sequence[Talks]) -> dict[str, float]:
    """Returns p50, p99 and longest gap between two tokens of one answer, over all runs."""
    gaps = [gap for run in runs for answer in run.answers for gap in answer.gaps_ms]
    return {"gap_p50_ms": percentile(gaps, 50), "gap_p99_ms": percentile(gaps, 99), "gap_max_ms": max(gaps, default=0)}


def scored(name: str, url: str, runs: list[Talks], arguments: argparse.Namespace) -> dict[str, Any]:
    """Scores the first ``--score`` whole answers of ``runs``, or all."""
    asked = [zip(run.load.prompts, run.load.new_tokens, run.answers, strict=True) for run in runs]
    whole = [one for one in itertools.chain.from_iterable(asked) if one[2].outcome == "whole"][: arguments.score]
    load = Load([prompt for prompt, _, _ in whole], [count for _, count, _ in whole])
    answers = [answer for _, _, answer in whole]
    return score.summary(name, score.score_each(url, load, answers, arguments.timeout, TOGETHER))


def judge(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the bounds: both retracted, nothing lost, answers as likely and not slower than stock's.

    With HiCache stock finds most of a retracted request on the host: a copy need not be faster.
    """
    of = {name: [row for row in rows if row["run"] == name] for name in (PACKAGE, STOCK)}

    def total(name: str, key: str) -> int:
        return sum(row[key] for row in of[name])

    pairs = zip(of[PACKAGE], of[STOCK], strict=True)
    ratios = [ours["busy_tokens_a_second"] / stocks["busy_tokens_a_second"] for ours, stocks in pairs]
    middle, low, _ = interval([ratios], arguments.seed)
    least = FASTER if arguments.sessions else MARGIN if servers.HICACHE in arguments.server else 1.0
    retracts = 1 if arguments.sessions else LEAST_RETRACTS
    ours = next(row for row in rows if row["run"] == f"all of {PACKAGE}")
    scores = [row for row in rows if row["run"].startswith("score of ")]
    missing = total(PACKAGE, "asked") - total(PACKAGE, "whole") - total(PACKAGE, "cut")
    answers = max(1, min(arguments.score, *(total(name, "whole") for name in of)))
    loads = [results.bound("retracts answered by a load", ">= 1", total(PACKAGE, "loads"))]
    return [
        results.bound("requests without a whole answer, but for those cut off", "<= 0", missing),
        results.bound("trouble in the log", "<= 0", sum(len(row["trouble"]) for row in of[PACKAGE])),
        *(
            results.bound(f"retracts, {name}", f">= {retracts}", total(name, "engine_retracts"))
            for name in (PACKAGE, STOCK)
        ),
        *(judge_sessions(ours.get("sessions", {})) if arguments.sessions else loads),
        results.bound("metrics of this package", ">= 1", int("held_bytes_at_end" in ours)),
        results.bound("host memory held at the end, bytes", "<= 0", ours.get("held_bytes_at_end", 0)),
        results.bound("tokens a second, by stock's: median round", f">= {least}", middle),
        results.bound(f"the same, low end of the {CONFIDENCE:.0%} interval", f">= {least}", low),
        *score.judge(scores, answers, {PACKAGE: PACKAGE}),
    ]


def judge_sessions(counted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the bounds of the sessions that a server counted: some were used, and a flush left none."""
    return [
        results.bound("turns that went on from a session", ">= 1", sum(counted.get("hits", {}).values())),
        results.bound("points left after a flush", "<= 0", counted.get("points", 0)),
    ]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line; the arguments behind ``--`` are for both servers."""
    parser = results.parser(__doc__, "plain-pressure")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=60, help="of a round")
    parser.add_argument("--turns", type=number(int, 2, 100), default=2, help="of each conversation")
    parser.add_argument("--concurrency", type=int, default=24, help="clients")
    parser.add_argument("--most-seconds", type=float, default=30, help="of a server's part of a round")
    parser.add_argument("--shared", type=int, default=1024, help="tokens of the beginnings that prompts share")
    parser.add_argument("--prompt", type=int, nargs=2, default=(200, 2000), help="fewest and most tokens behind them")
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(300, 900), help="of each turn's answer")
    help_ = "tokens that a later turn puts behind the answer"
    parser.add_argument("--follow-up", type=int, nargs=2, default=FOLLOW_UP, help=help_)
    parser.add_argument("--sessions", action="store_true", help="this package keeps the conversations")
    parser.add_argument("--host-gb", type=number(float, 0.1), default=8, help="DSV4_HOST_GB with --sessions")
    parser.add_argument("--score", type=int, default=60, help="answers of each server to score")
    add_requests(parser)
    arguments = servers.parse(parser, argv)
    if arguments.sessions and servers.HICACHE in arguments.server:
        parser.error(f"--sessions: a server with {servers.HICACHE} keeps none")
    if arguments.conversations <= arguments.concurrency:
        parser.error(f"--conversations {arguments.conversations}: more than --concurrency, or none waits to be sent")
    arguments.server = [*SERVER, *arguments.server]
    return arguments


def main() -> int:
    """Returns exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    keeps = {"DSV4_SESSIONS": "auto", "DSV4_HOST_GB": str(arguments.host_gb)} if arguments.sessions else {}
    with package_and_stock(arguments, keeps) as both:  # they take half a minute to end: the result is written before
        rows = measure(both, arguments)
        return results.finish(arguments, rows, judge(rows, arguments))


if __name__ == "__main__":
    sys.exit(main())
