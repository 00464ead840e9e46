#!/usr/bin/env python3
"""A resume against the recompute of the same tokens, on live servers of one machine, in one run.

    python3 -m benchmarks.resume.run --config benchmarks/resume/flash_config.json --experts 96

First a decode server with this package (fake transfer, forced retracts): the longer of two requests is retracted again
and again. Each resume gives two figures: the load alone, from an idle device to its last byte, and the time from
admission to the next token, measured where that token reaches the client. Then a plain stock server prefills as many
tokens: the time to its first token. Both have the same model: --config with its routed experts cut to --experts, so
that it fits the card (a token is still computed by as many experts as before). Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.shapes import write_model
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers

CHECKOUT = Path(__file__).resolve().parents[2]
KEEPER = 64  # prompt of the request that stays: the engine never retracts the last one
# Load and admission-to-token against recompute, at 64K tokens.
LEAST_LOAD, LEAST_TOKEN, BOUND_AT = 300, 50, 65536


def prompt(tokens: int, seed: int, vocabulary: int) -> list[int]:
    """Seeded tokens."""
    draw = random.Random(seed)
    return [draw.randrange(10, vocabulary) for _ in range(tokens)]


class Client:
    """One decode server's client; remembers when each token arrived."""

    def __init__(self, url: str, vocabulary: int) -> None:
        self.url, self.vocabulary, self.room = url, vocabulary, 0

    def names(self) -> dict[str, Any]:
        """What tells the current request from others."""
        return {
            "bootstrap_host": servers.FAKE_HOST, "bootstrap_port": servers.BOOTSTRAP_PORT, "bootstrap_room": self.room,
        }  # fmt: skip

    def generate(self, tokens: int, new_tokens: int, stop: threading.Event | None = None) -> dict[int, float]:
        """Wall clock by number of tokens generated; leaves early when ``stop`` is set."""
        self.room += 1
        body = {
            "input_ids": prompt(tokens, self.room, self.vocabulary),
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
            **self.names(),
        }
        arrived: dict[int, float] = {}
        for chunk in servers.stream(self.url, body):
            if "error" in chunk:
                raise RuntimeError(f"the server answered {chunk['error']}")
            arrived.setdefault(chunk["meta_info"]["completion_tokens"], time.time())
            if stop is not None and stop.is_set():
                break
        return arrived


def after_admission(resume: dict[str, Any], length: int, arrived: dict[int, float]) -> float:
    """Milliseconds from the admission to the first token that was not there before it.

    A copy of n tokens was made with n + 1 - length tokens generated (the last token's cache is made again).
    """
    had = resume["tokens"] + 1 - length
    later = [at for number, at in arrived.items() if number > had]
    return (min(later) - resume["admitted"]) * 1e3 if later else float("nan")


def resumes(arguments: argparse.Namespace, model: Path, vocabulary: int) -> list[dict[str, Any]]:
    """The decode server's part: one row a length."""
    folder = arguments.logs / "resume"
    folder.mkdir(parents=True, exist_ok=True)
    out = folder.resolve() / "resumes.jsonl"
    out.unlink(missing_ok=True)
    environment = {
        **servers.model_package("benchmarks.resume.timed_resumes", CHECKOUT), "TIMED_RESUMES_FILE": str(out),
        **servers.forced_retracts(arguments.interval),
    }  # fmt: skip
    server = servers.launch("decode", str(model), [*room(arguments), *arguments.server], environment, folder)
    rows = []
    try:
        servers.wait_until_up([server], arguments.patience)
        client = Client(server.url, vocabulary)
        stop = threading.Event()
        keeper = threading.Thread(target=client.generate, args=(KEEPER, 1 << 14, stop))
        keeper.start()
        time.sleep(2)
        for length in arguments.tokens:
            loads, waits, nbytes = [], [], 0
            for number in range(arguments.repeats + 1):
                seen = len(lines(out))
                arrived = client.generate(length, arguments.new_tokens)
                if number:  # the first one warms up
                    for resume in lines(out)[seen:]:
                        loads.append(resume["load_ms"])
                        waits.append(after_admission(resume, length, arrived))
                        nbytes = resume["bytes"]
            step = typical_gap(arrived)
            rows.append({"tokens": length, "resumes": len(loads), "bytes": nbytes, "load_ms": statistics.median(loads),
                         "load_ms_worst": max(loads), "to_token_ms": statistics.median(waits),
                         "to_token_ms_worst": max(waits), "decode_step_ms": step})  # fmt: skip
            print(rows[-1], flush=True)
        stop.set()
        keeper.join()
    finally:
        server.stop()
    return rows


