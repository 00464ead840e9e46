"""Measures what a later turn prefills where the decode server writes answers to a store, beside a pair without one.

    python3 -m benchmarks.store_pair --config benchmarks/flash_config.json --experts 8 -- --mem-fraction-static 0.9

Two pairs of a prefill and a decode server over NIXL, all on one GPU, or each pair's servers on those of --devices. Both
prefill servers keep sessions. Each round has new agents with a context of --tokens, a first turn and --turns later
ones, on one pair and then on the other, which is suspended meanwhile; rounds change which is first. A next turn is sent
when the store has the answers. A round before the first one has short contexts, and later turns that prefill as much:
kernels of their shapes compile there. It is not counted.

Told are the tokens that the prefill server computes for a later turn by the words that are new in it, its first token,
and the gaps between the tokens of all answers. The rest of the page in which an answer ends is always computed, half a
page on average: each agent's context begins at another place of one. Arguments after -- go to all servers. Exit status
1 when a bound is missed.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import store_servers as stores
from benchmarks.client import model_of
from benchmarks.scenes import PAGE
from benchmarks.session_agents import Agents, Turn, median_wait, server_words
from benchmarks.store_servers import OURS, PACKAGE, WARM_UP_CONTEXT, in_files
from sglang_dsv4.bench import results
from sglang_dsv4.command_line import COUNT
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import Load, count_outcomes
from sglang_dsv4.livetest.retract_stats import percentile, read_log
from sglang_dsv4.sessions.store import FEWEST_TOKENS

WITHOUT = "without"
PREFILLED, SLOWER = 1.15, 1.02  # tokens by new words; a gap by that without

Row = dict[str, Any]


@dataclass
class Pair:
    """Holds two servers. room: a transfer room that they have not had, as all after it."""

    name: str
    prefill: servers.Server
    decode: servers.Server
    port: int  # of the prefill server's bootstrap
    objects: Path | None
    room: int = 1

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Wakes both inside and suspends them outside."""
        with self.prefill.awake(), self.decode.awake():
            yield

    def settle(self) -> None:
        """Returns when the store has all answers."""
        if self.objects is not None:
            stores.settle(self.decode, self.objects)


