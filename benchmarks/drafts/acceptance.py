#!/usr/bin/env python3
"""How many drafts are accepted after a resume, token by token: without a retract, and with each part that comes back.

    python3 -m benchmarks.drafts.acceptance --model-path MODEL --name drafts-acceptance           # a pair, over NIXL
    python3 -m benchmarks.drafts.acceptance --model-path MODEL --plain --name drafts-plain        # a plain server
    python3 -m benchmarks.drafts.acceptance --model-path MODEL --dspark --name drafts-dspark-0523  # DSpark, not EAGLE
    python3 -m benchmarks.drafts.acceptance --config benchmarks/resume/flash_config.json --experts 80 --fake \\
        --name drafts-resume --rounds 1 --requests 64 --interval 8 --at-least 50 \\
        -- --mem-fraction-static 0.9  # time, Flash shape
    python3 -m benchmarks.drafts.acceptance --steps logs/drafts-acceptance/steps.jsonl            # a run, summed up

Servers with EAGLE (3 steps, 4 draft tokens) or DSpark (blocks of 7), seeded weights whose draft is right where its
window is, and one word that says what a retracted request's draft loses (``livetest.drafting``). Each word has its
turn on the same servers, with the same requests, once a round; every --interval steps the request is retracted that has
gone on longest. Its steps since are counted by the tokens since its resume. Under ``no retract`` it is only remembered.

At the end a plain server without this package says how likely the answers' tokens are (--score requests of each word;
0: none). Two rounds take about 100 s of start and 100 s of requests, with DSpark as long. The steps lie in the logs'
folder, whatever comes. A table, a plot and one JSON line last; arguments after -- go to the servers. Exit status 1 when
a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.drafts import summary
from benchmarks.shapes import write_model
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.drafting import ARMS, BOTH, NO_RETRACT, PACKAGE, ROWS, STEPS, WORD
from sglang_dsv4.livetest.load import Answer, Load, Run, warm_up
from sglang_dsv4.livetest.retract_stats import read_log

EAGLE = (  # noqa: SIM905
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
).split()
DSPARK = ["--speculative-algorithm", "DSPARK"]
# What a checkpoint with a DSpark draft has in its config: three layers of a draft, which see what these layers give.
DSPARK_CONFIG = {
    "dspark_block_size": 7, "dspark_markov_rank": 256, "dspark_noise_token_id": 2, "dspark_target_layer_ids": [0, 2, 4],
}  # fmt: skip
LOAD: dict[str, Any] = {"requests": 160, "new_tokens": (350, 450), "interval": 3, "at_least": 300}
# Eight tokens a step where all drafts are right and one where none is: longer answers, and time for a window between
# two retracts of a request.
DSPARK_LOAD: dict[str, Any] = {"requests": 128, "new_tokens": (600, 800), "interval": 12, "at_least": 40}
OWN_WINDOW = 160  # tokens of an answer from which on target and draft see nothing of the prompt
WARM_UP = 16  # requests before the first word, not looked at
SETTLES = 1  # seconds between two words: steps in flight end
COUNTED = ("engine_retracts", "saves", "loads", "fallbacks", "trouble")


class Servers:
    """A prefill and a decode server, or one plain server, and the control beside them; stopped on leaving."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.folder = arguments.logs / arguments.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.word, self.steps = (self.folder / "arm.txt").resolve(), (self.folder / "steps.jsonl").resolve()
        self.steps.unlink(missing_ok=True)
        self.steps.touch()
        self.word.write_text(NO_RETRACT)
        self.started: list[servers.Server] = []
        self.prefill: servers.Server | None = None
        self.room = 1

    def __enter__(self) -> Servers:
        given = self.arguments
        common = {"SGLANG_HOST_IP": "127.0.0.1", "SGLANG_EXTERNAL_MODEL_PACKAGE": PACKAGE, "DSV4_VERIFY": "1"}
        environment = common | servers.forced_retracts(given.interval)
        environment |= {WORD: str(self.word), STEPS: str(self.steps)}
        environment |= {"SGLANG_RADIX_FORCE_MISS": "1"} if given.plain else {}
        words = [*(DSPARK if given.dspark else EAGLE), *given.server]
        try:
            if given.score:
                quiet = {"SGLANG_EXTERNAL_MODEL_PACKAGE": PACKAGE}
                self.control = score.launch_stock(given, "plain", quiet, score.APART, given.server)
                self.started.append(self.control)
            if not (given.plain or given.fake):
                self.prefill = servers.launch("prefill", given.model_path, words, common, self.folder, "nixl")
                self.started.append(self.prefill)
            role, transfer = "plain" if given.plain else "decode", "fake" if given.fake else "nixl"
            tested = ["--enable-metrics", *words]
            self.tested = servers.launch(role, given.model_path, tested, environment, self.folder, transfer)
            self.started.append(self.tested)
            servers.wait_until_up(self.started, given.patience)
        except BaseException:  # an interrupt too: the servers would outlive it
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        servers.stop_all(self.started)

    def answer(self, word: str, load: Load, label: str) -> tuple[Run, dict[str, Any]]:
        """The requests of ``load`` under that word; what the server did meanwhile."""
        self.word.write_text(word)
        start = self.tested.log.stat().st_size
        prefill = self.prefill.url if self.prefill else None
        room = None if self.arguments.plain else self.room
        self.room += len(load.prompts)
        run = Run(load, self.arguments, self.tested.url, prefill, room).execute(label)
        time.sleep(SETTLES)
        said = read_log(self.tested.log, start)
        return run, {key: said[key] for key in COUNTED}


