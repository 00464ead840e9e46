"""The data file, its prompts, and the numbers in answers."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from gsm8k.errors import Refused

STOP = "Question:"
# A minus counts where it cannot be a subtraction or a range; commas count between groups of three digits.
NUMBER = re.compile(
    r"(?:(?<![\w)\]%.$\-\u2212])(?P<minus>[-\u2212]\$?|\$[-\u2212]))?"
    r"(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


@dataclass(frozen=True)
class Question:
    """One prompt with its gold number; ``index`` counts the entries of the data file from 0."""

    index: int
    prompt: str
    gold: str


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
