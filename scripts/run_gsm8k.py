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
import contextlib
import hashlib
import http.client
import json
import math
import re
import secrets
import socket
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import results

try:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
except ImportError:  # a server's machine need not have it
    Progress = None

SMOKE = Path(__file__).with_name("data") / "gsm8k_smoke.jsonl"
STOP = "Question:"
PLAIN_EVERY = 5.0  # seconds between progress lines without rich
PROBE_SECONDS = 10.0
SERVER_FACTS = ("model_path", "version", "disaggregation_mode")
SAME = (("prompts_sha256", "--data, --train, --shots, --questions"), ("max_new_tokens", "--max-new-tokens"))
Z95 = statistics.NormalDist().inv_cdf(0.975)
# A minus counts where it cannot be a subtraction or a range; commas count between groups of three digits.
NUMBER = re.compile(
    r"(?:(?<![\w)\]%.$\-\u2212])(?P<minus>[-\u2212]\$?|\$[-\u2212]))?"
    r"(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


class Refused(Exception):
    """The run cannot start; the message names the flag to change."""


class RequestFailed(Exception):
    """One request has no answer."""


@dataclass(frozen=True)
class Question:
    """One prompt with its gold number; ``index`` counts the entries of the data file from 0."""

    index: int
    prompt: str
    gold: str


@dataclass(frozen=True)
class Endpoint:
    """A server, or a decode server with the prefill server that feeds it. ``flag`` is what named it."""

    flag: str
    url: str
    prefill_url: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None


@dataclass(frozen=True)
class Asking:
    """How each question is asked; ``timeout`` is in seconds."""

    api: str
    model: str
    max_new_tokens: int
    timeout: float
    keep_text: bool


# Numbers and statistics


def last_number(text: str) -> str | None:
    """The last number of ``text`` in one spelling ("1,234.50" is "1234.5"), None without one."""
    *_, found = None, *NUMBER.finditer(text)
    if found is None:
        return None
    whole, _, part = found["number"].replace(",", "").partition(".")
    number = (whole.lstrip("0") or "0") + f".{part}".rstrip("0").rstrip(".")
    return f"-{number}" if found["minus"] and Decimal(number) else number


def gold_number(answer: str) -> str | None:
    """The number after the last "####"; None where there is not exactly that."""
    _, mark, tail = answer.rpartition("####")
    numbers = [*NUMBER.finditer(tail)]
    return last_number(tail) if mark and len(numbers) == 1 else None


def mcnemar(b: int, c: int) -> float:
    """Exact two-sided p-value of ``b`` against ``c`` discordant pairs: a fair coin thrown b + c times."""
    tail = sum(math.comb(b + c, i) for i in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2 ** (b + c))


def wilson(right: int, count: int) -> tuple[float, float] | None:
    """95% interval of the share ``right`` / ``count``; None of nothing."""
    if not count:
        return None
    share, z2 = right / count, Z95**2
    middle = share + z2 / (2 * count)
    half = Z95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    low, high = ((middle + side * half) / (1 + z2 / count) for side in (-1, 1))
    return max(0.0, low), min(1.0, high)


# Data


def read_lines(path: Path, flag: str) -> list[dict[str, str]]:
    """Question, answer and gold of each line of a file; empty lines are passed over."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{flag} {path}: cannot be read: {error}") from error
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            question, answer = entry["question"].strip(), entry["answer"].strip()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(f'{flag} {path}: line {number} is not {{"question": text, "answer": text}}') from error
        gold = gold_number(answer)
        if not question or gold is None:
            raise Refused(f'{flag} {path}: line {number} has no question or no number after "####"')
        found.append({"question": question, "answer": answer, "gold": gold})
    return found


def build_questions(data: Path, train: Path | None, shots: int, count: int | None) -> list[Question]:
    """Prompts over the first ``shots`` lines of ``train``; without it of ``data``, which are then not asked."""
    entries = read_lines(data, "--data")
    apart = train is not None and train.resolve() != data.resolve()
    if apart:
        examples = read_lines(train, "--train")
        if len(examples) < shots:
            raise Refused(f"--train {train}: {len(examples)} lines, --shots {shots} needs as many")
        if not entries:
            raise Refused(f"--data {data}: no lines")
    else:
        examples = entries
        if len(entries) < shots + 1:
            raise Refused(f"--data {data}: {len(entries)} lines, --shots {shots} needs {shots + 1}; or give --train")
    examples, first = examples[:shots], 0 if apart else shots
    available = len(entries) - first
    if count is not None and count > available:
        raise Refused(f"--questions {count}: --data {data} leaves {available} to ask")
    shown = {example["question"] for example in examples}
    head = "".join(f"{STOP} {example['question']}\nAnswer: {example['answer']}\n\n" for example in examples)
    questions = []
    for index, entry in enumerate(entries[first:][:count], first):
        if entry["question"] in shown:
            raise Refused(f"--data {data}: question {index} (from 0) is also a shot; change --train or --shots")
        questions.append(Question(index, f"{head}{STOP} {entry['question']}\nAnswer:", entry["gold"]))
    return questions


def digest(text: str) -> str:
    """Short name of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


# Requests

# Straight to the server: a proxy from the environment has no business between the two.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call(url: str, body: dict[str, Any] | None, timeout: float) -> Any:
    """The decoded JSON reply to ``body``, or to a GET without one; ``timeout`` in seconds."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with OPENER.open(request, timeout=timeout) as reply:
            return json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            detail = error.read(300).decode(errors="replace")
            raise RequestFailed(f"HTTP {error.code}: {detail}") from error
        raise RequestFailed(f"HTTP {error.code}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error


def native_body(prompt: str, asking: Asking) -> dict[str, Any]:
    """What /generate takes."""
    sampling = {"temperature": 0, "max_new_tokens": asking.max_new_tokens, "stop": [STOP]}
    return {"text": prompt, "sampling_params": sampling}


def openai_body(prompt: str, asking: Asking) -> dict[str, Any]:
    """What /v1/completions takes."""
    return {
        "model": asking.model, "prompt": prompt, "temperature": 0, "max_tokens": asking.max_new_tokens, "stop": [STOP],
    }  # fmt: skip


def parse_native(reply: Any) -> tuple[str, str | None, int | None]:
    """Text, why it ended, completion tokens."""
    meta = reply.get("meta_info") or {}
    return reply["text"], (meta.get("finish_reason") or {}).get("type"), meta.get("completion_tokens")


def parse_openai(reply: Any) -> tuple[str, str | None, int | None]:
    """Text, why it ended, completion tokens."""
    choice = reply["choices"][0]
    return choice["text"], choice.get("finish_reason"), (reply.get("usage") or {}).get("completion_tokens")


APIS = {
    "native": ("/generate", native_body, parse_native),
    "openai": ("/v1/completions", openai_body, parse_openai),
}


def generate(endpoint: Endpoint, prompt: str, asking: Asking) -> dict[str, Any]:
    """Text, finish and completion_tokens of one prompt; raises RequestFailed."""
    path, body_of, parse = APIS[asking.api]
    body = body_of(prompt, asking)
    found: dict[str, Any] = {}
    prefill = None
    if endpoint.prefill_url:
        body |= {"bootstrap_host": endpoint.bootstrap_host, "bootstrap_port": endpoint.bootstrap_port}
        body["bootstrap_room"] = secrets.randbelow(2**63)

        def feed() -> None:
            try:
                call(f"{endpoint.prefill_url}{path}", body, asking.timeout)
            except RequestFailed as error:
                found["prefill_error"] = str(error)

        prefill = threading.Thread(target=feed, daemon=True)
        prefill.start()
    try:
        reply = call(f"{endpoint.url}{path}", body, asking.timeout)
    except RequestFailed as error:
        if prefill:
            prefill.join(1.0)
        if "prefill_error" in found:
            raise RequestFailed(f"{error}; prefill: {found['prefill_error']}") from error
        raise
    if prefill:
        prefill.join(asking.timeout)
    try:
        text, finish, tokens = parse(reply)
        digest(text)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise RequestFailed(f"the reply holds no text: {json.dumps(reply)[:300]}") from error
    if finish == "abort":
        raise RequestFailed(f"aborted by the server: {json.dumps(reply)[-300:]}")
    found |= {"completion_tokens": tokens} if isinstance(tokens, int) else {}
    return {"text": text, "finish": finish, **found}


def ask(endpoint: Endpoint, question: Question, asking: Asking) -> dict[str, Any]:
    """One answer: its number, is it right, seconds, what the server states. ``ok`` is None for a failure."""
    started = time.perf_counter()
    try:
        found = generate(endpoint, question.prompt, asking)
    except RequestFailed as error:
        return {"answer": None, "ok": None, "latency_s": round(time.perf_counter() - started, 4), "error": str(error)}
    text = found.pop("text")
    answer = last_number(text.split(STOP)[0])
    row = {
        "answer": answer, "ok": answer == question.gold, "latency_s": round(time.perf_counter() - started, 4),
        "text_sha256": digest(text),
    }  # fmt: skip
    row |= {name: value for name, value in found.items() if value is not None}
    return row | ({"text": text} if asking.keep_text else {})


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Progress on stderr; yields what to call after each question."""
    if Progress is not None and sys.stderr.isatty():
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total)
            yield lambda: bar.advance(task)
        return
    done, said = 0, time.monotonic()

    def advance() -> None:
        nonlocal done, said
        done += 1
        if done == total or time.monotonic() - said >= PLAIN_EVERY:
            said = time.monotonic()
            print(f"{label}: {done}/{total}", file=sys.stderr, flush=True)

    yield advance