def words_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The words of a run: a plain server has no state to lose, and DSpark none but the last token."""
    stateless = arguments.plain or arguments.dspark
    return tuple(word for word in arguments.arms if not (stateless and word == ROWS))


def part(load: Load, number: int, of: int) -> Load:
    """One of ``of`` equal parts of the requests."""
    return Load(load.prompts[number::of], load.new_tokens[number::of])


def measure(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Every word in turn; ``rows`` get one for each of them and round, as they come."""
    load = Load.of(arguments)
    answers: dict[str, list[Answer]] = {}
    with Servers(arguments) as live:
        if arguments.plain:
            warm_up([live.tested.url], arguments.vocabulary, arguments.timeout)
        for word in (NO_RETRACT, BOTH):  # shapes compile; steps of warm-up are thrown away
            live.answer(word, Load(load.prompts[:WARM_UP], [64] * WARM_UP), f"warm-up, {word}")
        live.steps.write_text("")
        for number in range(arguments.rounds):
            some = part(load, number, arguments.rounds)
            words = words_of(arguments)
            for word in words if number % 2 == 0 else reversed(words):
                run, did = live.answer(word, some, f"round {number}, {word}")
                rows.append({"run": word, "round": number, **run.summary(), **did})
                results.show(rows[-1:])
                if number == 0:
                    answers[word] = run.answers[: arguments.score]
        if arguments.score:
            scored = part(load, 0, arguments.rounds).first(arguments.score)
            for word, given in answers.items():
                called = score.CONTROL if word == NO_RETRACT else word
                rows.append(score.scored(called, live.control.url, scored, given, arguments.timeout, at_once=4))
                results.show(rows[-1:])


