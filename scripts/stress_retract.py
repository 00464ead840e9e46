#!/usr/bin/env python3
"""Forced (or real) retracts on a live server: nothing lost, every resume exact, tokens as without retracts.

    python3 scripts/stress_retract.py --model-path MODEL --transfer fake --requests 500 --interval 6
    python3 scripts/stress_retract.py --model-path MODEL --transfer nixl --compare      # real cache, tokens compared

The servers are started and stopped here, with the package and DSV4_VERIFY=1; arguments after -- go to them.
fake: one decode server; the transfer brings no cache, so tokens mean nothing. nixl: a prefill and a decode server on
one GPU. --compare: the same requests run three times, without retracts twice (the control: batches differ from run to
run, and rounding with them) and with retracts once.
--stock runs the engine as it is. Exit status 1 on any loss, mismatch or leak.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import threading
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import results
import servers

SAVED = re.compile(r"saved (\d+) tokens, ([\d.]+) MB in ([\d.]+) ms; copies alive (\d+), ([\d.]+) of ([\d.]+) GiB held")
LOADED = re.compile(r"loaded (\d+) tokens, ([\d.]+) MB in ([\d.]+) ms; copies alive (\d+)")
RANK = re.compile(r"^\[[^\]]* TP(\d+)[ \]]")  # how lines of a server of several ranks begin
FALLBACK = re.compile(r"no host copy, the engine's own behaviour follows \((\w+)\)")
TROUBLE = (
    "VerifyMismatch",
    "Scheduler hit an exception",
    "NotImplementedError",
    "leak detected",
    "died without release",
)

STALLED = 30  # seconds in which a server that lives says something


@dataclass
class Answer:
    """What became of one request. outcome: finished, refused (an error answer of the server) or lost."""

    outcome: str
    tokens: list[int] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    error: str = ""


@dataclass
class Load:
    """The requests of a run: seeded, the same in every run of the same arguments."""

    prompts: list[list[int]]
    new_tokens: list[int]

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Load:
        """Lengths spread evenly on a log scale, so that short, page-edge and long requests meet."""
        draw = random.Random(arguments.seed)
        low, high = arguments.prompt
        prompts, new = [], []
        for _ in range(arguments.requests):
            length = round(low * (high / low) ** draw.random())
            prompts.append([draw.randrange(10, arguments.vocabulary) for _ in range(length)])
            new.append(draw.randint(*arguments.new_tokens))
        return cls(prompts, new)


class Run:
    """One pass of the load over running servers."""

    def __init__(self, load: Load, arguments: argparse.Namespace, decode: str, prefill: str | None, room: int) -> None:
        self.load, self.arguments = load, arguments
        self.decode, self.prefill, self.room = decode, prefill, room
        self.done = 0
        self.gone = False  # whether the decode server stopped answering
        self.answers: list[Answer] = []
        self.seconds = 0.0

    def execute(self, label: str) -> Run:
        """Send everything, ``--concurrency`` at a time, with a progress line."""
        started = time.monotonic()
        stop = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(label, stop))
        watcher.start()
        try:
            with ThreadPoolExecutor(self.arguments.concurrency) as pool:
                self.answers = list(pool.map(self._one, range(len(self.load.prompts))))
        finally:  # also when interrupted, or the process would not end
            stop.set()
            watcher.join()
        self.seconds = time.monotonic() - started
        return self

    def _watch(self, label: str, stop: threading.Event) -> None:
        total = len(self.load.prompts)
        while not stop.wait(5):
            print(f"  {label}: {self.done}/{total} requests", flush=True)

    def _one(self, number: int) -> Answer:
        if self.gone:
            self.done += 1
            return Answer("lost", error="not sent: the server is gone")
        body: dict[str, Any] = {
            "input_ids": self.load.prompts[number],
            "sampling_params": {
                "max_new_tokens": self.load.new_tokens[number], "temperature": 0, "ignore_eos": True,
            },
        }  # fmt: skip
        host = "127.0.0.1" if self.prefill else servers.FAKE_HOST
        body |= {"bootstrap_host": host, "bootstrap_port": servers.BOOTSTRAP_PORT, "bootstrap_room": self.room + number}
        other = None
        if self.prefill:
            other = threading.Thread(
                target=servers.feed, args=(self.prefill, body, self.arguments.timeout), daemon=True
            )
            other.start()
        answer = self._stream(body, self.load.new_tokens[number])
        if other is not None and answer.outcome == "finished":  # the prefill server waits for ever for a lost one
            other.join()
        self.done += 1
        return answer

    def _stream(self, body: dict[str, Any], wanted: int) -> Answer:
        last = time.monotonic()
        answer = Answer("lost")
        try:
            for chunk in servers.stream(self.decode, body, self.arguments.timeout):
                now = time.monotonic()
                if "error" in chunk:
                    return Answer("refused", error=str(chunk["error"])[:300])
                finish = (chunk["meta_info"].get("finish_reason") or {}) if "meta_info" in chunk else {}
                if finish.get("type") == "abort":
                    return Answer("refused", error=str(finish.get("message"))[:300])
                if answer.tokens:
                    answer.gaps_ms.append((now - last) * 1e3)
                tokens = chunk["output_ids"]  # all so far, or only the new ones, as the server was started
                whole = len(tokens) == chunk["meta_info"]["completion_tokens"]
                answer.tokens = tokens if whole else [*answer.tokens, *tokens]
                last = now
        except urllib.error.HTTPError as error:
            return Answer("refused", error=f"HTTP {error.code}: {error.read()[:300]!r}")
        except (OSError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
            self.gone = self.gone or not servers.answers(self.decode, STALLED)
            return answer
        answer.outcome = "finished" if len(answer.tokens) == wanted else "lost"
        answer.error = "" if answer.outcome == "finished" else f"{len(answer.tokens)} of {wanted} tokens"
        return answer

    def summary(self) -> dict[str, Any]:
        """Counts and latencies."""
        gaps = [gap for answer in self.answers for gap in answer.gaps_ms]
        outcomes = [answer.outcome for answer in self.answers]
        tokens = sum(len(answer.tokens) for answer in self.answers)
        return {
            **{name: outcomes.count(name) for name in ("finished", "refused", "lost")},
            "seconds": self.seconds,
            "tokens": tokens,
            "tokens_a_second": tokens / self.seconds,
            "gap_p50_ms": _percentile(gaps, 50),
            "gap_p99_ms": _percentile(gaps, 99),
            "gap_max_ms": max(gaps, default=0.0),
            "errors": sorted({answer.error for answer in self.answers if answer.error})[:5],
        }


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1] if len(values) > 1 else 0.0


def read_log(path: Path) -> dict[str, Any]:
    """What the decode server's log says of retracts: one line a save and a load; of several ranks, what the first says.

    ranks_apart: ranks that saved, loaded or fell back otherwise than the first.
    """
    whole = path.read_text(errors="replace")
    text, *others = by_rank(whole)
    saved, loaded = SAVED.findall(text), LOADED.findall(text)
    alive = [int(line[1]) for line in re.findall(r"(saved|loaded) .*copies alive (\d+)", text)]
    fallbacks = FALLBACK.findall(text)
    return {
        "saves": len(saved),
        "loads": len(loaded),
        "saved_bytes": sum(float(line[1]) for line in saved) * 1e6,
        "loaded_bytes": sum(float(line[1]) for line in loaded) * 1e6,
        "save_ms_p50": _percentile([float(line[2]) for line in saved], 50),
        "load_ms_p50": _percentile([float(line[2]) for line in loaded], 50),
        "longest_saved": max((int(line[0]) for line in saved), default=0),
        "held_high_gib": max((float(line[4]) for line in saved), default=0.0),
        "arena_gib": float(saved[-1][5]) if saved else 0.0,
        "copies_alive_at_end": alive[-1] if alive else 0,
        "fallback_reasons": sorted(set(fallbacks)),
        "engine_retracts": sum(map(int, re.findall(r"#retracted_reqs: (\d+)", text))),
        "trouble": [word for word in TROUBLE if word in whole],
        "ranks": 1 + len(others),
        "ranks_apart": sum(decisions(other) != decisions(text) for other in others),
    }


def by_rank(log: str) -> list[str]:
    """The lines of each tensor-parallel rank; a server of one rank does not name it."""
    lines: dict[int, list[str]] = {}
    for line in log.splitlines():
        if found := RANK.match(line):
            lines.setdefault(int(found[1]), []).append(line)
    return ["\n".join(lines[rank]) for rank in sorted(lines)] or [log]


def decisions(log: str) -> list[tuple[str, str]]:
    """What a rank decided, in order: (saved or loaded, tokens), and why there was no copy."""
    found = re.findall(r"\] (saved|loaded) (\d+) tokens", log)
    return [*found, *(("no copy", reason) for reason in FALLBACK.findall(log))]


def stall_ms(answers: list[Answer], retracts: int) -> float:
    """What a retract costs its request: the median of the longest gaps between two tokens, one for each retract."""
    longest = sorted((gap for answer in answers for gap in answer.gaps_ms), reverse=True)[:retracts]
    return statistics.median(longest) if longest else 0.0


def same_tokens(first: Run, second: Run) -> dict[str, Any]:
    """How many requests have identical tokens, and how long the common beginnings are."""
    same, shares = 0, []
    for a, b in zip(first.answers, second.answers, strict=True):
        same += a.tokens == b.tokens and a.outcome == b.outcome == "finished"
        common = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), len(a.tokens))
        shares.append(common / max(1, len(a.tokens)))
    return {"same": same, "of": len(shares), "common_beginning": statistics.mean(shares)}


def serve_and_run(arguments: argparse.Namespace, load: Load, name: str, interval: int, times: int) -> dict[str, Any]:
    """Start the servers, run the load ``times`` times, stop them; runs, summaries and the log's story."""
    folder = arguments.logs / name
    environment = {"SGLANG_HOST_IP": "127.0.0.1"}
    if arguments.stock:
        environment["DSV4_ENABLED"] = "0"
    else:
        environment |= {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models", "DSV4_VERIFY": str(arguments.verify)}
    decode_environment = dict(environment)
    if interval:
        decode_environment |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(interval)}
    started = []
    try:
        if arguments.transfer == "nixl":
            started.append(
                servers.launch("prefill", arguments.model_path, arguments.server, environment, folder, "nixl")
            )
        decode = servers.launch(
            "decode", arguments.model_path, arguments.server, decode_environment, folder, arguments.transfer
        )
        started.append(decode)
        servers.wait_until_up(started, arguments.patience)
        prefill = started[0].url if arguments.transfer == "nixl" else None
        runs = []
        for number in range(times):
            room = 1 + number * len(load.prompts)
            runs.append(Run(load, arguments, decode.url, prefill, room).execute(f"{name} {number + 1}/{times}"))
        time.sleep(2)
        alive = all(server.alive for server in started)
    finally:
        statuses = servers.stop_all(started)
    return {
        "runs": runs,
        "summaries": [run.summary() for run in runs],
        "log": read_log(decode.log),
        "alive": alive,
        "exit": statuses,
    }


