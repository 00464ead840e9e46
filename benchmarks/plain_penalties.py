"""Compares how often answers with penalties repeat themselves, with and without retracts.

    python3 -m benchmarks.plain_penalties --model-path MODEL [-- server arguments]

Three plain servers of one model beside each other: undisturbed; with a retract forced every sixth step; and stock
(DSV4_ENABLED=0) with the same retracts. Each gets the same prompts of twelve lengths, greedily, with one penalty at a
time. A penalty that forgets the tokens before a retract lets them come again: the figure compared is the share of
distinct tokens in an answer. Rounding differs with the batch and tokens with it, so there are several rounds, and only
answers that both servers gave are compared. Stock computes each retracted request again, is slower, and gets one round.
Exit status 1 when a bound is missed.
"""

import argparse
import random
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Answer, Load, Run, warm_up
from sglang_dsv4.livetest.retract_stats import read_log

PENALTIES = {"presence_penalty": 2.0, "repetition_penalty": 1.8, "frequency_penalty": 1.5}
UNDISTURBED, RETRACTS, STOCK = "undisturbed", "retracts", "stock, retracts"
SHORTEST, LONGEST, LENGTHS = 30, 2300, 12  # of prompts, evenly on a log scale
AT_ONCE = 2 * LENGTHS  # two prompts of each length make a round
SERVER = ["--max-running-requests", str(AT_ONCE), "--cuda-graph-max-bs-decode", str(AT_ONCE)]
# The default window pool is full of so many requests, and the undisturbed server would retract, too.
SERVER += ["--swa-full-tokens-ratio", "0.5"]
INTERVAL = 6  # steps between forced retracts
STOCK_ROUNDS = 1
NEAR = 0.004  # of the undisturbed share of distinct tokens
PORTS_APART = 50

Answers = dict[tuple[str, int], Answer]  # by penalty and number of the prompt


def prompts_of(arguments: argparse.Namespace) -> list[list[int]]:
    """Returns seeded prompts, AT_ONCE of each round after the other."""
    draw = random.Random(arguments.seed)
    steps = [number % LENGTHS / (LENGTHS - 1) for number in range(AT_ONCE * arguments.rounds)]
    lengths = [round(SHORTEST * (LONGEST / SHORTEST) ** step) for step in steps]
    return [[draw.randrange(10, arguments.vocabulary) for _ in range(length)] for length in lengths]


def answers_of(url: str, rounds: int, arguments: argparse.Namespace) -> Answers:
    """Returns the answers of the server at ``url``, round by round; no round begins after --most-seconds."""
    prompts, found = prompts_of(arguments), {}
    run = Run(Load([], []), arguments, url, None, None)
    ends = time.monotonic() + arguments.most_seconds

    def ask(penalty: str, number: int) -> Answer:
        sampling = {"max_new_tokens": arguments.new_tokens, "temperature": 0, "ignore_eos": True}
        more = {"sampling_params": sampling | {penalty: PENALTIES[penalty]}}
        return run.ask(prompts[number], arguments.new_tokens, number, more)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for first in range(0, AT_ONCE * rounds, AT_ONCE):
            for penalty in PENALTIES:
                if time.monotonic() > ends:
                    return found
                asked = {number: pool.submit(ask, penalty, number) for number in range(first, first + AT_ONCE)}
                found |= {(penalty, number): answer.result() for number, answer in asked.items()}
    return found


def share(answer: Answer) -> float:
    return len(set(answer.tokens)) / len(answer.tokens)


