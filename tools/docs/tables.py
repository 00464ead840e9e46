#!/usr/bin/env python3
"""Writes the tables of settings and of metrics into docs/, from the code.

    python3 tools/docs/tables.py [--check]

--check changes nothing and fails, naming the page, when one is behind. Needs prometheus_client.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from sglang_dsv4.metrics import Exporter, PrepExporter
from sglang_dsv4.settings import TABLE

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|" + "---|" * (lines[0].count("|") - 1))
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def settings() -> str:
    """Returns one row a setting."""
    rows = ((f"`{s.variable}`", s.default, s.meaning) for s in TABLE.values())
    return table(("variable", "default", "meaning"), rows)


def series() -> list[tuple[str, str, str]]:
    """Returns (name as scraped, kind, help) of every series, from the exporters."""
    import prometheus_client  # noqa: PLC0415

    registry = prometheus_client.CollectorRegistry()
    exporter = Exporter({"tp_rank": "0"}, 0, registry)
    exporter.fell_back("reason")
    PrepExporter({"tp_rank": "0"}, registry).left("reason")
    found = []
    for metric in registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = sorted({label for sample in metric.samples for label in sample.labels} - {"tp_rank"})
        found.append((name + (f"{{{', '.join(labels)}}}" if labels else ""), metric.type, metric.documentation))
    return found


def metrics() -> str:
    """Returns one row a series."""
    return table(("series", "kind", "meaning"), ((f"`{name}`", kind, what) for name, kind, what in series()))


TABLES = {"settings": settings, "metrics": metrics}


def wanted() -> dict[Path, str]:
    """Returns the text of each page that has a table between its markers, ``<!-- settings -->`` and ``<!-- end settings
    -->``.

    Raises ValueError where no page, or more than one, has a table.
    """
    found = {}
    for name, make in TABLES.items():
        (page,) = (path for path in DOCS.glob("*.md") if f"<!-- {name} -->" in path.read_text())
        before, rest = found.get(page, page.read_text()).split(f"<!-- {name} -->")
        _, after = rest.split(f"<!-- end {name} -->")
        found[page] = f"{before}<!-- {name} -->\n\n{make()}\n\n<!-- end {name} -->{after}"
    return found


def main() -> int:
    """Returns exit status 1 when --check finds a page behind."""
    check = "--check" in sys.argv[1:]
    behind = {page: text for page, text in wanted().items() if page.read_text() != text}
    for page, text in behind.items():
        print(f"{'behind' if check else 'written'}  {page.relative_to(ROOT)}")
        if not check:
            page.write_text(text)
    return int(check and bool(behind))


if __name__ == "__main__":
    sys.exit(main())
