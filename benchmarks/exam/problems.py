"""Writes and reads the exam's problems, and judges an answer."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path

from benchmarks.exam.task import MARKS, Task
from sglang_dsv4.command_line import CommandError

SHORT, LONG, PARITY = "problems.jsonl", "long.jsonl", "parity.jsonl"
FINAL = MARKS.index("####")


@dataclass(frozen=True)
class Problem:
    """Holds a problem as text and as ids. steps: round the ring; logprobs: torch's, of each token behind the first."""

    question: str
    answer: str
    input_ids: list[int]
    answer_ids: list[int]
    steps: int
    logprobs: list[float] = field(default_factory=list)

    def is_right(self, answer: Sequence[int]) -> bool:
        """Returns whether an answer's number, the first one behind ####, is the problem's."""
        return number_of(answer) == number_of(self.answer_ids)

    def first_wrong(self, answer: Sequence[int]) -> str | None:
        """Returns the kind of the first wrong token; None for a whole answer."""
        kinds = Task.kinds(self.steps)
        pairs = zip_longest(self.answer_ids, answer)
        return next((kind for kind, (right, said) in zip(kinds, pairs, strict=False) if right != said), None)


def number_of(answer: Sequence[int]) -> int | None:
    """Returns the word behind the first ####."""
    place = answer.index(FINAL) + 1 if FINAL in answer else len(answer)
    return answer[place] if place < len(answer) else None


def by_turns(short: Sequence[Problem], long: Sequence[Problem]) -> list[Problem]:
    """Returns both, one of each by turns while there are any: the first few are as many of each."""
    return [problem for pair in zip_longest(short, long) for problem in pair if problem]


def write(path: Path, problems: Sequence[Problem]) -> None:
    path.write_text("".join(f"{json.dumps(asdict(problem))}\n" for problem in problems))


def read(path: Path) -> list[Problem]:
    """Reads what ``write`` wrote. Raises CommandError where it cannot."""
    try:
        return [Problem(**json.loads(line)) for line in path.read_text().splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise CommandError(f"{path}: no problems of benchmarks.exam.export: {error}") from error