def row_of(run: str, penalty: str, answers: Answers, undisturbed: Answers) -> dict[str, Any]:
    """Returns one row: the share of distinct tokens in those answers that the undisturbed server gave, too."""
    asked = {key for key in answers if key[0] == penalty}
    both = sorted(key for key in asked & undisturbed.keys() if answers[key].outcome == "finished")
    both = [key for key in both if undisturbed[key].outcome == "finished"]
    here, there = [share(answers[key]) for key in both], [share(undisturbed[key]) for key in both]
    apart = [a - b for a, b in zip(here, there, strict=True)]
    return {
        "run": run, "penalty": penalty, "value": PENALTIES[penalty],
        "answers": len(both), "lost": sum(answers[key].outcome != "finished" for key in asked),
        "distinct": statistics.mean(here) if here else 0.0,
        "from_undisturbed": statistics.mean(apart) if apart else 1.0,
        "error": statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0,
        "equal_answers": sum(answers[key].tokens == undisturbed[key].tokens for key in both),
    }  # fmt: skip


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one row for each server and penalty, and one for each server's retracts. Raises ServerDied."""
    ours = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models", "DSV4_ENABLED": "1"}
    forced = servers.forced_retracts(INTERVAL) | {"SGLANG_RADIX_FORCE_MISS": "1"}
    environments = {UNDISTURBED: ours, RETRACTS: ours | forced, STOCK: ours | {"DSV4_ENABLED": "0"} | forced}
    started: dict[str, servers.Server] = {}
    try:
        for number, (name, environment) in enumerate(environments.items()):
            folder = arguments.logs / arguments.name / str(number)
            given = ["plain", arguments.model_path, [*SERVER, *arguments.server], environment, folder]
            started[name] = servers.launch(*given, apart=PORTS_APART * number)
        servers.wait_until_up(list(started.values()), arguments.patience)
        warm_up([server.url for server in started.values()], arguments.vocabulary, arguments.timeout)
        starts = {name: server.log.stat().st_size for name, server in started.items()}
        with ThreadPoolExecutor(len(started)) as pool:
            asked = {
                name: pool.submit(
                    answers_of, server.url, STOCK_ROUNDS if name == STOCK else arguments.rounds, arguments
                )
                for name, server in started.items()
            }
            found = {name: answers.result() for name, answers in asked.items()}
        logs = {name: read_log(server.log, starts[name]) for name, server in started.items()}
    finally:
        servers.stop_all(list(started.values()))
    return rows_of(found, logs)


def rows_of(found: Mapping[str, Answers], logs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = [row_of(name, penalty, answers, found[UNDISTURBED]) for name, answers in found.items()
            for penalty in PENALTIES]  # fmt: skip
    return [*rows, *({"run": f"log, {name}", "retracts": log["engine_retracts"], "loads": log["loads"],
                      "trouble": log["trouble"]} for name, log in logs.items())]  # fmt: skip


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the bounds: each penalty near the undisturbed server's, nothing lost, and stock showing a difference."""
    logs = {row["run"].removeprefix("log, "): row for row in rows if row["run"].startswith("log, ")}
    answers = [row for row in rows if "penalty" in row]
    kept = [row for row in answers if row["run"] == RETRACTS]
    stock = max((abs(row["from_undisturbed"]) for row in answers if row["run"] == STOCK and row["answers"]), default=0)
    return [
        *(results.bound(f"share of distinct tokens from the undisturbed, {row['penalty']}", f"<= {NEAR}",
                        abs(row["from_undisturbed"])) for row in kept),
        *(results.bound(f"answers compared, {row['penalty']}", f">= {AT_ONCE}", row["answers"]) for row in kept),
        results.bound("the same of stock, where it is farthest", f">= {NEAR}", stock),
        results.bound("retracts", f">= {LENGTHS}", logs[RETRACTS]["retracts"]),
        results.bound("loads", f">= {LENGTHS}", logs[RETRACTS]["loads"]),
        results.bound("retracts, undisturbed", "<= 0", logs[UNDISTURBED]["retracts"]),
        results.bound("requests lost or refused", "<= 0", sum(row["lost"] for row in answers)),
        results.bound("trouble in the logs", "<= 0", sum(len(row["trouble"]) for row in logs.values())),
    ]  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = results.parser(__doc__, "penalties")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=420, help="seconds for the servers to come up")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one request")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help=f"of {AT_ONCE} answers with each penalty (5)")
    parser.add_argument("--most-seconds", type=float, default=55, help="after which no round begins (55)")
    return servers.parse(parser, argv)


def main() -> int:
    arguments = parse()
    servers.end_when_told()
    rows = measure(arguments)
    results.show(rows)
    return results.finish(arguments, rows, judge(rows))


if __name__ == "__main__":
    raise SystemExit(main())
