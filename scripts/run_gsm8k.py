#!/usr/bin/env python3
"""Asks few-shot gsm8k questions with retracts and without, and compares the accuracy.

    python3 scripts/run_gsm8k.py --url DECODE --prefill-url PREFILL --control-url DECODE2 --control-prefill-url PREFILL2
    python3 scripts/run_gsm8k.py --url http://127.0.0.1:30000 --data test.jsonl       # one plain server, accuracy alone

--url retracts (SGLANG_TEST_RETRACT=1, or under real pressure), --control-url does not; how often each did is read from
its metrics (--enable-metrics). An answer is right when its last number is the gold one; a request that fails is counted
apart. Without --data a few problems that come with this script are asked: enough to try a server, no benchmark.
Exit status 1 when a bound is missed: a request failed, nothing was retracted, or clearly fewer answers are right.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import re
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for a checkout that is not installed

from sglang_dsv4.command_line import (
    CONCURRENCY,
    COUNT,
    COUNT_OR_ZERO,
    PORT,
    SECONDS,
    CommandError,
    missing_module,
    readable_file,
    to_its_end,
)

try:
    from sglang_dsv4.bench import results
    from sglang_dsv4.livetest import retract_stats, servers
except ModuleNotFoundError as error:  # psutil, where no server is installed
    sys.exit(f"run_gsm8k.py: {missing_module(str(error.name))}")

SMOKE = Path(__file__).with_name("gsm8k_smoke.jsonl")
STOP = "Question:"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Question:
    """Holds a prompt with its shots, and the right number."""

    prompt: str
    gold: Decimal


@dataclass(frozen=True)
class Answer:
    """Holds a server's answer. right: None where the request failed, and ``text`` is why."""

    text: str
    right: bool | None
    cut: bool = False


@dataclass(frozen=True)
class Endpoint:
    """Asks a server, or a decode server with the prefill server that feeds it."""

    url: str
    prefill_url: str | None
    bootstrap_port: int


def last_number(text: str) -> Decimal | None:
    """Returns the last number of ``text``; commas and currency signs do not count."""
    found = NUMBER.findall(text.replace(",", "").replace("$", ""))
    return Decimal(found[-1]) if found else None


def read_lines(path: Path) -> list[str]:
    """Returns the lines that have something in them."""
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise CommandError(f"--data {path}: {error}") from error


def read_entry(path: Path, number: int, line: str) -> dict[str, str]:
    """Reads a line of the dataset: {"question": text, "answer": text}."""
    try:
        entry = json.loads(line)
        found = {name: entry[name] for name in ("question", "answer")}
    except (ValueError, LookupError, TypeError):
        found = {"": None}
    if not all(isinstance(text, str) for text in found.values()):
        raise CommandError(f'--data {path}: line {number}: needed: {{"question": text, "answer": text}}')
    return found


def build_questions(path: Path, shots: int, count: int | None) -> list[Question]:
    """Returns prompts over the first ``shots`` lines of ``path``, which are not asked.

    Raises CommandError where none is left, or a line is no question with its answer.
    """
    entries = [read_entry(path, number, line) for number, line in enumerate(read_lines(path), 1)]
    if len(entries) <= shots:
        raise CommandError(f"--data {path}: {len(entries)} lines, --shots {shots} needs {shots + 1}")
    head = "".join(f"{STOP} {entry['question']}\nAnswer: {entry['answer']}\n\n" for entry in entries[:shots])
    questions = []
    for number, entry in enumerate(entries[shots:][:count], shots + 1):
        gold = last_number(entry["answer"].rpartition("####")[2])
        if gold is None:
            raise CommandError(f'--data {path}: line {number} has no number behind "####"')
        questions.append(Question(f"{head}{STOP} {entry['question']}\nAnswer:", gold))
    return questions


def ask(endpoint: Endpoint, question: Question, arguments: argparse.Namespace) -> Answer:
    """Puts one question to one server, or to a pair."""
    sampling = {"max_new_tokens": arguments.max_new_tokens, "temperature": 0, "stop": [STOP]}
    body: dict[str, Any] = {"text": question.prompt, "sampling_params": sampling}
    if endpoint.prefill_url:
        body |= {
            "bootstrap_host": urlsplit(endpoint.prefill_url).hostname,
            "bootstrap_port": endpoint.bootstrap_port,
            "bootstrap_room": secrets.randbelow(2**63),
        }
        feed = (endpoint.prefill_url, body, arguments.timeout)
        threading.Thread(target=servers.feed, args=feed, daemon=True).start()
    try:
        said = servers.post(endpoint.url, "/generate", body, arguments.timeout)
        text, finish = said["text"], said["meta_info"]["finish_reason"]
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
        return Answer(f"{type(error).__name__}: {error}", None)
    if finish["type"] == "abort":
        return Answer(str(finish.get("message")), None)
    return Answer(text, last_number(text.split(STOP)[0]) == question.gold, finish["type"] == "length")


