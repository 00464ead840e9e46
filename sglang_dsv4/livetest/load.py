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
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from sglang_dsv4.command_line import number
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.retract_stats import percentile

VOCABULARY = number(int, 11)  # the type of an argument: token ids begin at 10
STALLED = 30  # seconds in which a server that lives says something
# Lengths of prompts: a restored request's one token and a few, then one in each of 21 ranges of lengths. The engine has
# a kernel before each layer for each, and compiles it for 25 s with dummy weights, or loads it, at the first prompt.
SHAPES = (1, 2, 5, 16, 50, 130, 200, 260, 330, 390, 450, 520, 580, 650, 710, 770, 840, 900, 1030, 1200, 1500, 1700,
          2200, 3000, 4300)  # fmt: skip
FOLLOW_UP = (20, 60)  # tokens that a turn puts behind the answer before it
ASKS_CHOICES = {"return_routed_experts": True}  # in the body of a request
OUTCOMES = (
    "whole",  # exactly the tokens asked for
    "too_many",  # tokens, as where one was sent twice
    "too_few",  # tokens
    "never_ended",  # silent for --timeout
    "refused",  # with 503
    "failed",  # any other error; or the server is gone
    "unsent",  # not sent in time
)


@dataclass
class Answer:
    """Holds the fate of one request."""

    outcome: str  # one of OUTCOMES
    tokens: list[int] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    error: str = ""
    sent: float = 0.0  # monotonic
    arrived: list[tuple[float, int]] = field(default_factory=list)  # a time and the tokens until then, for each chunk
    prompt: int = 0  # tokens of its prompt
    cached: int = 0  # those of them that the prefix tree had
    on_host: int = 0  # those of them that sessions, or a hierarchical cache, brought back from the host
    choices: str = ""  # base64 of the experts of each token but the last, where the request asked for them


def count_outcomes(answers: Sequence[Answer]) -> dict[str, int]:
    """Returns how many answers were asked for, and how many had each outcome."""
    fates = [answer.outcome for answer in answers]
    return {"asked": len(fates), **{outcome: fates.count(outcome) for outcome in OUTCOMES}}


