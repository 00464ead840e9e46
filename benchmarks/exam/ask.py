"""Asks served copies of the trained model: with forced retracts, without, and with each cache family lost.

    python3 -m benchmarks.exam.ask --model-path FOLDER [-- server arguments]           # a pair, cache over NIXL
    python3 -m benchmarks.exam.ask --model-path FOLDER --plain [-- server arguments]   # a plain server

This is ``sglang-dsv4 stress`` on the problems of benchmarks.exam.export, with DSV4_PREP=auto; its options are those of
stress, and given ones win. The first --score problems, as many long as short, are asked again with each family of
--zero zeroed in every loaded copy; --score 0 leaves that out. One stock server answers all problems without retracts
(the control), another with retracts; beside a pair, a stock pair answers the first ones with retracts, too.
A row counts right finals (chance: a tenth), and the first wrong tokens by kind. NAME.md has them as a table;
NAME-parity.json compares the control's log probabilities with torch's.
"""

import argparse
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.exam import problems
from benchmarks.exam.problems import Problem
from sglang_dsv4.bench import results
from sglang_dsv4.cli import stress
from sglang_dsv4.command_line import CommandError, to_its_end
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import Answer, Load, Run
from sglang_dsv4.livetest.retract_stats import read_log
from sglang_dsv4.livetest.runs import Found, serve_and_run

WORDS = (  # noqa: SIM905
    "--beside --recompute --interval 5 --at-least 500 --score 64 --timeout 300 --patience 500 "
    "--zero swa_kv c4_kv c4_indexer c128_kv c4_state c128_state"
).split()
PAIR, PLAIN = ("--transfer", "nixl", "--name", "exam"), ("--name", "exam-plain")
LEAST_RIGHT = 0.95  # of the control's finals, of prompts whose c4 rows all fit
APART = 0.01  # of the finals by which retracts may differ from the control
LEAST_EQUAL = 0.98  # of the answers, token by token
PARITY = 0.02  # mean difference of log probabilities
STOCK_PAIR = "a stock pair with retracts"
STOCK_TIMEOUT = 30  # seconds for a request, of which it loses many
ONLY_LONG = ("c4_indexer",)  # families that shorter prompts do without: all c4 rows are read

Answers = Mapping[str, Sequence[Answer]]


class Exam:
    """Holds the problems of an exported folder, short and long ones by turns."""

    def __init__(self, folder: Path) -> None:
        names = (problems.SHORT, problems.LONG, problems.PARITY)
        self.short, self.long, self.parity = (problems.read(folder / name) for name in names)
        self.all = problems.by_turns(self.short, self.long)

    def load(self) -> Load:
        return Load([one.input_ids for one in self.all], [len(one.answer_ids) for one in self.all])

    def marks(self, answers: Sequence[Answer], of: Sequence[Problem] | None = None) -> list[list[float]]:
        """Returns 1 for a right final, 0 for a wrong one, nothing where there is none; of: only of these problems."""
        return [
            [float(problem.is_right(answer.tokens))] if answer.outcome == "whole" else []
            for problem, answer in zip(self.all, answers, strict=False)
            if of is None or problem in of
        ]

    def row(self, name: str, answers: Sequence[Answer], every: Answers) -> dict[str, Any]:
        """Returns the row of a run: finals, whole answers, the kinds of first wrong tokens, falls of a damaged run."""
        pairs = [(one, a.tokens) for one, a in zip(self.all, answers, strict=False) if a.outcome == "whole"]
        wrong = Counter(kind for one, tokens in pairs if (kind := one.first_wrong(tokens)))
        row = {"run": f"finals of {name}", "asked": len(answers), "answered": len(pairs)}
        for kind, of in (("short", self.short), ("long", self.long)):
            marks = self.marks(answers, of)
            row |= {f"{kind}_asked": len(marks), f"{kind}_right": int(sum(map(sum, marks)))}
        row |= {"whole": len(pairs) - wrong.total(), "first_wrong": dict(wrong.most_common())}
        row |= score.unlike(score.CONTROL, every[score.CONTROL][: len(answers)], answers)
        if name.endswith(score.DAMAGED):
            of = self.long if name.removesuffix(score.DAMAGED) in ONLY_LONG else None
            whole = [self.marks(every[run][: len(answers)], of) for run in (score.RETRACTS, score.RETRACTS_AGAIN)]
            row |= score.fall(self.marks(answers, of), whole)
        return row


def ask_stock_pair(arguments: argparse.Namespace, load: Load) -> Found:
    """Runs the first problems over a prefill and a decode server without this package, retracting as often."""
    changed = {"stock": True, "score": 0, "verify": 0, "timeout": STOCK_TIMEOUT, "name": f"{arguments.name}-stock"}
    return serve_and_run(argparse.Namespace(**vars(arguments) | changed), load, ())


