"""Compares agents with more sessions than the device holds: stock, stock with HiCache, and this package, by turns.

    python3 -m benchmarks.session_agents --config benchmarks/flash_config.json --experts 16 -- --mem-fraction-static 0.9
    python3 -m benchmarks.session_agents --idle --config CONFIG --name sessions-idle -- --mem-fraction-static 0.9
    python3 -m benchmarks.session_agents --without-hicache --config CONFIG --contexts 1000000 --device-tokens 1600000 \\
        --over 1.25 --concurrency 1 --turns 1 --timeout 600 --name sessions-1m -- --mem-fraction-static 0.9

Three plain servers stand on one card, all but one suspended. This package gets as much host memory as HiCache pins, so
it starts behind it. Each agent begins with a context of so many tokens, and each of its turns adds --turn tokens, the
answer among them. The sessions of all agents take --over times the device cache. In each turn the agents come in
another order; two agents keep theirs, so that each finds what the other one left. Of first turns the time to the first
token is reported. Stock also runs so few agents that the device holds their sessions, to tell what a later turn takes
that loads nothing.

The strict bounds are those of a whole model at long contexts. In a model of few layers the new tokens of a turn take a
quarter of the time, whatever a cache does. At very long contexts a later turn is compared with a first one.

--without-hicache: stock and this package alone, with --host-gb of host memory.
--idle: so few agents that the device holds their sessions, on stock and this package: sessions may cost nothing there.
The servers go on turn by turn, and each turn of all agents is compared with stock's.
--worn: this package's arena begins each round full of others' conversations, its free units scattered.
Arguments after -- go to all servers. Exit status 1 when a bound is missed.
"""

import argparse
import contextlib
import itertools
import json
import random
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.client import add_requests, model_of
from benchmarks.steps import CONFIDENCE, interval
from sglang_dsv4.bench import results
from sglang_dsv4.command_line import CONCURRENCY, COUNT, number, readable_file
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.in_server import environment
from sglang_dsv4.livetest.load import Load, Run, count_outcomes, warm_up
from sglang_dsv4.livetest.retract_stats import KEPT, by_rank, counted_at, percentile, read_log, said_by_first

STOCK, HICACHE, SESSIONS = "stock", "stock with HiCache", "with sessions"
RESIDENT = "stock, sessions on the device"
WITH_HICACHE = ["--enable-hierarchical-cache", "--hicache-ratio", "2"]
HICACHE_APART = 33  # of its port, from the port of a plain server; stock stands at score.APART
PAGE = 256
REPOSITORY = Path(__file__).parents[1]
LONG = 65536  # tokens of a context, from which on the two lines below hold
FIRST_TOKEN, TURNS, WHOLE = 0.11, 7, 40  # of stock's; times stock's; layers from which on a model is judged by them
ON_DEVICE = 1.15  # of the first token of a session that is still on the device
VERY_LONG, COLD = 500_000, 0.05  # tokens of a context, from which on a later turn is judged by a first one; of its time
SAVE_MS = 0.5  # of the scheduler's time, for the pages of a turn
IDLE = 0.99  # of stock's turns a second
FOUND, MISSED = 0.9, 0.5  # of a conversation that is held; most turns that the device answers, or it is too large
WARM_UP = -1  # the round before the first one, not looked at
WORN_PATIENCE = 600  # seconds in which 30,000 turns of others are played
WARM_UP_CONTEXT = 16384  # most tokens of its contexts
# The line is known by its beginning.
POOL = re.compile(
    r"^\[[^\]]*\] Allocating [\d.]+ GB host memory for V4 \w+ pool '[^']*' "
    r"\(layers=(\d+), pages=(\d+), (?:item|state_page)_bytes=(\d+)",
    re.M,
)

# ---------------------------------------------------------------------- agents


class Turn(Run):
    """Runs one turn of all agents."""

    def found(self) -> int:
        """Counts the agents whose session the server had."""
        new = self.arguments.turn - self.arguments.answer
        pairs = zip(self.load.prompts, self.answers, strict=True)
        return sum(answer.cached >= FOUND * (len(prompt) - new) for prompt, answer in pairs)