def in_words(counted: Mapping[str, int]) -> str:
    """Returns the counts of ``count_outcomes`` in one line, outcomes that nothing had left out."""
    others = [f"{counted[outcome]} {outcome.replace('_', ' ')}" for outcome in OUTCOMES[1:] if counted[outcome]]
    return ", ".join([f"{counted['whole']} of {counted['asked']} whole", *others])


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

    def next_turn(self, answers: Sequence[Answer], seed: str, arguments: argparse.Namespace) -> Load:
        """Makes the next turns of the conversations whose turns were answered by ``answers``.

        The first ones go on alike, however many there are.
        """
        draw = random.Random(seed)
        prompts, new = [], []
        for prompt, answer in zip(self.prompts, answers, strict=True):
            more = draw.randint(*FOLLOW_UP)
            prompts.append([*prompt, *answer.tokens, *(draw.randrange(10, arguments.vocabulary) for _ in range(more))])
            new.append(draw.randint(*arguments.new_tokens))
        return Load(prompts, new)


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
        self.dp = servers.parallel(getattr(arguments, "server", ())).dp
        self.done = 0
        self.gone = False  # whether the decode server stopped answering
        self.answers: list[Answer] = []
        self.seconds = 0.0
        self._ends: float | None = None

    def execute(self, label: str, turns: int = 1) -> Run:
        """Sends everything, ``--concurrency`` at a time, with a progress line.

        turns: of each conversation. All have their first turn before any has its second: the cache of each is long
        evicted then. ``answers`` has those to the first turns first, ``load`` is that of the last ones.
        """
        started = time.monotonic()
        most = getattr(self.arguments, "most_seconds", None)
        self._ends = None if most is None else started + most
        stop, pool = threading.Event(), ThreadPoolExecutor(self.arguments.concurrency)
        watcher = threading.Thread(target=self._watch, args=(label, stop, turns))
        watcher.start()
        try:
            count = len(self.load.prompts)
            self.answers = list(pool.map(self._one, range(count)))
            for turn in range(1, turns):
                seed = f"{self.arguments.seed}, turn {turn}"
                self.load = self.load.next_turn(self.answers[-count:], seed, self.arguments)
                self.room = self.room and self.room + count
                self.answers += pool.map(self._one, range(count))
        finally:  # also when interrupted: whoever does that has servers to end, and does not wait for their answers
            pool.shutdown(wait=False, cancel_futures=True)
            stop.set()
            watcher.join()
        self.seconds = time.monotonic() - started
        print(f"  {label}: {in_words(count_outcomes(self.answers))}", flush=True)
        return self

    def last_turns(self, count: int) -> tuple[Load, list[Answer]]:
        """Returns the last turns of the first ``count`` conversations, whole prompts, with their answers."""
        return self.load.first(count), self.answers[-len(self.load.prompts) :][:count]

    def _watch(self, label: str, stop: threading.Event, turns: int) -> None:
        total = turns * len(self.load.prompts)
        while not stop.wait(5):
            print(f"  {label}: {self.done}/{total} requests", flush=True)

    def _one(self, number: int) -> Answer:
        asked = ASKS_CHOICES if getattr(self.arguments, "choices", False) else None
        return self.ask(self.load.prompts[number], self.load.new_tokens[number], number, asked)

    def ask(self, prompt: list[int], new_tokens: int, number: int, more: Mapping[str, Any] | None = None) -> Answer:
        """Sends one request. number: of its transfer room, from the run's first one on. more: fields of its body."""
        if self.gone:
            self.done += 1
            return Answer("failed", error="not sent: the server is gone")
        if self._ends is not None and time.monotonic() > self._ends:
            return Answer("unsent")
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
            **(more or {}),
        }
        if self.dp > 1:  # each has a prefix cache of its own, so that a conversation stays with one
            body["routed_dp_rank"] = number % self.dp
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
        if other is not None and answer.outcome == "whole":  # the prefill server may wait for ever for another
            other.join()
        self.done += 1
        return answer

    def _stream(self, body: dict[str, Any], wanted: int) -> Answer:
        last = time.monotonic()
        answer = Answer("failed", sent=last, prompt=len(body["input_ids"]))
        added: list[int] = []  # of all chunks
        try:
            for chunk in servers.stream(self.decode, body, self.arguments.timeout):
                now = time.monotonic()
                if "error" in chunk:
                    error = chunk["error"]
                    return turned_away(error.get("code") if isinstance(error, dict) else None, str(error))
                finish = (chunk["meta_info"].get("finish_reason") or {}) if "meta_info" in chunk else {}
                if finish.get("type") == "abort":
                    return turned_away(finish.get("status_code"), str(finish.get("message")))
                if answer.tokens:
                    answer.gaps_ms.append((now - last) * 1e3)
                tokens, count = chunk["output_ids"], chunk["meta_info"]["completion_tokens"]
                added += tokens
                if not answer.arrived:
                    answer.cached = chunk["meta_info"].get("cached_tokens", 0)
                    answer.on_host = (chunk["meta_info"].get("cached_tokens_details") or {}).get("host", 0)
                answer.arrived.append((now, count))
                answer.choices = chunk["meta_info"].get("routed_experts") or ""  # the last chunk has them
                # As the server was started, a chunk has all tokens so far (more: one was sent twice), or the new ones.
                answer.tokens = tokens if len(tokens) >= count else list(added)
                last = now
        except urllib.error.HTTPError as error:
            return turned_away(error.code, f"HTTP {error.code}: {error.read()!r}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            answer.outcome = "never_ended" if isinstance(error, TimeoutError) else "failed"
            answer.error = f"{type(error).__name__}: {error}"
            self.gone = self.gone or not servers.answers(self.decode, STALLED)
            return answer
        more = len(answer.tokens) - wanted
        answer.outcome = "too_many" if more > 0 else "too_few" if more else "whole"
        answer.error = f"{len(answer.tokens)} of {wanted} tokens" if more else ""
        return answer

    def summary(self) -> dict[str, Any]:
        """Counts and latencies."""
        gaps = [gap for answer in self.answers for gap in answer.gaps_ms]
        tokens = sum(len(answer.tokens) for answer in self.answers)
        asked = sum(answer.prompt for answer in self.answers)
        return {
            **count_outcomes(self.answers),
            "seconds": self.seconds,
            "tokens": tokens,
            "tokens_a_second": tokens / self.seconds,
            "cached_share": sum(answer.cached for answer in self.answers) / max(1, asked),
            "gap_p50_ms": percentile(gaps, 50),
            "gap_p99_ms": percentile(gaps, 99),
            "gap_max_ms": max(gaps, default=0.0),
            "errors": sorted({answer.error for answer in self.answers if answer.error})[:5],
        }


def turned_away(status: int | None, error: str) -> Answer:
    """Returns the answer of a server that sends an error with this HTTP status, or with none."""
    return Answer("refused" if status == HTTPStatus.SERVICE_UNAVAILABLE else "failed", error=error[:300])