class PairAgents(Agents):
    """Holds the agents of one round, who talk to one pair."""

    def __init__(self, pair: Pair, round_: int, arguments: argparse.Namespace) -> None:
        super().__init__(arguments.agents, arguments.tokens, round_, arguments)
        self.said = [said[agent * PAGE // len(self.said) :] for agent, said in enumerate(self.said)]
        self._pair = pair

    def run(self, load: Load, url: str, label: str) -> Turn:
        """Sends each request of one turn to both servers."""
        pair = self._pair
        turn = Turn(load, self.arguments, pair.decode.url, url, pair.room, pair.port).execute(label)
        pair.room += len(load.prompts)
        pair.settle()
        return turn


def started(stack: contextlib.ExitStack, arguments: argparse.Namespace) -> list[Pair]:
    """Starts both pairs, and suspends them."""
    objects, pairs = in_files(stack, arguments, "answers"), list[Pair]()
    cards = [{"CUDA_VISIBLE_DEVICES": device} for device in arguments.devices] or [{}, {}]
    for name, apart in ((OURS, 0), (WITHOUT, score.APART)):
        port, folder = servers.BOOTSTRAP_PORT + apart, arguments.logs / f"{arguments.name}-{apart}"
        keeps = {"DSV4_SESSIONS": "auto", "DSV4_HOST_GB": str(arguments.host_gb), "SGLANG_HOST_IP": "127.0.0.1"}
        keeps |= PACKAGE | {"DSV4_STORE": str(objects) if name == OURS else "off"}
        words = [*server_words(arguments), *arguments.server]
        both = []
        for role, card in zip(("prefill", "decode"), cards, strict=True):
            given = [*words, *(["--disaggregation-bootstrap-port", str(port)] if role == "prefill" else [])]
            both.append(servers.launch(role, arguments.model_path, given, keeps | card, folder, "nixl", apart))
            stack.callback(both[-1].stop)
        pairs.append(Pair(name, *both, port, objects if name == OURS else None))
    up = [server for pair in pairs for server in (pair.prefill, pair.decode)]
    servers.wait_until_up(up, arguments.patience)
    for server in up:
        server.suspend()
    return pairs


def part(pair: Pair, round_: int, arguments: argparse.Namespace) -> Row:
    """Runs one pair's part of a round; returns its row."""
    agents, label = PairAgents(pair, round_, arguments), f"{pair.name}, round {round_}"
    with pair.awake():
        logs = [server.log for server in (pair.prefill, pair.decode)]
        before = [log.stat().st_size for log in logs]
        first = agents.turn(pair.prefill.url, agents.order(), f"{label}, first turns")
        later_from = logs[0].stat().st_size
        turns = [agents.turn(pair.prefill.url, agents.order(), f"{label}, later turns") for _ in range(arguments.turns)]
        servers.flush(pair.prefill.url)
    answers = [answer for turn in (first, *turns) for answer in turn.answers]
    prefilled = read_log(logs[0], later_from)["prefill_tokens"]
    new = arguments.turns * arguments.agents * (arguments.turn - arguments.answer)
    return {
        "run": pair.name, "round": round_, **count_outcomes(answers), "prefilled_by_new": prefilled / new,
        "cold_first_token_p50_ms": median_wait([first]), "first_token_p50_ms": median_wait(turns),
        "gaps_ms": [gap for answer in answers for gap in answer.gaps_ms],
        "trouble": [word for log, at in zip(logs, before, strict=True) for word in read_log(log, at)["trouble"]],
    }  # fmt: skip


def measure(pairs: Sequence[Pair], arguments: argparse.Namespace) -> list[Row]:
    """Returns a row for each pair and round, and one for all of a pair's."""
    for pair in pairs:
        part(pair, -1, short(arguments, pair.objects is not None))
    rows = list[Row]()
    for round_ in range(arguments.rounds):
        rows += [part(pair, round_, arguments) for pair in pairs[:: -1 if round_ % 2 else 1]]
    return [*rows, *(together(name, [row for row in rows if row["run"] == name]) for name in (OURS, WITHOUT))]


def short(arguments: argparse.Namespace, stored: bool) -> argparse.Namespace:
    """Returns the arguments of a warm-up, whose later turns prefill as many tokens behind a short context.

    stored: the answer comes back; a short one does, too, that ends as far behind a page.
    """
    new, answer = arguments.turn - arguments.answer, arguments.answer
    if stored:
        answer = min(answer, FEWEST_TOKENS + answer % PAGE)
    context = min(arguments.tokens, WARM_UP_CONTEXT + arguments.tokens % PAGE)
    changed = {"tokens": context, "turn": new + answer, "answer": answer, "turns": 1}
    return argparse.Namespace(**vars(arguments) | changed)


def together(name: str, rows: Sequence[Row]) -> Row:
    """Returns the row of all rounds of one pair; their gaps go into it."""
    gaps = [gap for row in rows for gap in row.pop("gaps_ms")]
    middle = {
        key: statistics.median(row[key] for row in rows)
        for key in ("prefilled_by_new", "cold_first_token_p50_ms", "first_token_p50_ms")
    }
    return {
        "run": f"all rounds {name}", "asked": sum(row["asked"] for row in rows),
        "whole": sum(row["whole"] for row in rows), **middle, "gap_p50_ms": percentile(gaps, 50),
        "gap_p99_ms": percentile(gaps, 99), "trouble": [word for row in rows for word in row["trouble"]],
    }  # fmt: skip


def judge(rows: Sequence[Row]) -> list[Row]:
    """Returns the bounds."""
    mine, others = rows[-2:]
    return [
        results.bound("turns without a whole answer", "<= 0", sum(row["asked"] - row["whole"] for row in rows[-2:])),
        results.bound("trouble in a log", "<= 0", len(mine["trouble"]) + len(others["trouble"])),
        results.bound("tokens prefilled for a later turn, by its new words", f"<= {PREFILLED}",
                      mine["prefilled_by_new"]),
        results.bound("first token of a later turn, median, by that without", "<= 1.0",
                      mine["first_token_p50_ms"] / max(others["first_token_p50_ms"], 1e-6)),
        results.bound("gap between tokens, p99, by that without", f"<= {SLOWER}",
                      mine["gap_p99_ms"] / max(others["gap_p99_ms"], 1e-6)),
    ]  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = stores.options(__doc__, name="pd-store-agents")
    parser.set_defaults(turn=2500, answer=2000, agents=4, concurrency=4, device_tokens=320_000)
    parser.add_argument("--rounds", type=COUNT, default=2)
    parser.add_argument("--turns", type=COUNT, default=2, help="later turns of each agent in a round")
    parser.add_argument("--devices", nargs=2, default=(), help="GPUs of the prefill and of the decode servers")
    arguments = stores.read_options(parser, argv)
    arguments.server = ["--incremental-streaming-output", *arguments.server]
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Returns exit status 1 when a bound is missed."""
    arguments = parse(argv)
    servers.end_when_told()
    arguments.model_path = str(model_of(arguments)[0])
    with contextlib.ExitStack() as stack:  # servers take half a minute to end: the result is written before
        rows = measure(started(stack, arguments), arguments)
        results.show([{key: value for key, value in row.items() if not isinstance(value, list)} for row in rows])
        return results.finish(arguments, rows, judge(rows))


if __name__ == "__main__":
    sys.exit(main())