def judge(found: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The bounds of a run with retracts."""
    log, summary = found["log"], found["summaries"][0]
    bounds = [
        results.bound("requests lost", "<= 0", summary["lost"]),
        results.bound("requests refused", f"<= {arguments.may_refuse}", summary["refused"]),
        results.bound("server alive at the end", ">= 1", int(found["alive"])),
        results.bound("trouble in the log", "<= 0", len(log["trouble"])),
        results.bound("retracts with a copy", f">= {arguments.at_least}", log["saves"]),
        results.bound("copies alive at the end", "<= 0", log["copies_alive_at_end"]),
        results.bound("ranks that said what they decided", f">= {servers.ranks(arguments.server)}", log["ranks"]),
        results.bound("ranks that decided otherwise than the first", "<= 0", log["ranks_apart"]),
    ]
    if arguments.falls_back:
        reason = arguments.falls_back
        bounds.append(results.bound(f"no copy because of {reason}", ">= 1", log["fallback_reasons"].count(reason)))
    if not arguments.may_refuse:
        bounds.append(results.bound("saves without a load", "<= 0", abs(log["saves"] - log["loads"])))
    return bounds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for the servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--transfer", choices=("fake", "nixl"), default="fake")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument(
        "--interval", type=int, default=20, help="forward steps between forced retracts; 0: none forced"
    )
    parser.add_argument("--prompt", type=int, nargs=2, default=(30, 2500), help="shortest and longest prompt")
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(40, 200))
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verify", type=int, choices=(0, 1), default=1)
    parser.add_argument("--compare", action="store_true", help="also run without retracts, twice, and compare tokens")
    parser.add_argument("--stock", action="store_true", help="the engine without this package")
    parser.add_argument("--may-refuse", type=int, default=0, help="requests that may be answered with an error")
    parser.add_argument("--falls-back", metavar="REASON", help="some retract must find no host copy for this reason")
    parser.add_argument("--at-least", type=int, default=1, help="retracts that there must be")
    parser.add_argument("--patience", type=float, default=420, help="seconds for the servers to come up")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one request")
    parser.add_argument("--name", default="stress")
    return servers.parse(parser, argv)


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    load = Load.of(arguments)
    rows: list[dict[str, Any]] = []
    found = serve_and_run(arguments, load, f"{arguments.name}-retracts", arguments.interval, 1)
    stall = stall_ms(found["runs"][0].answers, found["log"]["engine_retracts"])
    rows.append(
        {"run": "retracts", **found["summaries"][0], "stall_p50_ms": stall, **found["log"], "exit": found["exit"]}
    )
    bounds = judge(found, arguments)
    if arguments.compare:
        control = serve_and_run(arguments, load, f"{arguments.name}-control", 0, 2)
        rows += [{"run": f"control {i + 1}", **summary} for i, summary in enumerate(control["summaries"])]
        with_retracts = same_tokens(control["runs"][0], found["runs"][0])
        without = same_tokens(*control["runs"])
        rows.append({"run": "tokens", "with_retracts": with_retracts, "control": without})
        slack = 2 * (without["of"] * 0.25) ** 0.5  # two standard deviations of a count, at most
        bounds.append(
            results.bound(
                "requests with the tokens of the control", f">= {without['same'] - slack:.0f}", with_retracts["same"]
            )
        )
    for row in rows:
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    results.write(arguments.name, rows, bounds, arguments.out)
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