def ask_all(
    endpoint: Endpoint, questions: Sequence[Question], asking: Asking, concurrency: int
) -> tuple[list[dict[str, Any]], float]:
    """Answers in the order of the questions, at most ``concurrency`` asked at once; seconds that all took."""
    started = time.perf_counter()
    pool = ThreadPoolExecutor(concurrency)
    try:
        futures = [pool.submit(ask, endpoint, question, asking) for question in questions]
        with progress(endpoint.url, len(questions)) as advance:
            for future in as_completed(futures):
                future.result()
                advance()
    finally:
        pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures], time.perf_counter() - started


# Before the run


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


def reach(url: str, flag: str) -> None:
    """Refuse a server that takes no connection."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), PROBE_SECONDS).close()
    except OSError as error:
        raise Refused(f"{flag} {url}: not reachable: {error}") from error


def facts(endpoint: Endpoint) -> dict[str, Any]:
    """What the server states about itself; nothing where it does not."""
    try:
        stated = call(f"{endpoint.url}/server_info", None, PROBE_SECONDS)
    except RequestFailed:
        return {}
    if not isinstance(stated, dict):
        return {}
    found = {name: stated[name] for name in SERVER_FACTS if name in stated}
    return found | ({"model_path": Path(found["model_path"]).name} if "model_path" in found else {})


def read_baseline(path: Path, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Answers and summary of an earlier run, refused unless it asked the same."""
    try:
        result = json.loads(path.read_text())
        theirs, rows, seconds = result["settings"], result["rows"], result["summary"]["run"]["seconds"]
        answers = [{name: row[name] for name in row if name not in ("index", "gold", "compare")} for row in rows]
        summary = summarise(answers, seconds)
        compare(answers, answers)  # what fails here would fail after the run
        other = [flags for name, flags in SAME if theirs[name] != settings[name]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"--baseline {path}: not a result of this script: {type(error).__name__}: {error}") from error
    if other:
        raise Refused(f"--baseline {path}: it asked something else; give this run the same {', '.join(other)}")
    if len(answers) != settings["questions"]:
        raise Refused(f"--baseline {path}: {len(answers)} rows of {settings['questions']} questions")
    return answers, summary


