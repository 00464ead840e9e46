"""Questions of two tokens to a prefill and a decode server, and what the second token's choices were."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import servers

CHOSEN_TOKENS = 4 * 512  # beyond, the indexer leaves rows of 4 tokens out
TOP = 20
FORCED = 1e4  # a bias above any logit


@dataclass(frozen=True)
class Question:
    """A prompt, and the token that the prefill server shall put behind it."""

    prompt: list[int]
    first: int


@dataclass(frozen=True)
class Answer:
    """The first token, and the log probability of each of the second token's top choices."""

    first: int
    choices: dict[int, float]


def questions(prompts: Sequence[int], vocabulary: int, seed: int) -> list[Question]:
    """Seeded, one for each length."""
    draw = random.Random(seed)
    return [
        Question([draw.randrange(10, vocabulary) for _ in range(length)], draw.randrange(10, vocabulary))
        for length in prompts
    ]


class Asker:
    """Sends one question at a time. After the first that is lost, or ``seconds`` from now on, it sends no more."""

    def __init__(self, prefill: str, decode: str, timeout: float, seconds: float, room: int = 1) -> None:
        self.prefill, self.decode = prefill, decode
        self.timeout, self.deadline = timeout, time.monotonic() + seconds
        self.room = room  # the next request's; never one that another request has
        self.stopped = False

    def ask(self, question: Question) -> Answer | None:
        """None: lost, or not sent."""
        timeout = min(self.timeout, self.deadline - time.monotonic())
        if self.stopped or timeout <= 0:
            return None
        sampling = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
        body = {
            "input_ids": question.prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": TOP,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": servers.BOOTSTRAP_PORT,
            "bootstrap_room": self.room,
        }
        self.room += 1
        forced = body | {"sampling_params": sampling | {"logit_bias": {str(question.first): FORCED}}}
        other = threading.Thread(target=servers.feed, args=(self.prefill, forced, timeout), daemon=True)
        other.start()
        try:
            answer = read(servers.post(self.decode, "/generate", body, timeout))
        except (OSError, ValueError, http.client.HTTPException) as error:
            print(f"  lost, and no more are sent: {type(error).__name__}: {error}", flush=True)
            self.stopped = True
            return None
        other.join(timeout)
        return answer


def read(answer: Any) -> Answer:
    """The server's answer: of each token a list of [log probability, token, text]. ValueError: there are not two."""
    meta = answer.get("meta_info", {}) if isinstance(answer, dict) else {}
    listed = meta.get("output_top_logprobs") or []
    if len(listed) != 2 or not listed[1]:
        raise ValueError(f"no choices of a second token in {str(answer)[:500]}")
    return Answer(answer["output_ids"][0], {token: value for value, token, _ in listed[1]})


def distance(control: dict[int, float], other: dict[int, float]) -> float:
    """Largest difference over the control's choices. One not among the other's is there no likelier than its last."""
    last = min(other.values())
    return max(
        abs(value - other[token]) if token in other else max(0.0, value - last) for token, value in control.items()
    )