def ask_all(
    name: str, endpoint: Endpoint, questions: Sequence[Question], arguments: argparse.Namespace
) -> tuple[list[Answer], dict[str, Any]]:
    """Returns every answer in order, and the row of the run."""
    before, started = retract_stats.read_metrics(endpoint.url), time.monotonic()
    pool = ThreadPoolExecutor(arguments.concurrency)
    try:
        answers = list(pool.map(lambda question: ask(endpoint, question, arguments), questions))
    finally:  # an interrupt does not wait for answers
        pool.shutdown(wait=False, cancel_futures=True)
    seconds, after = time.monotonic() - started, retract_stats.read_metrics(endpoint.url)
    answered = [answer for answer in answers if answer.right is not None]
    right = sum(bool(answer.right) for answer in answered)
    failures = sorted({answer.text for answer in answers if answer.right is None})
    row = {
        "run": name, "asked": len(answers), "failed": len(answers) - len(answered), "right": right,
        "accuracy": right / len(answered) if answered else 0.0, "cut": sum(answer.cut for answer in answered),
        "retracts": retract_stats.between(before, after)["engine_retracts"], "seconds": seconds,
        "errors": failures[:3],
    }  # fmt: skip
    return answers, row


def compare(first: Sequence[Answer], second: Sequence[Answer]) -> dict[str, Any]:
    """Compares questions that both answered: those only one has right, and how many texts are the same."""
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a.right is not None and b.right is not None]
    return {
        "run": "pair", "answered_by_both": len(pairs),
        "only_with_retracts_right": sum(bool(a.right and not b.right) for a, b in pairs),
        "only_control_right": sum(bool(b.right and not a.right) for a, b in pairs),
        "same_text": sum(a.text == b.text for a, b in pairs),
    }  # fmt: skip


def judge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the bounds: no failed request; with a control, one side alone retracted, and is not clearly worse.

    Where retracts change nothing, each of n questions that only one side has right is a throw of a coin: two standard
    deviations of the difference are 2 sqrt(n).
    """
    bounds = [results.bound(f"{row['run']}: requests failed", "<= 0", row["failed"]) for row in rows if "failed" in row]
    if len(rows) > 1:
        with_retracts, control, pair = rows
        better, worse = pair["only_with_retracts_right"], pair["only_control_right"]
        slack = 2 * math.sqrt(better + worse)
        bounds += [
            results.bound("retracts", ">= 1", with_retracts["retracts"]),
            results.bound("retracts of the control", "<= 0", control["retracts"]),
            results.bound("right answers fewer than the control's", f"<= {slack:.1f}", worse - better),
        ]
    return bounds


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the command line."""
    parser = results.parser(__doc__, "gsm8k")
    for prefix, what in (("", "the server that retracts"), ("control-", "a server that does not")):
        parser.add_argument(f"--{prefix}url", type=servers.checked_url, required=not prefix, help=what)
        parser.add_argument(f"--{prefix}prefill-url", type=servers.checked_url, help="the one that feeds it")
        parser.add_argument(f"--{prefix}bootstrap-port", type=PORT, default=8998, help="of that one (8998)")
    parser.add_argument("--data", type=readable_file, default=SMOKE, help="questions, in the dataset's own JSON lines")
    parser.add_argument("--shots", type=COUNT_OR_ZERO, default=8, help="first lines of --data, shown with each")
    parser.add_argument("--questions", type=COUNT, help="ask the first N (default: all)")
    parser.add_argument("--concurrency", type=CONCURRENCY, default=32)
    parser.add_argument("--max-new-tokens", type=COUNT, default=512)
    parser.add_argument("--timeout", type=SECONDS, default=600, help="seconds for one request")
    results.add_out(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Asks, compares, writes. Raises CommandError where nothing can be asked."""
    arguments = parse(argv)
    runs = {"retracts": Endpoint(arguments.url, arguments.prefill_url, arguments.bootstrap_port)}
    if arguments.control_url:
        control = (arguments.control_url, arguments.control_prefill_url, arguments.control_bootstrap_port)
        runs["control"] = Endpoint(*control)
    questions = build_questions(arguments.data, arguments.shots, arguments.questions)
    for endpoint in runs.values():
        trouble = servers.unreachable(endpoint.url)
        if trouble is not None:
            raise CommandError(f"{endpoint.url}: {trouble}")
    found = [ask_all(name, endpoint, questions, arguments) for name, endpoint in runs.items()]
    rows = [row for _, row in found]
    if len(found) > 1:
        rows.append(compare(found[0][0], found[1][0]))
    results.show(rows)
    bounds = judge(rows)
    return results.finish(arguments, rows, bounds)


if __name__ == "__main__":
    sys.exit(to_its_end("run_gsm8k.py", main))