def judge(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Of what the servers did: nothing lost or left out, enough retracts, answers as likely as without them."""
    bounds = []
    for word in words_of(arguments):
        mine = [row for row in rows if row["run"] == word]
        bounds.append(results.bound(f"lost or refused, {word}", "<= 0", sum(r["lost"] + r["refused"] for r in mine)))
        retracts = sum(row["engine_retracts"] for row in mine)
        limit = "<= 0" if word == NO_RETRACT else f">= {arguments.at_least}"
        bounds.append(results.bound(f"retracts, {word}", limit, retracts))
        if word != NO_RETRACT:  # a recompute would bring a draft's window and state anew
            loads = sum(row["loads"] for row in mine)
            bounds.append(results.bound(f"retracts without a load, {word}", "<= 0", retracts - loads))
        bounds.append(results.bound(f"trouble in the log, {word}", "<= 0", sum(len(row["trouble"]) for row in mine)))
    scored = [row for row in rows if row["run"].startswith("score of ")]
    ran, words = len(rows) - len(scored), words_of(arguments)
    bounds.append(results.bound("turns left out", "<= 0", len(words) * arguments.rounds - ran))
    unscored = len(words) - len(scored) if arguments.score else 0
    bounds.append(results.bound("words whose answers were not scored", "<= 0", unscored))
    if scored and not unscored:
        alike = {word: word for word in words if word != NO_RETRACT}
        of_a_round = len(range(0, arguments.requests, arguments.rounds))
        bounds += score.judge(scored, min(arguments.score, of_a_round), alike)
    return bounds


def report(arguments: argparse.Namespace, steps_file: Path, rows: list[dict[str, Any]]) -> int:
    """Result, table and plot of what there is; the exit status."""
    steps = summary.read_steps(steps_file, arguments.least_before)
    accepted, times = summary.acceptance(steps), summary.reached(steps)
    lines = summary.table(accepted, times)
    print("\n".join(lines))
    bounds = summary.judge(steps, words_of(arguments))
    if not arguments.steps:
        bounds = [*judge(rows, arguments), *bounds]
    if arguments.fake:  # the time is what such a run is for: an arm that never came so far has none
        came = [row["arm"] for row in times if row["to_token"] == summary.REACHED[-1]]
        name = f"arms with a resume that came to token {summary.REACHED[-1]}"
        bounds.append(results.bound(name, f">= {len(words_of(arguments))}", len(came)))
    path = results.write(arguments.name, [*accepted, *times, *rows], bounds, arguments.out)
    summary.plot(accepted, path.with_suffix(".png"))
    picture = f"![Tokens a step since the resume]({path.stem}.png)"
    results.page(path, "Drafts after a resume", "", [*lines, "", picture])
    return results.status(bounds)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for all servers."""
    parser = results.parser(__doc__, "drafts-acceptance")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model-path", help="a model folder; its weights are drawn")
    which.add_argument("--config", type=Path, help="config.json of a model, with --experts of its experts")
    which.add_argument("--steps", type=Path, help="the steps of a run, to be summed up again")
    parser.add_argument("--experts", type=int, default=96, help="routed experts that fit the card (with --config)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--plain", action="store_true", help="a plain server")
    how.add_argument(
        "--fake", action="store_true", help="a decode server alone, whose prompts have no cache: only requests count "
        f"that had {OWN_WINDOW} tokens of their own, and none is scored",
    )  # fmt: skip
    parser.add_argument(
        "--dspark", action="store_true", help=f"DSpark drafts, with defaults of their own: {DSPARK_LOAD}, not {LOAD}"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="the words, all of them by default")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, help="of each word, all rounds together")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--interval", type=int, help="forward steps between forced retracts")
    parser.add_argument("--at-least", type=int, help="retracts that there must be under each word")
    parser.add_argument("--prompt", type=int, nargs=2, default=(300, 1200), help="shortest and longest prompt")
    parser.add_argument("--new-tokens", type=int, nargs=2, help="fewest and most of an answer")
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--least-before", type=int, default=0, help="tokens that a request must have had at its retract"
    )
    parser.add_argument(
        "--score", type=int, default=20, help="answers of each word to score; 0: none, no control server"
    )
    parser.add_argument("--patience", type=float, default=420)
    parser.add_argument("--timeout", type=float, default=120)
    arguments = servers.parse(parser, argv)
    if NO_RETRACT not in arguments.arms:
        parser.error(f"--arms without '{NO_RETRACT}', with which the others are compared")
    for name, usual in (DSPARK_LOAD if arguments.dspark else LOAD).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, usual)
    if arguments.dspark:  # of all servers: the control has the target that goes with such a draft
        arguments.server = ["--json-model-override-args", json.dumps(DSPARK_CONFIG), *arguments.server]
    if arguments.fake:
        arguments.score, arguments.least_before = 0, max(arguments.least_before, OWN_WINDOW)
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse(argv)
    if arguments.steps:
        return report(arguments, arguments.steps, [])
    servers.end_when_told()
    if arguments.config:
        model, _ = write_model(arguments.config, arguments.logs / "model", arguments.experts)
        arguments.model_path = str(model)
    rows: list[dict[str, Any]] = []
    steps = arguments.logs / arguments.name / "steps.jsonl"
    try:
        measure(arguments, rows)
    finally:  # what there is, also of a run that was cut off
        (steps.parent / "rows.json").write_text(json.dumps(rows))
        status = report(arguments, steps, rows)
    return status


if __name__ == "__main__":
    sys.exit(main())