def lines(path: Path) -> list[dict[str, Any]]:
    """Every resume so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def typical_gap(arrived: dict[int, float]) -> float:
    """Median milliseconds between two tokens."""
    times = sorted(arrived.values())
    return statistics.median(b - a for a, b in itertools.pairwise(times)) * 1e3


def recomputes(arguments: argparse.Namespace, model: Path, vocabulary: int) -> dict[int, list[float]]:
    """The plain stock server's part: milliseconds to the first token, by length."""
    environment = {"DSV4_ENABLED": "0", "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models"}
    # A small SWA pool (the engine's default here) holds one chunk, and a long prompt then waits for ever.
    given = ["--disable-radix-cache", "--chunked-prefill-size", str(arguments.chunk), "--swa-full-tokens-ratio", "0.5"]
    folder = arguments.logs / "recompute"
    server = servers.launch("plain", str(model), [*given, *room(arguments), *arguments.server], environment, folder)
    found: dict[int, list[float]] = {}
    try:
        servers.wait_until_up([server], arguments.patience)
        for length in arguments.tokens:
            for number in range(arguments.repeats + 1):
                body = {
                    "input_ids": prompt(length, number, vocabulary),
                    "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
                }
                started = time.perf_counter()
                for chunk in servers.stream(server.url, body, 120):
                    if "error" in chunk:
                        raise RuntimeError(f"the server answered {chunk['error']}")
                    break
                if number:  # the first one compiles
                    found.setdefault(length, []).append((time.perf_counter() - started) * 1e3)
            print({"tokens": length, "recompute_ms": found[length]}, flush=True)
    finally:
        server.stop()
    return found


def room(arguments: argparse.Namespace) -> list[str]:
    """Server arguments that make the longest request fit beside the one that stays."""
    context = max(arguments.tokens) + (1 << 15)
    return ["--context-length", str(context), "--max-total-tokens", str(2 * context)]


def join(rows: list[dict[str, Any]], recomputed: dict[int, list[float]]) -> list[dict[str, Any]]:
    """The rows with the recompute beside them, and how many times faster a resume is."""
    return [
        row | {
            "recompute_ms": (recompute := statistics.median(recomputed[row["tokens"]])),
            "load_faster": recompute / row["load_ms"],
            "to_token_faster": recompute / row["to_token_ms"],
        }
        for row in rows
    ]  # fmt: skip


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bounds at 64K tokens; a resume must have been seen at every length."""
    bounds = [results.bound(f"resumes seen at {row['tokens']} tokens", ">= 3", row["resumes"]) for row in rows]
    for row in rows:
        if row["tokens"] == BOUND_AT:
            bounds += [
                results.bound("load against recompute at 64K", f">= {LEAST_LOAD}", row["load_faster"]),
                results.bound("admission to token, the same", f">= {LEAST_TOKEN}", row["to_token_faster"]),
            ]
    return bounds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for both servers."""
    parser = results.parser(__doc__, "resume")
    parser.add_argument("--config", type=Path, required=True, help="config.json of the model")
    parser.add_argument("--experts", type=int, required=True, help="routed experts that fit the card")
    parser.add_argument("--tokens", type=int, nargs="+", default=(4096, 16384, 65536))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=130)
    parser.add_argument("--interval", type=int, default=40, help="forward steps between forced retracts")
    parser.add_argument("--chunk", type=int, default=16384, help="--chunked-prefill-size of the plain server")
    parser.add_argument("--patience", type=float, default=420)
    return servers.parse(parser, argv)


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    model, facts = write_model(arguments.config, arguments.logs / "model", arguments.experts)
    rows = join(resumes(arguments, model, facts["vocab_size"]), recomputes(arguments, model, facts["vocab_size"]))
    bounds = judge(rows)
    results.show(rows)
    return results.finish(arguments, rows, bounds)


if __name__ == "__main__":
    sys.exit(main())