# After the run


def summarise(answers: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Counts and shares of one run; seconds are the wall's."""
    answered = [row for row in answers if row["ok"] is not None]
    right = sum(row["ok"] for row in answered)
    tokens = [row["completion_tokens"] for row in answered if "completion_tokens" in row]
    interval = wilson(right, len(answered))
    return {
        "asked": len(answers),
        "answered": len(answered),
        "failed": len(answers) - len(answered),
        "right": right,
        "unparsable": sum(row["answer"] is None for row in answered),
        "cut": sum(row.get("finish") == "length" for row in answered),
        "prefill_errors": sum("prefill_error" in row for row in answered),
        "accuracy": round(right / len(answered), 4) if answered else None,
        "interval95": [round(end, 4) for end in interval] if interval else None,
        "completion_tokens": sum(tokens) if tokens else None,
        "latency_median_s": statistics.median(row["latency_s"] for row in answered) if answered else None,
        "seconds": round(seconds, 4),
    }


def compare(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """McNemar's test over the questions that both answered; b: only the first is right, c: only the second."""
    pairs = [(x, y) for x, y in zip(first, second, strict=True) if x["ok"] is not None and y["ok"] is not None]
    b = sum(x["ok"] and not y["ok"] for x, y in pairs)
    c = sum(y["ok"] and not x["ok"] for x, y in pairs)
    identical = sum(x["text_sha256"] == y["text_sha256"] for x, y in pairs)
    return {"pairs": len(pairs), "b": b, "c": c, "p": mcnemar(b, c) if pairs else None, "identical": identical}


def describe(name: str, summary: dict[str, Any]) -> str:
    """One run in one line."""
    if summary["accuracy"] is None:
        return f"{name}: no answer, {summary['failed']} failed"
    low, high = summary["interval95"]
    return (
        f"{name}: accuracy {summary['accuracy']:.4f} ({summary['right']}/{summary['answered']}), "
        f"95% interval {low:.4f} to {high:.4f}; {summary['failed']} failed, {summary['unparsable']} without a number, "
        f"{summary['cut']} cut at --max-new-tokens; median {summary['latency_median_s']:.2f} s, "
        f"all {summary['seconds']:.1f} s"
    )


def report(summary: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Print what a reader wants first."""
    for side in ("run", "compare"):
        if side not in summary:
            continue
        print(describe(side, summary[side]))
        answers = [row if side == "run" else row["compare"] for row in rows]
        failed = [(row["index"], answer) for row, answer in zip(rows, answers, strict=True) if answer["ok"] is None]
        if failed:
            print(f"{side}: first failure, question {failed[0][0]}: {failed[0][1].get('error')}")
        if summary[side].get("prefill_errors"):
            print(f"{side}: {summary[side]['prefill_errors']} answered although the prefill server reported an error")
    if pair := summary.get("pair"):
        p = "none" if pair["p"] is None else f"{pair['p']:.4g}"
        print(
            f"pair: {pair['pairs']} answered by both, b {pair['b']} (only run right), "
            f"c {pair['c']} (only compare right), exact McNemar p {p}; "
            f"{pair['identical']} of {pair['pairs']} texts identical"
        )


def write(
    name: str, folder: Path, rows: list[dict[str, Any]], settings: dict[str, Any], summary: dict[str, Any]
) -> None:
    """Write the result with its settings and summary; print the summary as the last line."""
    sides = [side for side in ("run", "compare") if side in summary]
    bounds = [results.bound(f"{side}: failed requests", "<= 0", summary[side]["failed"]) for side in sides]
    with contextlib.redirect_stdout(None):  # its line has no summary
        path = results.write(name, rows, bounds, folder)
    result = json.loads(path.read_text()) | {"settings": settings, "summary": summary}
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"bench": name, **summary, "bounds": bounds}), flush=True)


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


def endpoints_of(arguments: argparse.Namespace) -> list[Endpoint]:
    """The servers of the run: one or two."""
    if arguments.model is not None and arguments.api != "openai":
        raise Refused("--model goes with --api openai")
    found = [endpoint_of(arguments, ""), endpoint_of(arguments, "compare-")]
    return [endpoint for endpoint in found if endpoint.url]


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
