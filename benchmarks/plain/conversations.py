"""A server under pressure is asked for what people ask for: a beginning that many share, an answer, a second turn.

A first turn may end anywhere in a page. Where n = its tokens less one is 1 to 127 behind a page's edge, a request that
was restored leaves a last page to the prefix tree whose states are not all there, unless somebody sees to it; its
second turn would read them. So half of the first turns here end there.
"""

from __future__ import annotations

import argparse
import itertools
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Answer, Load, Run
from sglang_dsv4.livetest.retract_stats import percentile

PAGE, WINDOW = 256, 128
SHARED = 4  # beginnings
FOLLOW_UP = (20, 60)  # tokens that a second turn puts behind the first one's answer


@dataclass
class Conversations:
    """Seeded first turns, what the second turns add, and the lengths of their answers."""

    first: Load
    follow_ups: list[list[int]]
    later_tokens: list[int]

    @classmethod
    def of(cls, seed: str, arguments: argparse.Namespace) -> Conversations:
        """``arguments``: conversations, shared, prompt, new_tokens and vocabulary."""
        draw = random.Random(seed)

        def tokens(count: int) -> list[int]:
            return [draw.randrange(10, arguments.vocabulary) for _ in range(count)]

        low, high = arguments.prompt
        beginnings = [tokens(arguments.shared) for _ in range(SHARED)]
        prompts, new, follow_ups, later = [], [], [], []
        for number in range(arguments.conversations):
            prompts.append(beginnings[number % SHARED] + tokens(round(low * (high / low) ** draw.random())))
            wanted = draw.randint(*arguments.new_tokens)
            new.append(ending_behind_an_edge(len(prompts[-1]), wanted) if number % 2 else wanted)
            follow_ups.append(tokens(draw.randint(*FOLLOW_UP)))
            later.append(draw.randint(*arguments.new_tokens))
        return cls(Load(prompts, new), follow_ups, later)


def ending_behind_an_edge(prompt: int, new_tokens: int) -> int:
    """``new_tokens``, or some more, so that the tokens saved at the end are 1 to 127 behind a page's edge."""
    over = (prompt + new_tokens - 1) % PAGE
    if 0 < over < WINDOW:
        return new_tokens
    return new_tokens + (-over) % PAGE + 1 + new_tokens % (WINDOW - 1)


class Talks(Run):
    """Both turns of each conversation, first and second by turns in ``answers``; ``load`` has the prompts likewise.

    busy: the seconds at the beginning in which more requests wait to be sent. What is not done after ``most_seconds``
    is cut off: its outcome is "cut".
    """

    def __init__(self, talks: Conversations, arguments: argparse.Namespace, url: str) -> None:
        super().__init__(talks.first, arguments, url, None, None)
        self.talks = talks
        self._second: dict[int, tuple[list[int], Answer]] = {}
        self.began = self._last_begun = 0.0
        self._cut = False

    def execute(self, label: str) -> Talks:
        """See Run."""
        self.began = self._last_begun = time.monotonic()
        timer = threading.Timer(self.arguments.most_seconds, self._cut_off)
        timer.start()
        try:
            super().execute(label)
        finally:
            timer.cancel()
        seconds = [self._second[number] for number in range(len(self.answers))]
        prompts = zip(self.talks.first.prompts, (prompt for prompt, _ in seconds), strict=True)
        new = zip(self.talks.first.new_tokens, self.talks.later_tokens, strict=True)
        answers = zip(self.answers, (answer for _, answer in seconds), strict=True)
        chain = itertools.chain.from_iterable
        self.load, self.answers = Load(list(chain(prompts)), list(chain(new))), list(chain(answers))
        return self

    def _cut_off(self) -> None:
        self._cut = True
        self._last_begun = time.monotonic()  # requests waited until now
        servers.post(self.decode, "/abort_request", {"abort_all": True}, 30)

    def _one(self, number: int) -> Answer:
        if not self._cut:
            self._last_begun = max(self._last_begun, time.monotonic())
        first = self._unless_cut(self.talks.first.prompts[number], self.talks.first.new_tokens[number], number)
        prompt = self.talks.first.prompts[number] + first.tokens + self.talks.follow_ups[number]
        second = Answer(first.outcome, error="no first turn")
        if first.outcome == "finished":
            second = self._unless_cut(prompt, self.talks.later_tokens[number], number)
        self._second[number] = prompt, second
        return first

    def _unless_cut(self, prompt: list[int], new_tokens: int, number: int) -> Answer:
        answer = Answer("cut") if self._cut else self.ask(prompt, new_tokens, number)
        if self._cut and answer.outcome == "refused":
            answer.outcome = "cut"
        return answer

    @property
    def busy(self) -> float:
        """See the class."""
        return self._last_begun - self.began

    def each_second(self) -> list[int]:
        """Tokens that arrived in each second of the run."""
        found = [0] * (int(self.seconds) + 1)
        for at, count in arrivals(self.answers):
            found[min(int(at - self.began), len(found) - 1)] += count
        return found

    def summary(self) -> dict[str, Any]:
        """Of Run; the rate while requests wait to be sent, and what second turns found in the prefix tree."""
        second = list(zip(self.load.prompts, self.answers, strict=True))[1::2]
        asked = sum(len(prompt) for prompt, answer in second if answer.outcome == "finished")
        busy = sum(count for at, count in arrivals(self.answers) if at <= self._last_begun)
        return {
            **super().summary(),
            "cut": sum(answer.outcome == "cut" for answer in self.answers),
            "busy_seconds": self.busy,
            "busy_tokens_a_second": busy / self.busy if self.busy else 0.0,
            "second_turns_cached": sum(answer.cached for _, answer in second) / max(1, asked),
            "each_second": self.each_second(),
        }


def arrivals(answers: Sequence[Answer]) -> list[tuple[float, int]]:
    """When tokens came, and how many at once."""
    found = []
    for answer in answers:
        counts = [0, *(count for _, count in answer.arrived)]
        steps = [later - earlier for earlier, later in itertools.pairwise(counts)]
        found += [(at, step) for (at, _), step in zip(answer.arrived, steps, strict=True)]
    return found


def gaps_of(runs: Sequence[Talks]) -> dict[str, float]:
    """p50, p99 and longest gap between two tokens of one answer, over all runs."""
    gaps = [gap for run in runs for answer in run.answers for gap in answer.gaps_ms]
    return {
        "gap_p50_ms": percentile(gaps, 50),
        "gap_p99_ms": percentile(gaps, 99),
        "gap_max_ms": max(gaps, default=0.0),
    }
