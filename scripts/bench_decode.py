#!/usr/bin/env python3
"""Decode on a live server, with this package idle in it against stock: tokens a second and inter-token latency.

    python3 scripts/bench_decode.py --model-path MODEL [--batches 1 4 16] [--rounds 2] [--together [--control]]
    python3 scripts/bench_decode.py --model-path MODEL --prep stream -- --disable-cuda-graph

A round is one server of each kind: stock (DSV4_ENABLED=0), then package, in turn; --together keeps the servers of all
rounds up, suspended but for the one that is measured, and takes turns pass by pass. Both kinds get the model package,
whose seeded weights make them the same model, and the same seeded requests: as many at once as the batch, all of the
same number of new tokens, so that every step has the whole batch.
No request is ever retracted. Ratios are package / stock, the median of pairs of passes, with a bootstrap interval
(rounds are drawn, then the pairs in them).
Arguments after -- go to the servers.
Exit status 1 on a lost request, or where an interval shows the package slower.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import results
from decode_pairs import CONFIDENCE, CONTROL, VARIANTS, Kind, Pass, judge, summarise, table_of

from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Load, Run

# Lines of the package in the log of a decode server: from its host memory, from its metadata builder.
PACKAGE_AT_WORK = "host copies: "
PREP_AT_WORK = "decode metadata of eager steps is prepared by this package"
LEFT_TO_ENGINE = re.compile(r"decode metadata of such steps is left to the engine: (.+)")
RAMP = 8  # inter-token gaps at a request's start that belong to the batch filling up
PORTS_APART = 50


class WrongServer(RuntimeError):
    """A server that was to run with the package ran without it, or the other way round; names its log."""


def load_of(batch: int, arguments: Namespace) -> Load:
    """``batch`` seeded prompts of different lengths, all with the same number of new tokens."""
    draw = random.Random(f"{arguments.seed}-{batch}")
    lengths = [draw.randint(*arguments.prompt) for _ in range(batch)]
    prompts = [[draw.randrange(10, arguments.vocabulary) for _ in range(length)] for length in lengths]
    return Load(prompts, [arguments.new_tokens] * batch)


def one_pass(server: servers.Server, kind: Kind, batch: int, room: int, arguments: Namespace) -> Pass:
    """Wake the server, send the batch and wait for it. Raises ServerDied.

    room: its first transfer room; it and the next ones are new to the server.
    """
    round_, variant = kind
    client = Namespace(concurrency=batch, timeout=arguments.timeout)
    with server.awake():
        run = Run(load_of(batch, arguments), client, server.url, None, room).execute(f"{variant}, batch {batch}")
        if run.gone:
            raise servers.ServerDied(f"the {variant} server: {server.log}")
    gaps = [gap for answer in run.answers for gap in answer.gaps_ms[RAMP:]]
    cuts = np.percentile(gaps, [50, 99]) if gaps else (float("nan"), float("nan"))
    tokens = sum(len(answer.tokens) for answer in run.answers)
    lost = sum(answer.outcome != "finished" for answer in run.answers)
    return Pass(round_, variant, batch, lost, tokens / run.seconds, float(cuts[0]), float(cuts[1]))


def environment_of(variant: str, prep: str | None) -> dict[str, str]:
    """What a server gets on top of this process's environment; the variants differ in the switch and the builder."""
    found = {"SGLANG_HOST_IP": "127.0.0.1", "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models"}
    if variant != "package":
        return {**found, "DSV4_ENABLED": "0"}
    return {**found, "DSV4_ENABLED": "1", **({"DSV4_PREP": prep} if prep else {})}


@contextmanager
def serving(kinds: Sequence[Kind], arguments: Namespace) -> Iterator[dict[Kind, servers.Server]]:
    """The servers of ``kinds``, up and suspended; ended afterwards. Raises ServerDied or WrongServer."""
    started: dict[Kind, servers.Server] = {}
    with ExitStack() as stack:
        # Nobody waits for an answer by then, so they have nothing to drain.
        stack.callback(lambda: servers.stop_all(list(started.values()), patience=0))
        for place, (round_, variant) in enumerate(kinds):
            started[round_, variant] = servers.launch(
                "decode", arguments.model_path, arguments.server, environment_of(variant, arguments.prep),
                arguments.logs / f"{arguments.name}-{round_}-{variant}", apart=PORTS_APART * place,
            )  # fmt: skip
        servers.wait_until_up(list(started.values()), arguments.patience)
        for (_, variant), server in started.items():
            check_kind(variant, arguments.prep, server.log)
            server.suspend()
        yield started
        for (_, variant), server in started.items():
            for reason in sorted(set(LEFT_TO_ENGINE.findall(server.log.read_text(errors="replace")))):
                print(f"  {variant}: metadata left to the engine: {reason}", flush=True)