class Agents:
    """Holds what the agents of one round have said and heard; the same for each server."""

    def __init__(self, count: int, context: int, round_: int, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self._draw = random.Random(f"{arguments.seed}-{context}-{round_}")
        self.said = [self._tokens(context) for _ in range(count)]

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(10, self.arguments.vocabulary) for _ in range(count)]

    def order(self) -> list[int]:
        """Returns all agents in another order; two agents come by turns."""
        count = len(self.said)
        return list(range(count)) if count <= 2 else self._draw.sample(range(count), count)

    def run(self, load: Load, url: str, label: str) -> Turn:
        """Sends the requests of one turn to a server."""
        return Turn(load, self.arguments, url, None, None).execute(label)

    def turn(self, url: str, order: Sequence[int], label: str) -> Turn:
        """Runs one turn of each agent of ``order``, ``--concurrency`` at a time."""
        answer, added = self.arguments.answer, self.arguments.turn - self.arguments.answer
        prompts = [self.said[agent] for agent in order]
        turn = self.run(Load(prompts, [answer] * len(order)), url, label)
        for agent, heard in zip(order, turn.answers, strict=True):
            self.said[agent] = [*self.said[agent], *heard.tokens, *self._tokens(added)]
        return turn


def agents_for(context: int, arguments: argparse.Namespace) -> int:
    """Returns how many agents outgrow the device cache by ``--over``, at the end of the turns measured."""
    return max(1, round(arguments.over * arguments.device_tokens / (context + arguments.turns * arguments.turn)))


# ---------------------------------------------------------------------- servers


@contextlib.contextmanager
def started(arguments: argparse.Namespace) -> Iterator[dict[str, servers.Server]]:
    """Starts the servers, warm and suspended. Raises ServerDied."""
    given = [*server_words(arguments), *arguments.server]
    with contextlib.ExitStack() as stack:
        up = {STOCK: score.launch_stock(arguments, "stock", {}, score.APART, given)}
        stack.callback(up[STOCK].stop)
        if not (arguments.idle or arguments.without_hicache):
            words = [*given, *WITH_HICACHE]
            up[HICACHE] = score.launch_stock(arguments, "hicache", {}, HICACHE_APART, words)
            stack.callback(up[HICACHE].stop)
        servers.wait_until_up(list(up.values()), arguments.patience)
        gib = pinned_bytes(up[HICACHE].log) / 2**30 if HICACHE in up else arguments.host_gb
        ours = {
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models", "DSV4_ENABLED": "1", "DSV4_SESSIONS": "auto",
            "DSV4_HOST_GB": f"{gib:.6f}",
        }  # fmt: skip
        folder = arguments.logs / arguments.name
        if arguments.worn:
            ours |= environment("benchmarks.worn:install", worn_file(arguments), "0", REPOSITORY)
        up[SESSIONS] = servers.launch("plain", arguments.model_path, given, ours, folder)
        stack.callback(up[SESSIONS].stop)
        servers.wait_until_up(list(up.values()), arguments.patience)
        warm_up([server.url for server in up.values()], arguments.vocabulary, arguments.timeout)
        for server in up.values():
            server.suspend()
        yield up


def worn_file(arguments: argparse.Namespace) -> Path:
    """Returns the file that says how many turns wear the arena down behind a flush."""
    return Path(arguments.logs) / arguments.name / "worn.txt"


def server_words(arguments: argparse.Namespace) -> list[str]:
    """Returns the arguments of all servers. Saves are logged, except with --idle."""
    told = [] if arguments.idle else ["--log-requests", "--log-requests-level", "0"]
    longest = max(arguments.contexts) + (arguments.turns + 3) * arguments.turn
    return ["--context-length", str(longest), "--max-total-tokens", str(arguments.device_tokens),
            "--chunked-prefill-size", str(arguments.chunk), "--enable-metrics", *told]  # fmt: skip


def pinned_bytes(log: Path) -> int:
    """Counts the bytes of HiCache's pools on the host. Raises ServerDied where its log has none."""
    pools = POOL.findall(log.read_text(errors="replace"))
    if not pools:
        raise servers.ServerDied(f"{log} names no host pools of HiCache")
    return sum(int(layers) * int(pages) * int(nbytes) for layers, pages, nbytes in pools)


# ---------------------------------------------------------------------- the run


