"""A page says what a test can check only between markers: these sections are made anew, the rest of a page is prose."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
Sections = dict[str, Callable[[], list[str]]]


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|" + "---|" * (lines[0].count("|") - 1))
    return lines + ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]


def rebuilt(text: str, sections: Sections) -> str:
    """``text`` with every section between its markers made anew. Raises ValueError when a marker is missing."""
    for name, make in sections.items():
        start, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        before, rest = text.split(start)
        _, after = rest.split(end)
        text = "\n".join([before + start, "", *make(), "", end]) + after
    return text


def bring_up_to_date(wanted: dict[Path, str], about: str | None) -> int:
    """Write the files of ``wanted`` that differ; with --check only name them, and exit with 1 when there is one."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a file is behind")
    check = parser.parse_args().check
    behind = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in behind:
        print(f"{'behind' if check else 'written'}  {path.relative_to(ROOT)}")
        if not check:
            path.write_text(wanted[path])
    return int(check and bool(behind))
