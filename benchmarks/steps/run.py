#!/usr/bin/env python3
"""A decode step with this package's hooks against the same step without them, in turn in one running server.

    python3 -m benchmarks.steps.run --model-path MODEL [--batches 1 4 16] [--rounds 2] [--groups 40]
    python3 -m benchmarks.steps.run --model-path MODEL --prep stream -- --disable-cuda-graph
    python3 -m benchmarks.steps.run --model-path MODEL --prep stream --early -- --disable-cuda-graph
    python3 -m benchmarks.steps.run --model-path MODEL --prep graph -- --disable-cuda-graph
    python3 -m benchmarks.steps.run --model-path MODEL --prep graph -- --context-length 1048576
    python3 -m benchmarks.steps.run --model-path MODEL --prep graph -- --speculative-algorithm EAGLE ...
    python3 -m benchmarks.steps.run --model-path MODEL --plain

One server takes its hooks out and puts them back every few steps (toggle_hooks). A group of four such blocks gives one
ratio: the time of its two blocks without, by that of its two blocks with; above 1, the package is faster. With --prep
graph each decode graph is captured both ways, and those of the block are replayed; without graphs it means eager steps,
whose metadata is made in line. With --early only the early start of a step's metadata is taken out: what is then made
in line is compared with what is made beside the forward before. What else the package changes in a server (the pools'
subclasses, a pinned arena) is on both sides. No request is ever retracted.

The server is a decode server with the fake transfer, or with --plain one that prefills, too. One with drafts accepts
none of them (the engine's SGLANG_SIMULATE_ACC_LEN): a step costs the same, and yields one token, as without drafts.
Each round is one start, all up at once, suspended but for the one that is measured. The interval is that of the median
group (bootstrap: groups are drawn within their round). The result is written anew after each batch of each start: a run
that is cut off has what it has.
Arguments after -- go to the server.
Exit status 1 on a lost request, or where a step may be more than 1 % slower, or the interval is too wide to tell.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.steps.summary import BLOCKS, CONFIDENCE, Block, Requests, judge, summarise, table_of
from benchmarks.steps.toggle_hooks.switch import EAGER, EARLY, FILE, SEED, SETTLING, STEPS
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Load, Run
from sglang_dsv4.livetest.retract_stats import GRAPH_LEFT, GRAPH_PREP

CHECKOUT = Path(__file__).resolve().parents[2]
SPARE = 1  # groups that a ramp, or a request that joins late, may cost
PORTS_APART = 50
PLAIN_ROOM = ["--swa-full-tokens-ratio", "0.5"]  # the default would make sixteen long answers retract
# Lines of the package in the log of a server: from its host memory, from plain serving, from its metadata builder.
PACKAGE_AT_WORK = "host copies: "
PLAIN_AT_WORK = "plain serving: a retracted request comes back from its host copy"
PREP_AT_WORK = "decode metadata of eager steps is prepared by this package"
DRAFTS = "--speculative-algorithm"
WITHOUT_GRAPHS = "--disable-cuda-graph"
NONE_ACCEPTED = {
    "SGLANG_SIMULATE_ACC_LEN": "1"
}  # tokens a step: every request goes on for as many steps as it has tokens


class WrongServer(RuntimeError):
    """The server runs without the package, or without the builder that was asked for; names its log."""


def load_of(batch: int, arguments: argparse.Namespace) -> Load:
    """``batch`` seeded prompts of different lengths, all with the same number of new tokens."""
    draw = random.Random(f"{arguments.seed}-{batch}")
    lengths = [draw.randint(*arguments.prompt) for _ in range(batch)]
    prompts = [[draw.randrange(10, arguments.vocabulary) for _ in range(length)] for length in lengths]
    return Load(prompts, [arguments.new_tokens] * batch)


def check_kind(arguments: argparse.Namespace, log: Path) -> None:
    """Raise WrongServer unless the package is at work, and what of it was asked for."""
    text = log.read_text(errors="replace")
    graphs = arguments.prep == "graph" and not arguments.eager
    asked = (
        (PACKAGE_AT_WORK, True), (PLAIN_AT_WORK, arguments.plain), (PREP_AT_WORK, arguments.prep),
        (GRAPH_PREP, graphs),
    )  # fmt: skip
    if graphs and GRAPH_LEFT in text:
        raise WrongServer(f"the server left graphs to the engine: {log}")
    for line in (line for line, wanted in asked if wanted):
        if line not in text:
            raise WrongServer(f"the server has no line {line!r} in its log: {log}")


def launch(round_: int, arguments: argparse.Namespace) -> tuple[servers.Server, Path]:
    """A server, not yet up, and the file that it writes its blocks to."""
    folder = arguments.logs / f"{arguments.name}-{round_}"
    folder.mkdir(parents=True, exist_ok=True)
    out = folder.resolve() / "blocks.jsonl"
    out.write_text("")
    environment = {
        "SGLANG_HOST_IP": "127.0.0.1", "DSV4_ENABLED": "1",
        **servers.model_package("benchmarks.steps.toggle_hooks", CHECKOUT),
        FILE: str(out), STEPS: str(arguments.steps), SEED: str(round_),
        **({"DSV4_PREP": arguments.prep} if arguments.prep else {}),
        **({EARLY: "1"} if arguments.early else {}),
        **({EAGER: "1"} if arguments.eager else {}),
        **(NONE_ACCEPTED if any(word.startswith(DRAFTS) for word in arguments.server) else {}),
    }  # fmt: skip
    apart = PORTS_APART * round_
    role, given = ("plain", [*PLAIN_ROOM, *arguments.server]) if arguments.plain else ("decode", arguments.server)
    return servers.launch(role, arguments.model_path, given, environment, folder, apart=apart), out


def measure(arguments: argparse.Namespace, report: Callable[[list[Block], Requests], None]) -> None:
    """Give ``report`` the blocks that there are after each batch of each start. Raises ServerDied or WrongServer."""
    started = []
    requests = Requests()
    try:
        started += [launch(round_, arguments) for round_ in range(arguments.rounds)]
        servers.wait_until_up([server for server, _ in started], arguments.patience)
        for server, _ in started:
            check_kind(arguments, server.log)
            server.suspend()
        for round_, (server, _) in enumerate(started):
            room = 1
            for batch in arguments.batches:
                with server.awake():
                    requests.lost += send(server, f"start {round_}, batch {batch}", batch, room, arguments)
                room += batch
                done = started[: round_ + 1]
                requests.count(server.log for server, _ in done)
                report([block for number, (_, out) in enumerate(done) for block in blocks_of(number, out)], requests)
    finally:
        servers.stop_all([server for server, _ in started], patience=0)


def blocks_of(round_: int, out: Path) -> list[Block]:
    """The blocks that a server has written so far."""
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return [Block(round_, **(line | {"ns": tuple(line["ns"])})) for line in lines]


def send(server: servers.Server, label: str, batch: int, room: int, arguments: argparse.Namespace) -> int:
    """One batch; how many requests were lost. room: the first one's. Raises ServerDied."""
    client = argparse.Namespace(concurrency=batch, timeout=arguments.timeout)
    first = None if arguments.plain else room
    run = Run(load_of(batch, arguments), client, server.url, None, first).execute(label)
    if run.gone:
        raise servers.ServerDied(f"the server: {server.log}")
    return sum(answer.outcome != "finished" for answer in run.answers)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for the server."""
    parser = results.parser(__doc__, "steps")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 4, 16), help="requests at once")
    parser.add_argument("--rounds", type=int, default=2, help="starts of the server")
    parser.add_argument("--groups", type=int, default=40, help="for each batch in a round")
    parser.add_argument("--steps", type=int, default=32, help="in a block")
    parser.add_argument("--prep", choices=("stream", "graph", "auto"), help="DSV4_PREP of the server")
    parser.add_argument("--early", action="store_true", help="with --prep stream: beside the forward before or in line")
    parser.add_argument("--plain", action="store_true", help="a plain server")
    parser.add_argument("--prompt", type=int, nargs=2, default=(300, 2000), help="shortest and longest prompt")
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=420, help="seconds for the server to come up")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one request")
    arguments = servers.parse(parser, argv)
    if arguments.steps <= SETTLING or min(arguments.rounds, arguments.groups) < 1:
        parser.error(f"--rounds and --groups start at 1, --steps at {SETTLING + 1}")
    if arguments.early and arguments.prep != "stream":
        parser.error("--early needs --prep stream")
    arguments.eager = WITHOUT_GRAPHS in arguments.server
    arguments.new_tokens = (arguments.groups + SPARE) * BLOCKS * arguments.steps
    return arguments


def write(blocks: list[Block], requests: Requests, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Write result and page of what there is; the bounds."""
    rows = summarise(blocks, arguments.batches)
    bounds = judge(rows, requests, arguments)
    lines = table_of(rows)
    print("\n".join(lines))
    path = results.write(arguments.name, rows, bounds, arguments.out)
    what = f"with the hooks{f' and DSV4_PREP={arguments.prep}' if arguments.prep else ''}, and without"
    results.page(
        path,
        f"Decode steps {'whose metadata is made beside the forward before, and in line' if arguments.early else what}",
        f"Hooks in and out every {arguments.steps} steps of one server, the first {SETTLING} not looked at; "
        f"{arguments.rounds} starts; {CONFIDENCE:.0%} intervals of the median group.",
        lines,
    )
    return bounds


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    bounds: list[dict[str, Any]] = []

    def report(blocks: list[Block], requests: Requests) -> None:
        bounds[:] = write(blocks, requests, arguments)

    measure(arguments, report)
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
