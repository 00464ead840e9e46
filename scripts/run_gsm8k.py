#!/usr/bin/env python3
"""Few-shot gsm8k against a running server, alone or paired with a second run: a table, a file, one JSON line last.

    python3 scripts/run_gsm8k.py --url http://127.0.0.1:30000 --data test.jsonl [--train train.jsonl]
    python3 scripts/run_gsm8k.py --url DECODE --prefill-url PREFILL --compare-url OTHER [--compare-prefill-url PREFILL]
    python3 scripts/run_gsm8k.py --url http://127.0.0.1:30000 --data test.jsonl --baseline RUN.json

Greedy decoding; an answer is right when its last number is the gold one. A request that fails is no wrong answer: it is
counted apart. Without --data a few problems that come with this script are asked: enough to try a server, no benchmark.
Results name the machine with torch and psutil, which a machine with sglang has; nothing else is needed, rich if there.

Exit status: 0 every question was answered, 1 a request failed (--allow-failures: every request failed), 2 the run was
refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import results
from gsm8k.asking import ask_all
from gsm8k.endpoints import APIS, Asking, Endpoint, facts, reach
from gsm8k.errors import Refused
from gsm8k.questions import Question, build_questions, digest
from gsm8k.report import read_baseline, report, write
from gsm8k.score import compare, summarise

SMOKE = Path(__file__).with_name("data") / "gsm8k_smoke.jsonl"


def at_least(least: int) -> Callable[[str], int]:
    """Parser of a whole number from ``least`` on."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the server, or the decode server of --prefill-url")
    parser.add_argument("--api", choices=APIS, default="native", help="native: /generate, openai: /v1/completions")
    parser.add_argument("--model", help="model name, with --api openai (default: default)")
    parser.add_argument("--data", type=Path, default=SMOKE, help="questions, in the dataset's own JSON lines")
    parser.add_argument("--train", type=Path, help="the file of the shots (default: the first lines of --data)")
    parser.add_argument("--shots", type=at_least(0), default=8)
    parser.add_argument("--questions", type=at_least(1), help="ask the first N (default: all)")
    parser.add_argument("--concurrency", type=at_least(1), default=32, help="most questions asked at once")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=512)
    parser.add_argument("--timeout", type=at_least(1), default=600, help="seconds without a byte until a request fails")
    second = parser.add_mutually_exclusive_group()
    second.add_argument("--compare-url", help="ask a second server the same, afterwards")
    second.add_argument("--baseline", type=Path, metavar="RUN.json", help="compare with an earlier result")
    for prefix in ("", "compare-"):
        parser.add_argument(
            f"--{prefix}prefill-url", help=f"also send each request here; its decode server is --{prefix}url"
        )
        parser.add_argument(f"--{prefix}bootstrap-host", help="default: the host of the prefill URL")
        parser.add_argument(f"--{prefix}bootstrap-port", type=at_least(1), help="default: 8998, as the engine's")
    parser.add_argument("--allow-failures", action="store_true", help="failed requests do not change the exit status")
    parser.add_argument("--keep-text", action="store_true", help="keep the text of each answer in the result")
    parser.add_argument("--name", default="gsm8k")
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    return parser.parse_args(words)


def check_url(url: str | None, flag: str) -> str | None:
    """The URL without a slash at its end, or refused."""
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise Refused(f"{flag} {url}: not http://HOST:PORT")
    return url.rstrip("/")


def endpoint_of(arguments: argparse.Namespace, prefix: str) -> Endpoint:
    """The server that ``--url`` (prefix "") or ``--compare-url`` (prefix "compare-") and their like name."""

    def get(name: str) -> Any:
        return getattr(arguments, f"{prefix}{name}".replace("-", "_"))

    url, prefill = (check_url(get(name), f"--{prefix}{name}") for name in ("url", "prefill-url"))
    flag = f"--{prefix}url"
    if url is None and prefill is not None:
        raise Refused(f"--{prefix}prefill-url goes with {flag}")
    if prefill is None:
        for name in ("bootstrap-host", "bootstrap-port"):
            if get(name) is not None:
                raise Refused(f"--{prefix}{name} goes with --{prefix}prefill-url")
        return Endpoint(flag, url or "")
    if arguments.api != "native":
        raise Refused(f"--{prefix}prefill-url goes with --api native")
    host, port = get("bootstrap-host") or urlsplit(prefill).hostname, get("bootstrap-port")
    return Endpoint(flag, url or "", prefill, host, 8998 if port is None else port)