def check_kind(variant: str, prep: str | None, log: Path) -> None:
    """Raise WrongServer unless package and builder are at work where they were asked for, and only there.

    ``prep`` None: the package's default, whichever that is.
    """
    text = log.read_text(errors="replace")
    package = variant == "package"
    wanted = {PACKAGE_AT_WORK: package}
    if prep is not None or not package:
        wanted[PREP_AT_WORK] = package and prep != "engine"
    for line, there in wanted.items():
        if (line in text) != there:
            raise WrongServer(f"the {variant} server has {'no' if there else 'a'} line {line!r} in its log: {log}")


def measure(arguments: Namespace) -> list[Pass]:
    """All rounds. The first ``--warm-up`` passes of each batch and server are not kept."""
    variants = [*VARIANTS, *([CONTROL] if arguments.control else [])]
    kinds = [(round_, variant) for round_ in range(arguments.rounds) for variant in variants]
    kept: list[Pass] = []
    for group in (kinds,) if arguments.together else ([kind] for kind in kinds):
        with serving(group, arguments) as started:
            room = 1
            for number in range(-arguments.warm_up, arguments.passes):
                for batch in arguments.batches:
                    for kind in in_order(group, number):
                        found = one_pass(started[kind], kind, batch, room, arguments)
                        room += batch
                        if number >= 0:
                            kept.append(found)
    return kept


def in_order(kinds: Sequence[Kind], number: int) -> list[Kind]:
    """Round by round; in a round as given, and backwards in every other pass."""
    places = {kind: -place if number % 2 else place for place, kind in enumerate(kinds)}
    return sorted(kinds, key=lambda kind: (kind[0], places[kind]))


def parse(argv: list[str] | None = None) -> Namespace:
    """The command line; what follows ``--`` is for the servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 4, 16), help="requests at once")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each server")
    parser.add_argument("--passes", type=int, default=6, help="times each batch is sent in a round")
    parser.add_argument("--warm-up", type=int, default=2, help="passes before those")
    parser.add_argument("--together", action="store_true", help="all servers up at once, passes in turn")
    parser.add_argument("--control", action="store_true", help="in each round a second stock server, compared likewise")
    parser.add_argument("--prep", choices=("engine", "stream", "auto"), help="DSV4_PREP of the package's server")
    parser.add_argument("--prompt", type=int, nargs=2, default=(300, 2000), help="shortest and longest prompt")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=420, help="seconds for the servers to come up")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one request")
    parser.add_argument("--name", default="decode")
    arguments = servers.parse(parser, argv)
    if min(arguments.rounds, arguments.passes) < 1 or arguments.new_tokens <= RAMP + 1:
        parser.error(f"--rounds and --passes start at 1, --new-tokens at {RAMP + 2}")
    if arguments.together and servers.ranks(arguments.server) > 1:
        parser.error("--together suspends servers, and a rank that is suspended in a collective keeps its GPU busy")
    return arguments


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    passes = measure(arguments)
    rows = summarise(passes, arguments)
    bounds = judge(rows, passes, arguments)
    lines = table_of(rows)
    print("\n".join(lines))
    path = results.write(
        arguments.name, [*rows, *({"pass": dataclasses.asdict(p)} for p in passes)], bounds, arguments.out
    )
    how = "all servers up, in turn" if arguments.together else "one server after the other"
    results.page(
        path,
        f"Decode with the package {f'and DSV4_PREP={arguments.prep}' if arguments.prep else 'idle'} against stock",
        f"Medians of {rows[0]['passes']} passes of each kind in {arguments.rounds} rounds, {how}; "
        f"{CONFIDENCE:.0%} intervals of the median pair.",
        lines,
    )
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
