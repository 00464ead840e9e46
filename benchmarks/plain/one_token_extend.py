#!/usr/bin/env python3
"""A restored request goes on with an extend of one token, and its prefix ends anywhere in a page. Is that a decode?

    python3 -m benchmarks.plain.one_token_extend --model-path MODEL --name plain-one-token-extend

One stock server (DSV4_ENABLED=0) with mixed chunks: while a long prompt is computed in chunks of 512 tokens, every
running request gets its next token as an extend of one token in the same batch. The same short requests are sent twice:
one at a time, which is decode alone, and beside a stream of long prompts that does not end. Their prompts end just
before a multiple of 4, of 128 and of a page, so that their answers cross it. The server notes the prefix of each extend
of one token (noted_extends), and every place in a block of 4, and both sides of each edge, must be among them.

Rounding differs with the batch, so tokens cannot be compared; the answers are scored (sglang_dsv4/livetest/score.py) by
the same server when it is quiet. A third row scores each request with another one's answer: the check can fail.
Arguments after -- go to the server. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.plain import beside
from benchmarks.plain.noted_extends import VARIABLE
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import Answer, Load, Run

CHECKOUT = Path(__file__).resolve().parents[2]
SERVER = ["--enable-mixed-chunk", "--chunked-prefill-size", "512"]
EXTENDS, EXCHANGED = "extends of one token", "answers of other requests"
SHORT_OF = (0, 1, 2)  # tokens by which a prompt ends before an edge
BLOCK = 4  # tokens that a c4 row is made of
FEEDERS, FED = 2, 2000  # prompts computed beside the requests, at once; tokens of each


def load_of(arguments: argparse.Namespace) -> Load:
    """Seeded prompts that end before each edge, ``--repeats`` of each length."""
    draw = random.Random(arguments.seed)
    lengths = [edge - short for edge in arguments.edges for short in SHORT_OF] * arguments.repeats
    prompts = [[draw.randrange(10, arguments.vocabulary) for _ in range(length)] for length in lengths]
    return Load(prompts, [arguments.new_tokens] * len(prompts))


def feed(url: str, seed: int, vocabulary: int, stop: threading.Event) -> None:
    """Long prompts, one after the other, until told to stop."""
    draw = random.Random(f"fed {seed}")
    while not stop.is_set():
        body = {
            "input_ids": [draw.randrange(10, vocabulary) for _ in range(FED)],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        }
        servers.feed(url, body, 120)


def run_fed(run: Run, arguments: argparse.Namespace) -> Run:
    """The run beside the stream of long prompts."""
    stop = threading.Event()
    feeders = [
        threading.Thread(target=feed, args=(run.decode, number, arguments.vocabulary, stop), daemon=True)
        for number in range(FEEDERS)
    ]
    for feeder in feeders:
        feeder.start()
    try:
        return run.execute(EXTENDS)
    finally:
        stop.set()
        for feeder in feeders:
            feeder.join()


def noted(file: Path) -> list[int]:
    """Prefixes of all extends of one token so far."""
    return [prefix for line in file.read_text().splitlines() for prefix in json.loads(line)]


def measure(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows, and the prefixes of the extends. Raises ServerDied."""
    load, folder = load_of(arguments), arguments.logs / arguments.name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.resolve() / "extends.jsonl"
    file.write_text("")
    environment = {
        **servers.model_package("benchmarks.plain.noted_extends", CHECKOUT), "DSV4_ENABLED": "0", VARIABLE: str(file),
    }  # fmt: skip
    server = servers.launch("plain", arguments.model_path, [*SERVER, *arguments.server], environment, folder)
    try:
        servers.wait_until_up([server], arguments.patience)
        alone = argparse.Namespace(**vars(arguments) | {"concurrency": 1})
        quiet = Run(load, alone, server.url, None, None).execute(score.CONTROL)
        file.write_text("")
        fed = run_fed(Run(load, arguments, server.url, None, None), arguments)
        prefixes = noted(file)
        given = {score.CONTROL: quiet.answers, EXTENDS: fed.answers, EXCHANGED: exchanged(quiet.answers)}
        rows = [{"run": name, **run.summary()} for name, run in ((score.CONTROL, quiet), (EXTENDS, fed))]
        rows += [score.scored(name, server.url, load, said, arguments.timeout) for name, said in given.items()]
    finally:
        server.stop()
    return rows, prefixes


def exchanged(answers: list[Answer]) -> list[Answer]:
    """Each request with the answer of the one before it."""
    return [*answers[-1:], *answers[:-1]]


def judge(rows: list[dict[str, Any]], prefixes: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every place in a block of 4 and both sides of each edge were prefixes; the answers are as likely as decoded."""
    runs = {row["run"]: row for row in rows}
    scores = [row for name, row in runs.items() if name.startswith("score of ")]
    near = {edge: sum(abs(prefix - edge) <= 1 for prefix in prefixes) for edge in arguments.edges}
    places = [sum(prefix % BLOCK == place for prefix in prefixes) for place in range(BLOCK)]
    wanted = len(arguments.edges) * len(SHORT_OF) * arguments.repeats
    failed = sum(runs[name]["lost"] + runs[name]["refused"] for name in (score.CONTROL, EXTENDS))
    share = len(prefixes) / max(1, runs[EXTENDS]["tokens"])
    return [
        results.bound("requests lost or refused", "<= 0", failed),
        results.bound("extends of one token by tokens of the answers beside long prompts", ">= 0.5", share),
        *(results.bound(f"extends with a prefix of {edge - 1} to {edge + 1}", ">= 3", n) for edge, n in near.items()),
        results.bound("extends at the rarest place in a block of 4", ">= 3", min(places)),
        *score.judge(scores, wanted, {EXTENDS: EXTENDS}),
    ]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for the server."""
    parser = results.parser(__doc__, "plain-one-token-extend")
    beside.add_arguments(parser)
    parser.add_argument("--edges", type=int, nargs="+", default=(4, 128, 256, 1280), help="lengths to cross")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3, help="requests of each length")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at once beside the long prompts")
    return servers.parse(parser, argv)


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    rows, prefixes = measure(arguments)
    results.show(rows)
    bounds = judge(rows, prefixes, arguments)
    return results.finish(arguments, rows, bounds)


if __name__ == "__main__":
    sys.exit(main())