def words(argv: Sequence[str]) -> list[str]:
    """Returns the command line of stress: the usual words, then those given."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [*WORDS, *(PLAIN if "--plain" in argv[:end] else PAIR), *argv]


def retracts_of(log: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"retracts": log["engine_retracts"]} if log else {}


def judge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the bounds: the control knows, retracts change nothing, each lost family is missed."""
    by_name = {row["run"].removeprefix("finals of "): row for row in rows}
    control, retracts = by_name[score.CONTROL], by_name[score.RETRACTS]
    asked, answered = control["short_asked"], min(control["answered"], retracts["answered"])
    equal = (answered - retracts["answers_unlike_control"]) / max(1, answered)
    apart = abs(control["short_right"] - retracts["short_right"])
    bounds = [
        results.bound(f"finals right of {asked}, control", f">= {LEAST_RIGHT * asked:g}", control["short_right"]),
        results.bound("answers, of the control and after retracts", f">= {control['asked']}", answered),
        results.bound(f"finals right of {asked}, retracts apart from control", f"<= {APART * asked:g}", apart),
        results.bound("answers equal to the control's token by token, share", f">= {LEAST_EQUAL}", equal),
    ]
    for name, row in by_name.items():
        if name.endswith(score.DAMAGED):
            worst = row["fall"] + score.ERRORS * row["fall_error"]
            bounds.append(
                results.bound(f"fall of finals and {score.ERRORS} standard errors, {name}", "<= -0.0001", worst)
            )
    return bounds


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines of a Markdown table: each run's right answers, and what was lost first."""
    lines = ["| run | finals right, short | long | answers whole | first wrong tokens |", "|---|---|---|---|---|"]
    for row in rows:
        wrong = ", ".join(f"{kind} {count}" for kind, count in row["first_wrong"].items())
        shares = (f"{row[f'{kind}_right']} of {row[f'{kind}_asked']}" for kind in ("short", "long"))
        lines.append(f"| {row['run']} | {' | '.join(shares)} | {row['whole']} of {row['answered']} | {wrong} |")
    return lines


def read_parity(url: str, asked: Sequence[Problem], timeout: float) -> list[dict[str, Any]]:
    """Returns for each problem how far the server's log probabilities are from torch's. Raises as score.read."""
    rows = []
    for one in asked:
        ids, prompt = [*one.input_ids, *one.answer_ids], len(one.input_ids)
        served, _ = score.read(url, ids[:1], ids[1:], timeout)
        apart = [abs(here - there) for here, there in zip(served, one.logprobs, strict=True)]
        row: dict[str, Any] = {"prompt": prompt, "answer": len(one.answer_ids)}
        for name, of in (("prompt", slice(prompt - 1)), ("answer", slice(prompt - 1, None))):
            row |= {f"{name}_mean": statistics.mean(served[of]), f"{name}_apart": statistics.mean(apart[of])}
        rows.append(row | {"most_apart": max(apart)})
    return rows


def judge_parity(rows: Sequence[dict[str, Any]], asked: int) -> list[dict[str, Any]]:
    """Returns the bounds of parity: an answer's tokens are sure, a prompt's were never learned: very unlikely."""
    apart, said = (statistics.mean(row[key] for row in rows) for key in ("prompt_apart", "prompt_mean"))
    answer = statistics.mean(row["answer_apart"] for row in rows)
    return [
        results.bound("problems read by server and torch", f">= {asked}", len(rows)),
        results.bound("mean difference of log probabilities, server and torch", f"<= {PARITY}", answer),
        results.bound("mean difference, tokens of a prompt, by their mean", f"<= {PARITY}", apart / abs(said)),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns exit status 1 when a bound is missed. Raises CommandError for a folder without problems."""
    os.environ.setdefault("DSV4_PREP", "auto")
    arguments = stress.parse(words(sys.argv[1:] if argv is None else argv))
    if not arguments.model_path:
        raise CommandError("--model-path is needed: a folder that benchmarks.exam.export wrote")
    exam = Exam(Path(arguments.model_path))
    load, arguments.score = exam.load(), min(arguments.score, len(exam.all))
    arguments.vocabulary = max(map(max, load.prompts))  # prompts that warm up are of words that exist
    servers.end_when_told()
    with score.PlainServers(arguments) as plain:
        found = stress.run(arguments, load, plain)
        rows, bounds = stress.judged(found, arguments)
        urls = plain.urls()
        every: dict[str, Sequence[Answer]] = {
            name: Run(load, arguments, url, None, None).execute(name).answers for name, url in urls.items()
        }
        every |= {score.RETRACTS: found.run.answers} | {name: run.answers for name, run in found.again.items()}
        parity = read_parity(urls[score.CONTROL], exam.parity, arguments.timeout)
        logs = {name: read_log(server.log) for name, server in plain.started.items()} | {score.RETRACTS: found.log}
    if not arguments.plain:
        stock = ask_stock_pair(arguments, load.first(arguments.score or len(exam.all)))
        every[STOCK_PAIR], logs[STOCK_PAIR] = stock.run.answers, stock.log
    finals = [exam.row(name, answers, every) | retracts_of(logs.get(name)) for name, answers in every.items()]
    results.show([*finals, *parity])
    parity_bounds = judge_parity(parity, len(exam.parity))
    results.write(f"{arguments.name}-parity", parity, parity_bounds, arguments.out)
    bounds += judge(finals)
    path = results.write(arguments.name, rows + finals, bounds, arguments.out)
    page = ["# Exam", "", results.headline(json.loads(path.read_text())), "", *table(finals), ""]
    path.with_suffix(".md").write_text("\n".join(page))
    return results.status(bounds + parity_bounds)


if __name__ == "__main__":
    sys.exit(to_its_end("benchmarks.exam.ask", main))