class Talk:
    """Runs one server's part of a round. It makes the row of the result."""

    def __init__(
        self, server: servers.Server, name: str, context: int, round_: int, count: int, arguments: argparse.Namespace
    ) -> None:
        self.server, self.arguments = server, arguments
        self._agents = Agents(count, context, round_, arguments)
        self._row: dict[str, Any] = {"run": name, "context": context, "round": round_, "agents": count}
        self._label = f"{name}, {count} x {context} tokens, round {round_}"
        self._turns: list[Turn] = []

    def begin(self) -> None:
        """Runs the first turns of all agents."""
        url = self.server.url
        with self.server.awake():
            self._flush()
            first = self._agents.turn(url, self._agents.order(), f"{self._label}, first turns")
            self._row["cold_first_token_p50_ms"] = median_wait([first])
            self._before, self._start = counted_at(url), self.server.log.stat().st_size

    def _flush(self) -> None:
        """Empties the server; with --worn, this package's arena is worn down behind it, once a round."""
        wears = bool(self.arguments.worn) and self._row["run"] == SESSIONS and self._row["round"] != WARM_UP
        file = worn_file(self.arguments)
        if wears:
            file.write_text(str(self.arguments.worn))
        servers.flush(self.server.url, WORN_PATIENCE if wears else 60)
        if wears:
            file.write_text("0")

    def turn(self) -> None:
        """Runs one later turn of all agents."""
        with self.server.awake():
            self._turns.append(self._agents.turn(self.server.url, self._agents.order(), self._label))

    def end(self) -> dict[str, Any]:
        """Returns the row of the later turns, and lets go of all sessions."""
        url, row, name, arguments = self.server.url, self._row, self._row["run"], self.arguments
        with self.server.awake():
            after, log = counted_at(url), read_log(self.server.log, self._start)
            row |= {**summary(self._turns), "prefill_tokens": log["prefill_tokens"], "trouble": log["trouble"]}
            if name == SESSIONS:
                row |= sessions_of(self._before, after)
                row |= {} if arguments.idle else saves_of(self.server.log, self._start, arguments)
            servers.flush(url)
        results.show([row])
        return row


def one_by_one(talks: Sequence[Talk], turns: int) -> list[dict[str, Any]]:
    """Runs each server's whole part before the next; returns the rows."""
    rows = []
    for talk in talks:
        talk.begin()
        for _ in range(turns):
            talk.turn()
        rows.append(talk.end())
    return rows


def turn_by_turn(talks: Sequence[Talk], turns: int) -> list[dict[str, Any]]:
    """Runs each turn on all servers before the next one: the speed of a machine changes within seconds."""
    for talk in talks:
        talk.begin()
    for way in itertools.islice(itertools.cycle((1, -1)), turns):
        for talk in talks[::way]:
            talk.turn()
    return [talk.end() for talk in talks]


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns counts, times to the first token and the rate of the later turns."""
    answers = [answer for turn in turns for answer in turn.answers]
    each = [turn.seconds for turn in turns]
    return {
        **count_outcomes(answers),
        "found": sum(turn.found() for turn in turns) / max(1, len(answers)),
        "first_token_p50_ms": median_wait(turns), "first_token_p99_ms": percentile(waits(turns), 99),
        "seconds": sum(each), "turns_a_second": len(answers) / sum(each), "turn_seconds": each,
    }  # fmt: skip


def waits(turns: Sequence[Turn]) -> list[float]:
    """Returns the milliseconds to the first token of each answer that has one."""
    answers = itertools.chain.from_iterable(turn.answers for turn in turns)
    return [(answer.arrived[0][0] - answer.sent) * 1e3 for answer in answers if answer.arrived]


def median_wait(turns: Sequence[Turn]) -> float:
    """Returns the median of ``waits``; 0 where no answer has a token."""
    return statistics.median(waits(turns) or [0.0])


def sessions_of(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Returns the counts of the sessions of later turns; empty where the server has no such series."""
    if "sessions" not in after:
        return {"session_bytes": 0, "session_points": 0, "hits": {}, "host_gib": 0.0}
    one, other = before["sessions"], after["sessions"]
    hits = {kind: count - one["hits"].get(kind, 0) for kind, count in other["hits"].items()}
    return {
        "hits": hits, "session_tokens": other["tokens"] - one["tokens"], "session_points": other["points"],
        "session_bytes": other["bytes"], "evicted": other["evicted"], "host_gib": after["arena_gib"],
    }  # fmt: skip


