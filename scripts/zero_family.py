#!/usr/bin/env python3
"""Every cache family matters, on a live server: zero one family's bytes in each loaded copy, and the answer changes.

    python3 scripts/zero_family.py --model-path MODEL

A prefill and a decode server on one GPU, the cache moving over NIXL; one request at a time. Each asks for two tokens:
the first comes from the prefill server and is forced, then the request is retracted and loaded, and the second is the
first that is computed from the loaded cache. Prompts are one token short of a whole block of 4 and one of 128, so that
this step closes both. The answer is the log probabilities of that token's top choices; a run's distance is how far
they lie from those of the control, a run without retracts.

short prompts: the indexer's choice of 512 rows is all of them, and only the other families can matter.
long prompts: it is a choice, and the indexer's families matter.

The noise is what the control's repetition and exact loads show; the engine's default choice of rows comes in another
order each time, so the servers run with one that does not. Without noise any change counts; with it a family's median
must be above twice the noise. Arguments after -- go to the servers. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import results
import servers
import witness
import zero_answers as answers
import zero_verdict as verdict
from zeroing.switch import NONE, OFF, VARIABLE

# A prefix taken from an earlier run's cache would be computed in other chunks, and rounded otherwise; torch chooses
# the indexer's rows in the order of their places.
SAME_STEPS = ("--disable-radix-cache", "--dsa-topk-backend", "torch")
# Prompts come in chunks of 512 and one of 383 or 511 tokens: a prefill server compiles for 20 s at a new number. With
# the next token the one closes a block inside a page, the other the page too.
CHUNK = ("--chunked-prefill-size", "512")
SHORT, LONG = (
    tuple(512 * whole + last for whole in wholes for last in (383, 511)) for wholes in (range(4), range(6, 12))
)


def start(arguments: argparse.Namespace, switch: Path, started: list[servers.Server]) -> None:
    """Append the prefill and the decode server to ``started``, not yet up."""
    shared = {"SGLANG_HOST_IP": "127.0.0.1", "DSV4_VERIFY": "1"}
    damaging = {
        **servers.model_package("zeroing"),
        VARIABLE: str(switch),
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "1",  # at the first step of every request
    }
    honest = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models"}
    for role, environment in (("prefill", shared | honest), ("decode", shared | damaging)):
        options = [*SAME_STEPS, *CHUNK, *arguments.server]
        started.append(servers.launch(role, arguments.model_path, options, environment, arguments.logs, "nixl"))


def run_all(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each run of each set, and the trouble in the decode server's log. Starts and stops the servers."""
    arguments.logs.mkdir(parents=True, exist_ok=True)
    switch = (arguments.logs / "zero_family.txt").resolve()
    switch.write_text(OFF)
    started: list[servers.Server] = []
    try:
        start(arguments, switch, started)
        servers.wait_until_up(started, arguments.patience)
        prefill, decode = started
        rows = ask_all(arguments, prefill.url, decode.url, switch, decode.log)
    finally:
        servers.stop_all(started)
    return rows, witness.read_log(decode.log)["trouble"]


def ask_all(arguments: argparse.Namespace, prefill: str, decode: str, switch: Path, log: Path) -> list[dict[str, Any]]:
    """Ask every set in each of its runs, the switch at that run's word; one row each, printed as it comes."""
    sets = {
        kind: answers.questions(lengths, arguments.vocabulary, arguments.seed)
        for kind, lengths in (("short", arguments.short), ("long", arguments.long))
    }
    # What a first request of its length has to compile is no part of an experiment; its answer is not looked at.
    warm = answers.Asker(prefill, decode, arguments.warm_up, arguments.warm_up)
    switch.write_text(NONE)
    for question in (question for questions in sets.values() for question in questions):
        warm.ask(question)
    asker = answers.Asker(prefill, decode, arguments.timeout, arguments.limit, warm.room)
    rows = []
    for kind, questions in sets.items():
        control: list[answers.Answer | None] = []
        for name, word in verdict.RUNS[kind].items():
            switch.write_text(word)
            before, began = log.stat().st_size, time.monotonic()
            given = [asker.ask(question) for question in questions]
            with log.open("rb") as file:
                file.seek(before)
                said = file.read().decode(errors="replace")
            control = control or given
            row = {"run": name, "set": kind, **verdict.compared(control, given), **verdict.events(said, word)}
            rows.append(row | {"seconds": time.monotonic() - began})
            print({k: round(v, 5) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    return rows


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for the servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--short", type=int, nargs="+", default=SHORT, help="prompt lengths")
    # A third to two thirds of the rows are left out: whether the closing block's row is chosen is then most open.
    parser.add_argument("--long", type=int, nargs="+", default=LONG, help="prompt lengths")
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=420, help="seconds for the servers to come up")
    parser.add_argument("--timeout", type=float, default=30, help="seconds for one request")
    parser.add_argument("--warm-up", type=float, default=120, help="seconds for the first request of each length")
    parser.add_argument("--limit", type=float, default=90, help="seconds for all requests; those left are not sent")
    parser.add_argument("--name", default="zero-family")
    arguments = servers.parse(parser, argv)
    if not all(length % 128 == 127 for length in (*arguments.short, *arguments.long)):
        parser.error("--short and --long take lengths one below a multiple of 128: the next token closes the block")
    if max(arguments.short) >= answers.CHOSEN_TOKENS or min(arguments.long) <= answers.CHOSEN_TOKENS:
        parser.error(f"--short takes lengths below {answers.CHOSEN_TOKENS}, --long above: where the indexer chooses")
    return arguments


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    rows, trouble = run_all(arguments)
    bounds = verdict.judge(rows, trouble)
    results.write(arguments.name, rows, bounds, arguments.out)
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
