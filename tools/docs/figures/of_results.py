"""Reads results, and says in words what README and docs/ quote of them."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
COUNTS = {1: "one", 2: "two", 4: "four", 8: "eight"}
LONG = 65536
KINDS = {  # outcomes of a request, but for "whole"
    "too_many": "{} had too many tokens", "too_few": "{} had too few tokens", "never_ended": "{} never ended",
    "refused": "{} got 503", "failed": "{} failed", "unsent": "{} were not sent",
}  # fmt: skip
OLDER_KINDS = {"refused": "{} got an error", "lost": "{} had another number of tokens"}  # of results without "whole"

Result = dict[str, Any]
Row = Mapping[str, Any]


def read(name: str) -> Result | None:
    """Returns a result; None where there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def there(names: Iterable[str]) -> dict[str, Result]:
    """Returns those results that are there, by name."""
    return {name: result for name in names if (result := read(name))}


def option(result: Result, name: str) -> str:
    """Returns the value of an option in a result's command."""
    words = shlex.split(result["command"])
    return words[words.index(name) + 1]


def bound(result: Result, name: str) -> float:
    """Returns the value that a result has for a bound."""
    return float(next(entry["value"] for entry in result["bounds"] if entry["name"] == name))


def told(result: Result, begins: str, digits: int = 2) -> str:
    """Returns the value of the first bound whose name begins so, and its limit; nothing where a run has none.

    A value that misses its limit is bold.
    """
    for found in result["bounds"]:
        if found["name"].startswith(begins):
            value = f"{found['value']:.{digits}f}"
            return f"{value if found['ok'] else f'**{value}**'} ({found['bound']})"
    return ""


def cards(result: Result) -> str:
    """Returns the cards that a result's command used, of those of its machine: "one H200"."""
    words = shlex.split(result["command"])
    used = 1
    for given, value in pairwise(words):
        if given in {"--tp", "--pp-size"}:
            used *= int(value)
        elif given == "--devices":
            used = len(set(value.split(",")))
    (name,) = re.findall(r"NVIDIA (\w+)", result["machine"]["gpu"])
    return f"{COUNTS[used]} {name}"


def asked(row: Row) -> int:
    """Returns how many answers a run asked for."""
    return int(row["asked"]) if "asked" in row else int(sum(row.get(kind, 0) for kind in ("finished", *OLDER_KINDS)))


def whole(row: Row) -> int:
    """Returns how many answers of a run have exactly the tokens that were asked for."""
    return int(row["whole"] if "whole" in row else row["finished"])


def others(row: Row) -> str:
    """Returns what became of the answers that are not whole: "30 had too many tokens, 10 never ended"."""
    kinds = KINDS if "whole" in row else OLDER_KINDS
    return ", ".join(said.format(row[kind]) for kind, said in kinds.items() if row.get(kind))


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|" + "---|" * (lines[0].count("|") - 1))
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def table_if(head: Iterable[str], rows: Sequence[Iterable[object]]) -> str:
    """Returns a Markdown table; nothing where it has no rows."""
    return table(head, rows) if rows else ""
