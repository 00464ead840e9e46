"""Sends seeded requests to a server, and keeps the tokens and gaps of each answer."""

from __future__ import annotations

import argparse
import http.client
import random
import threading
import time
import urllib.error
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sglang_dsv4.command_line import number
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.retract_stats import percentile

VOCABULARY = number(int, 11)  # the type of an argument: token ids begin at 10
STALLED = 30  # seconds in which a server that lives says something
# Lengths of prompts whose prefills are of the shapes that a load meets: from a restored request's one token to a chunk.
SHAPES = (1, 2, 5, 16, 50, 130, 300, 600, 1200, 2500, 4000)


@dataclass
class Answer:
    """Holds the fate of one request. outcome: finished, refused (an error answer of the server), unsent or lost.

    arrived: a time (monotonic) and the tokens until then, for each chunk. cached: tokens of the prompt that the prefix
    tree had; on_host: those of them that a hierarchical cache brought back from the host.
    """

    outcome: str
    tokens: list[int] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    error: str = ""
    arrived: list[tuple[float, int]] = field(default_factory=list)
    cached: int = 0
    on_host: int = 0


@dataclass
class Load:
    """Makes the requests of a run from a seed: the same in every run of the same arguments."""

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

    def first(self, count: int) -> Load:
        """Returns the first ``count`` requests."""
        return Load(self.prompts[:count], self.new_tokens[:count])


def check_lengths(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuses a shortest prompt, or a shortest answer, that is longer than the longest."""
    for option in ("prompt", "new_tokens"):
        shortest, longest = getattr(arguments, option)
        if shortest > longest:
            parser.error(f"--{option.replace('_', '-')} {shortest} {longest}: the shortest comes first")


def warm_up(urls: Sequence[str], vocabulary: int, timeout: float) -> None:
    """Sends one prompt of each of SHAPES to each server: the first prefill of a shape compiles for up to half a minute.

    Each server gets one at a time, so that nothing is retracted; all servers get theirs at once.
    """

    def warm(url: str) -> None:
        draw = random.Random("warm")
        for length in SHAPES:
            prompt = [draw.randrange(10, vocabulary) for _ in range(length)]
            sampling = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
            servers.post(url, "/generate", {"input_ids": prompt, "sampling_params": sampling}, timeout)

    started = time.monotonic()
    with ThreadPoolExecutor(len(urls)) as pool:
        list(pool.map(warm, urls))
    print(f"  warm after {time.monotonic() - started:.0f} s", flush=True)


class Run:
    """Passes the load over running servers: a decode server, the prefill server beside it, or a plain one.

    room: the first request's transfer room, new to the servers as the next ones are; None for a plain server.
    ``--most-seconds``, where there is such an option: requests not sent until then are not sent.
    """

    def __init__(
        self,
        load: Load,
        arguments: argparse.Namespace,
        decode: str,
        prefill: str | None,
        room: int | None,
        bootstrap_port: int = servers.BOOTSTRAP_PORT,
    ) -> None:
        self.load, self.arguments = load, arguments
        self.decode, self.prefill, self.room, self.bootstrap_port = decode, prefill, room, bootstrap_port
        self.done = 0
        self.gone = False  # whether the decode server stopped answering
        self.answers: list[Answer] = []
        self.seconds = 0.0
        self._ends: float | None = None

    def execute(self, label: str) -> Run:
        """Sends everything, ``--concurrency`` at a time, with a progress line."""
        started = time.monotonic()
        most = getattr(self.arguments, "most_seconds", None)
        self._ends = None if most is None else started + most
        stop, pool = threading.Event(), ThreadPoolExecutor(self.arguments.concurrency)
        watcher = threading.Thread(target=self._watch, args=(label, stop))
        watcher.start()
        try:
            self.answers = list(pool.map(self._one, range(len(self.load.prompts))))
        finally:  # also when interrupted: whoever does that has servers to end, and does not wait for their answers
            pool.shutdown(wait=False, cancel_futures=True)
            stop.set()
            watcher.join()
        self.seconds = time.monotonic() - started
        return self

    def _watch(self, label: str, stop: threading.Event) -> None:
        total = len(self.load.prompts)
        while not stop.wait(5):
            print(f"  {label}: {self.done}/{total} requests", flush=True)

    def _one(self, number: int) -> Answer:
        return self.ask(self.load.prompts[number], self.load.new_tokens[number], number)

    def ask(self, prompt: list[int], new_tokens: int, number: int, more: Mapping[str, Any] | None = None) -> Answer:
        """Sends one request. number: of its transfer room, from the run's first one on. more: fields of its body."""
        if self.gone:
            self.done += 1
            return Answer("lost", error="not sent: the server is gone")
        if self._ends is not None and time.monotonic() > self._ends:
            return Answer("unsent")
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
            **(more or {}),
        }
        if self.room is not None:
            body |= {
                "bootstrap_host": urlsplit(self.prefill).hostname if self.prefill else servers.FAKE_HOST,
                "bootstrap_port": self.bootstrap_port,
                "bootstrap_room": self.room + number,
            }
        other = None
        if self.prefill:
            other = threading.Thread(
                target=servers.feed, args=(self.prefill, body, self.arguments.timeout), daemon=True
            )
            other.start()
        answer = self._stream(body, new_tokens)
        if other is not None and answer.outcome == "finished":  # the prefill server waits for ever for a lost one
            other.join()
        self.done += 1
        return answer

    def _stream(self, body: dict[str, Any], wanted: int) -> Answer:
        last = time.monotonic()
        answer = Answer("lost")
        cumulative = None  # whether a chunk has all tokens so far, or only the new ones, as the server was started
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
                tokens, count = chunk["output_ids"], chunk["meta_info"]["completion_tokens"]
                if not answer.arrived:
                    answer.cached = chunk["meta_info"].get("cached_tokens", 0)
                    answer.on_host = (chunk["meta_info"].get("cached_tokens_details") or {}).get("host", 0)
                answer.arrived.append((now, count))
                if cumulative is None and count > 1:
                    cumulative = len(tokens) >= count  # more: one was sent twice
                if cumulative is None:
                    answer.tokens = tokens or answer.tokens
                else:
                    answer.tokens = tokens if cumulative else [*answer.tokens, *tokens]
                last = now
        except urllib.error.HTTPError as error:
            return Answer("refused", error=f"HTTP {error.code}: {error.read()[:300]!r}")
        except (OSError, ValueError, http.client.HTTPException) as error:
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
            **{name: outcomes.count(name) for name in ("finished", "refused", "lost", "unsent")},
            "seconds": self.seconds,
            "tokens": tokens,
            "tokens_a_second": tokens / self.seconds,
            "gap_p50_ms": percentile(gaps, 50),
            "gap_p99_ms": percentile(gaps, 99),
            "gap_max_ms": max(gaps, default=0.0),
            "errors": sorted({answer.error for answer in self.answers if answer.error})[:5],
        }
