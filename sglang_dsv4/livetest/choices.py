"""Compares the experts that each token of an answer chose with a control's choices for the same tokens.

With --enable-return-routed-experts a request that asks gets one row for each of its tokens but the last, which no step
has read: the experts of each layer. The control is sent prompt and answer as one prompt and returns its rows.

In most layers rounding swaps an expert for the next best, so the rows of the control's own answers differ from those of
its prefill, too. Such rows have most experts in common. The row of another token, or no row, has nearly none: such a
position is called foreign, and after retracts there may be hardly more of them than in the control's own answers.
That a row which is off by one position would be foreign is seen from the control's rows themselves.

The first layers choose by the token's id, and must be equal in every position. (Up to 0.5.23 the engine records nothing
for them, and returns zeros; ``by_token_recorded`` counts positions that have more.)

A decode server records what it decodes. The choices of a prompt are its prefill server's, and are not compared.
"""

from __future__ import annotations

import base64
import http.client
import itertools
from argparse import Namespace
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.bench import results
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import ASKS_CHOICES, Answer, Load
from sglang_dsv4.livetest.zeroing import CHOICES

SWITCH = "--enable-return-routed-experts"
# Foreign positions beyond the control's share. One page of 256 rows among 60 answers of 1,150 tokens is seven times as
# much; one wrong row for each answer, as a step in flight could leave it, is nearly twice as much.
FOREIGN_SLACK = 0.0005
# Experts swapped beyond the control's share. Both servers decode in batches of as many requests, and are compared with
# the same prefill. A fault that left every position half right would swap many more.
SWAPPED_SLACK = 0.02
TOLD_APART = 0.9  # of the control's positions, at least, would be foreign with the row of the next one
SEEN = 0.05  # of all positions, at least, are foreign where each load zeroes the rows of its copy: a third or more


@dataclass(frozen=True)
class Shape:
    """Describes the row of a token: the experts of each layer, of which the first ones choose by the token's id."""

    layers: int
    by_token: int
    experts: int

    @classmethod
    def of(cls, model: str) -> Shape:
        """Reads the config in the folder of a model. Raises CommandError as ``servers.of_config``."""
        return cls(*servers.of_config(model, "num_hidden_layers", "num_hash_layers", "num_experts_per_tok"))

    @property
    def width(self) -> int:
        """Returns the choices of one row."""
        return self.layers * self.experts

    def rows(self, text: str) -> list[array[int]]:
        """Returns the rows in an answer, one a token. Raises ValueError where they are not of this shape."""
        try:
            flat = array("i", base64.b64decode(text, validate=True))
        except ValueError as error:
            raise ValueError(f"no rows of choices: {text[:80]!r}") from error
        if len(flat) % self.width:
            raise ValueError(f"{len(flat)} choices are no rows of {self.width}")
        return [flat[begin : begin + self.width] for begin in range(0, len(flat), self.width)]

    def compare(self, ours: array[int], control: array[int]) -> dict[str, int]:
        """Counts what differs between two rows of one position; the order of a layer's experts means nothing."""
        pairs = [
            (ours[begin : begin + self.experts], control[begin : begin + self.experts])
            for begin in range(0, self.width, self.experts)
        ]
        fixed, free = pairs[: self.by_token], pairs[self.by_token :]
        swapped = sum(self.experts - len({*one} & {*other}) for one, other in free)
        return {
            "positions": 1,
            "by_token_differ": int(any(sorted(one) != sorted(other) for one, other in fixed)),
            "by_token_recorded": int(any(any(one) for one, _ in fixed)),
            "foreign": int(2 * swapped > len(free) * self.experts),
            "swapped": swapped,
        }