def saves_of(log: Path, start: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the first rank's scheduler time for saves of about a turn's pages: all others were on the host."""
    pages = (arguments.turn - arguments.answer) // PAGE
    with log.open("rb") as file:
        file.seek(start)
        kept = KEPT.findall(said_by_first(by_rank(file.read().decode(errors="replace"))))
    times = [float(ms) for _, new, ms, _ in kept if pages <= int(new) <= pages + 2]
    return {"saves": len(times), "save_p50_ms": statistics.median(times) if times else 0.0,
            "save_p99_ms": percentile(times, 99)}  # fmt: skip


def measure(up: dict[str, servers.Server], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each server, context and round."""
    rows, run = [], turn_by_turn if arguments.idle else one_by_one
    short = min(*arguments.contexts, WARM_UP_CONTEXT)
    for name, server in up.items():  # some shapes of later turns compile here
        one_by_one([Talk(server, name, short, WARM_UP, 2, arguments)], arguments.turns)
    for context in arguments.contexts:
        count = agents_for(context, arguments)
        for round_ in range(arguments.rounds):
            names = list(up)[:: -1 if round_ % 2 else 1]
            rows += run([Talk(up[name], name, context, round_, count, arguments) for name in names], arguments.turns)
            if not arguments.idle:
                resident = Talk(up[STOCK], RESIDENT, context, round_, arguments.concurrency, arguments)
                rows += run([resident], arguments.turns)
    pinned = {"host_gib": pinned_bytes(up[HICACHE].log) / 2**30} if HICACHE in up else {}
    return [row | (pinned if row["run"] == HICACHE else {}) for row in rows]


# ---------------------------------------------------------------------- the bounds


def judge(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the bounds of all contexts."""
    bounds = [
        results.bound("turns without a whole answer", "<= 0", sum(row["asked"] - row["whole"] for row in rows)),
        results.bound("trouble in a log", "<= 0", sum(len(row["trouble"]) for row in rows)),
    ]
    for context in arguments.contexts:
        of = {name: [row for row in rows if (row["run"], row["context"]) == (name, context)] for name in NAMES}
        bounds += judge_idle(of, context, arguments) if arguments.idle else judge_agents(of, context, arguments)
    return bounds


NAMES = (STOCK, HICACHE, SESSIONS, RESIDENT)
Rows = dict[str, list[dict[str, Any]]]


def middle(rows: Sequence[dict[str, Any]], key: str) -> float:
    """Returns the median round."""
    return statistics.median(row[key] for row in rows)


def judge_agents(of: Rows, context: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the bounds of one context whose sessions the device does not hold."""
    stock, ours, resident = (of[name] for name in (STOCK, SESSIONS, RESIDENT))
    at = f"at {context} tokens"
    first_token, turns = (FIRST_TOKEN, TURNS) if context >= LONG and is_whole(arguments.config) else (1.0, 1.0)
    hits = sum(sum(row["hits"].values()) for row in ours) / max(1, sum(row["whole"] for row in ours))
    rate = middle(ours, "turns_a_second") / middle(stock, "turns_a_second")
    bounds = [
        results.bound(f"turns that stock finds on the device, share, {at}", f"<= {MISSED}", middle(stock, "found")),
        results.bound(f"turns that it finds where it holds all, share, {at}", f">= {FOUND}", middle(resident, "found")),
        results.bound(f"turns that went on from a session, share, {at}", f">= {MISSED}", hits),
        results.bound(f"first token, median, by stock's, {at}", f"<= {first_token}", wait_by(ours, stock)),
        results.bound(f"turns a second, by stock's, {at}", f">= {turns}", rate),
        results.bound(f"saves of a turn seen, {at}", ">= 1", sum(row["saves"] for row in ours)),
        results.bound(f"save of a turn, median, ms, {at}", f"<= {SAVE_MS}", middle(ours, "save_p50_ms")),
    ]
    if context >= LONG:
        wait = wait_by(ours, resident)
        bounds.append(results.bound(f"first token, median, by that on the device, {at}", f"<= {ON_DEVICE}", wait))
    if context >= VERY_LONG:
        wait = max(wait_by(ours, rows, "cold_first_token_p50_ms") for rows in (stock, ours))  # by the faster one's
        bounds.append(results.bound(f"first token of a later turn, by the cold one's, {at}", f"<= {COLD}", wait))
    return bounds + judge_beside_hicache(of[HICACHE], ours, at)


def judge_beside_hicache(
    hicache: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]], at: str
) -> list[dict[str, Any]]:
    """Returns the bounds of one context beside HiCache; none where it did not run."""
    if not hicache:
        return []
    host = max(row["host_gib"] for row in ours) / max(row["host_gib"] for row in hicache)
    rate = middle(ours, "turns_a_second") / middle(hicache, "turns_a_second")
    return [
        results.bound(f"host memory, by HiCache's, {at}", "<= 1.0", host),
        results.bound(f"turns a second, by HiCache's, {at}", ">= 1.0", rate),
    ]