def endpoints_of(arguments: argparse.Namespace) -> list[Endpoint]:
    """The servers of the run: one or two."""
    if arguments.model is not None and arguments.api != "openai":
        raise Refused("--model goes with --api openai")
    found = [endpoint_of(arguments, ""), endpoint_of(arguments, "compare-")]
    return [endpoint for endpoint in found if endpoint.url]


def check_target(arguments: argparse.Namespace) -> None:
    """Refuse, before anything is asked, a result that could not be written or would replace the baseline."""
    if not arguments.name or Path(arguments.name).name != arguments.name:
        raise Refused(f"--name {arguments.name}: not a plain file name")
    path = arguments.out / f"{arguments.name}.json"
    if arguments.baseline and path.resolve() == arguments.baseline.resolve():
        raise Refused(f"--name {arguments.name}: the result would replace --baseline {arguments.baseline}")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not path.stat().st_size:
            path.unlink()
    except OSError as error:
        raise Refused(f"--out {arguments.out}: {path.name} cannot be written: {error}") from error


def settings_of(arguments: argparse.Namespace, questions: Sequence[Question]) -> dict[str, Any]:
    """What was asked and how, for the result and for a later --baseline."""
    return {
        "api": arguments.api,
        "model": arguments.model,
        "data": arguments.data.name,
        "train": arguments.train.name if arguments.train else None,
        "shots": arguments.shots,
        "questions": len(questions),
        "prompts_sha256": digest("\0".join(f"{question.prompt}\0{question.gold}" for question in questions)),
        "concurrency": arguments.concurrency,
        "max_new_tokens": arguments.max_new_tokens,
    }


def status_of(measured: Sequence[dict[str, Any]], allow_failures: bool) -> int:
    """Exit status of the runs that asked a server."""
    if any(not side["answered"] for side in measured):
        return 1
    return int(any(side["failed"] for side in measured) and not allow_failures)


def run(arguments: argparse.Namespace) -> int:
    """Ask, compare, write; returns the exit status."""
    endpoints = endpoints_of(arguments)
    questions = build_questions(arguments.data, arguments.train, arguments.shots, arguments.questions)
    settings = settings_of(arguments, questions)
    check_target(arguments)
    baseline = read_baseline(arguments.baseline, settings) if arguments.baseline else None
    for endpoint in endpoints:
        reach(endpoint.url, endpoint.flag)
        if endpoint.prefill_url:
            reach(endpoint.prefill_url, endpoint.flag.replace("url", "prefill-url"))
    results.machine()  # what fails here would fail after the run, and lose it
    settings["servers"] = [{"url": endpoint.url, **facts(endpoint)} for endpoint in endpoints]
    asking = Asking(
        arguments.api, arguments.model or "default", arguments.max_new_tokens, arguments.timeout, arguments.keep_text
    )
    answers, measured = [], []
    for endpoint in endpoints:
        found, seconds = ask_all(endpoint, questions, asking, arguments.concurrency)
        answers.append(found)
        measured.append(summarise(found, seconds))
    sides = [*zip(answers, measured, strict=True), *([baseline] if baseline else [])]
    rows = [{"index": question.index, "gold": question.gold} for question in questions]
    for row, answer in zip(rows, sides[0][0], strict=True):
        row.update(answer)
    summary = {"run": sides[0][1]}
    if len(sides) == 2:
        for row, answer in zip(rows, sides[1][0], strict=True):
            row["compare"] = answer
        summary |= {"compare": sides[1][1], "pair": compare(sides[0][0], sides[1][0])}
    report(summary, rows)
    write(arguments.name, arguments.out, rows, settings, summary)
    return status_of(measured, arguments.allow_failures)


def main(words: Sequence[str] | None = None) -> int:
    """Run, or say what to change."""
    try:
        return run(parse(words))
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