class Control:
    """Asks a quiet server for the choices of answers, and compares."""

    def __init__(self, url: str, arguments: Namespace) -> None:
        """Starts with the server at ``url``."""
        self.url, self.arguments = url, arguments
        self.shape: Shape = arguments.row
        self._number = itertools.count()

    def compared(self, load: Load, answers: Sequence[Answer]) -> dict[str, Any]:
        """Compares the whole answers to ``load``, one at a time; returns columns of a row. Reports what is not
        compared.
        """
        counts = Counter[str]()
        for prompt, answer in zip(load.prompts, answers, strict=True):
            if answer.outcome != "whole":
                continue
            try:
                counts.update(self._one(prompt, answer))
            except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
                print(f"  choices not compared: {type(error).__name__}: {error}", flush=True)
        positions = counts["positions"]
        free = positions * (self.shape.layers - self.shape.by_token) * self.shape.experts
        return {
            "choices_compared": counts["answers"],
            "positions": positions,
            **{name: counts[name] for name in ("by_token_differ", "by_token_recorded")},
            **{name: counts[name] / max(1, positions) for name in ("foreign", "foreign_if_shifted")},
            "swapped": counts["swapped"] / max(1, free),
        }

    def _one(self, prompt: Sequence[int], answer: Answer) -> Counter[str]:
        ours, control = self.shape.rows(answer.choices), self._rows([*prompt, *answer.tokens])
        first, count = 0 if self.arguments.plain else len(prompt), rows_of(answer)
        if len(ours) != count or len(control) <= count:
            raise ValueError(f"{len(ours)} rows, of the control {len(control)}, where there should be {count}")
        counts = Counter({"answers": 1})
        for one, other, after in zip(ours[first:], control[first:count], control[first + 1 : count + 1], strict=True):
            counts.update(self.shape.compare(one, other))
            counts["foreign_if_shifted"] += self.shape.compare(after, other)["foreign"]
        return counts

    def _rows(self, tokens: Sequence[int]) -> list[array[int]]:
        """Returns the control's rows of ``tokens``, all computed now: a key of its own keeps the prefix cache away."""
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "extra_key": f"choices {next(self._number)}",
            **ASKS_CHOICES,
        }
        said = servers.post(self.url, "/generate", body, self.arguments.timeout)["meta_info"]
        if said.get("cached_tokens", 0):
            raise ValueError(f"the control took {said['cached_tokens']} tokens from its prefix cache")
        return self.shape.rows(said["routed_experts"])


def rows_of(answer: Answer) -> int:
    """Returns how many rows a whole answer has: the step that would read its last token never runs."""
    return answer.prompt + len(answer.tokens) - 1


def misshapen(answers: Iterable[Answer], shape: Shape) -> int:
    """Counts whole answers that have more or fewer rows than ``rows_of``."""
    return sum(
        len(base64.b64decode(answer.choices)) != rows_of(answer) * shape.width * array("i").itemsize
        for answer in answers
        if answer.outcome == "whole"
    )


def judge(rows: Sequence[dict[str, Any]], wanted: int, wrong_rows: int) -> list[dict[str, Any]]:
    """Returns the bounds of the rows of ``score.score_all`` with the columns of ``Control.compared``.

    wanted: answers of each run. wrong_rows: what ``misshapen`` counts in the whole load.
    """
    by_name = {row["run"].removeprefix("score of "): row for row in rows}
    control, retracts = by_name[score.CONTROL], by_name[score.RETRACTS]
    damaged = by_name[f"{CHOICES}{score.DAMAGED}"]
    most = {name: control[name] + slack for name, slack in (("foreign", FOREIGN_SLACK), ("swapped", SWAPPED_SLACK))}
    return [
        results.bound("whole answers without a row of choices for each token but the last", "<= 0", wrong_rows),
        results.bound("choices compared, answers of the control", f">= {wanted}", control["choices_compared"]),
        results.bound("choices compared, answers after retracts", f">= {wanted}", retracts["choices_compared"]),
        results.bound(
            "share of positions that a shift would make foreign", f">= {TOLD_APART}", control["foreign_if_shifted"]
        ),
        results.bound("positions that chose otherwise by token id", "<= 0", retracts["by_token_differ"]),
        results.bound("share of foreign positions, after retracts", f"<= {most['foreign']:.6f}", retracts["foreign"]),
        results.bound("share of experts swapped, after retracts", f"<= {most['swapped']:.4f}", retracts["swapped"]),
        results.bound(
            "share of foreign positions, choices zeroed", f">= {control['foreign'] + SEEN:.6f}", damaged["foreign"]
        ),
    ]