def is_whole(config: Path) -> bool:
    """Returns whether a model has as many layers as those that are served: Flash has 43."""
    return bool(json.loads(config.read_text())["num_hidden_layers"] >= WHOLE)


def wait_by(ours: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], key: str = "first_token_p50_ms") -> float:
    """Returns the time to the first token of later turns by that of ``others``, or by their ``key``."""
    return middle(ours, "first_token_p50_ms") / max(middle(others, key), 1e-6)


def judge_idle(of: Rows, context: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the bounds of one context whose sessions the device holds."""
    rounds = [
        (stock["turn_seconds"], ours["turn_seconds"]) for stock, ours in zip(of[STOCK], of[SESSIONS], strict=True)
    ]
    ratios = [[theirs / mine for theirs, mine in zip(*turns, strict=True)] for turns in rounds]
    whole = sum(sum(stock) for stock, _ in rounds) / sum(sum(ours) for _, ours in rounds)
    at, (typical, low, _) = f"at {context} tokens", interval(ratios, arguments.seed)
    return [
        results.bound(f"turns that stock finds on the device, share, {at}", f">= {FOUND}", middle(of[STOCK], "found")),
        results.bound(f"points of sessions, {at}", ">= 1", middle(of[SESSIONS], "session_points")),
        results.bound(f"turns a second, by stock's, median turn, {at}", f">= {IDLE}", typical),
        results.bound(f"turns a second, by stock's, all turns, {at}", f">= {IDLE}", whole),
        results.bound(f"median turn, low end of the {CONFIDENCE:.0%} interval, {at}", f">= {IDLE}", low),
    ]


# ---------------------------------------------------------------------- the command


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line; the arguments behind ``--`` are for all servers."""
    parser = results.parser(__doc__, "sessions-agents")
    parser.add_argument("--config", type=readable_file, required=True, help="config.json of the model")
    parser.add_argument("--experts", type=COUNT, help="routed experts, so that three servers fit the card")
    parser.add_argument("--idle", action="store_true", help="the device holds all sessions; stock and sessions alone")
    help_ = "stock and sessions alone, where HiCache would take too long"
    parser.add_argument("--without-hicache", action="store_true", help=help_)
    parser.add_argument("--contexts", type=number(int, 1024, 1 << 20), nargs="+", default=(16384, LONG))
    parser.add_argument("--device-tokens", type=number(int, 1, 1 << 24), default=200_000, help="--max-total-tokens")
    help_ = "of the device cache that the sessions of all agents take (3; with --idle 0.5)"
    parser.add_argument("--over", type=number(float, 0.01, 100), help=help_)
    parser.add_argument("--turns", type=COUNT, default=2, help="of each agent that are measured")
    parser.add_argument("--turn", type=COUNT, default=2500, help="tokens that a turn adds")
    parser.add_argument("--answer", type=COUNT, default=32, help="of them, the answer's")
    parser.add_argument("--rounds", type=COUNT, default=1)
    help_ = "turns of others behind each flush, which wear this package's arena down"
    parser.add_argument("--worn", type=COUNT, metavar="TURNS", help=help_)
    parser.add_argument("--concurrency", type=CONCURRENCY, default=2, help="agents at a time")
    parser.add_argument("--chunk", type=COUNT, default=8192, help="--chunked-prefill-size")
    parser.add_argument("--host-gb", type=number(float, 0.1), default=16, help="DSV4_HOST_GB without HiCache")
    add_requests(parser)
    arguments = servers.parse(parser, argv)
    if arguments.answer >= arguments.turn:
        parser.error(f"--answer {arguments.answer} --turn {arguments.turn}: the answer is a part of the turn")
    longest = max(arguments.contexts) + (arguments.turns + 2) * arguments.turn
    if arguments.device_tokens < arguments.concurrency * longest:
        needed = f"{arguments.concurrency} agents of up to {longest} tokens run at a time"
        parser.error(f"--device-tokens {arguments.device_tokens}: {needed}")
    arguments.over = arguments.over or (0.5 if arguments.idle else 3.0)
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Returns exit status 1 when a bound is missed."""
    arguments = parse(argv)
    servers.end_when_told()
    arguments.model_path = str(model_of(arguments)[0])
    with started(arguments) as up:  # they take half a minute to end: the result is written before
        rows = measure(up, arguments)
        return results.finish(arguments, rows, judge(rows, arguments))


if __name__ == "__main__":
    sys.exit(main())
