"""Writes the tables of settings, metrics and reasons into docs/, from the code.

    python3 tools/docs/tables.py

test_docs.py says when a page is behind.
"""

import dataclasses
import re
from pathlib import Path

from figures import between
from figures.of_results import DOCS, ROOT, table

from sglang_dsv4.engine.coverage import REASONS
from sglang_dsv4.metrics import FALLBACKS, Counters, PrepCounts, SessionCounters, StoreCounters
from sglang_dsv4.settings import TABLE


def settings() -> str:
    """Returns one row a setting."""
    rows = ((f"`{s.variable}`", s.default, s.meaning) for s in TABLE.values())
    return table(("variable", "default", "meaning"), rows)


def series() -> list[tuple[str, str, str]]:
    """Returns (name as scraped, kind, help) of every series, from the fields that count."""
    kinds = (Counters, SessionCounters, StoreCounters, PrepCounts)
    told = [each.metadata for kind in kinds for each in dataclasses.fields(kind)]
    return [
        (
            "sglang_dsv4_" + one["series"] + (f"{{{', '.join(one['labels'])}}}" if one["labels"] else ""),
            one["kind"].lower(),
            one["text"],
        )
        for one in told
        if one
    ]


def metrics() -> str:
    """Returns one row a series."""
    return table(("series", "kind", "meaning"), ((f"`{name}`", kind, what) for name, kind, what in series()))


def reasons() -> str:
    """Returns one row a reason for which a request gets no copy."""
    return table(("reason", "why"), ((f"`{name}`", why) for name, why in FALLBACKS.items()))


def coverage() -> str:
    """Returns one row a part of this package, with the launch arguments that leave it out."""
    told: dict[str, list[str]] = {}
    for reason in REASONS:
        told.setdefault(reason.part, []).append(re.sub(r"{[^}]*}", "something else", reason.sentence))
    return table(("part", "not with"), ((part, "; ".join(sentences)) for part, sentences in told.items()))


TABLES = {"settings": settings, "metrics": metrics, "reasons": reasons, "coverage": coverage}


def wanted() -> dict[Path, str]:
    """Returns the text of each page with a table between its markers. Raises ValueError unless one page has each."""
    found = {}
    for name, make in TABLES.items():
        (page,) = (path for path in DOCS.glob("*.md") if f"<!-- {name} -->" in path.read_text())
        found[page] = between(found.get(page, page.read_text()), name, make())
    return found


def main() -> None:
    for page, text in wanted().items():
        if page.read_text() != text:
            page.write_text(text)
            print(f"written  {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
