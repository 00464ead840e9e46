#!/usr/bin/env python3
"""Plot and table of a bench_transfer result.   python3 scripts/report_transfer.py RESULT.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time and GB/s against tokens."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    tokens = [row["tokens"] + 1 for row in rows]
    for way, colour in (("save", "tab:blue"), ("load", "tab:orange")):
        left.loglog(tokens, [row[f"{way}_ms"] for row in rows], "o-", color=colour, label=way)
        right.semilogx(tokens, [row[f"{way}_gbps"] for row in rows], "o-", color=colour, label=way)
        right.axhline(rows[0][f"{way}_limit_gbps"], color=colour, linestyle=":", label=f"{way}: 1 GiB pinned copy")
        known = [row for row in rows if row.get(f"reference_{way}_ms")]
        left.loglog(
            [row["tokens"] + 1 for row in known], [row[f"reference_{way}_ms"] for row in known], "x--", color=colour,
            label=f"{way}, per-layer gathers to pageable memory",
        )  # fmt: skip
    left.set(xlabel="tokens", ylabel="ms", title="one request, end to end")
    right.set(xlabel="tokens", ylabel="GB/s", title="bytes moved a second", ylim=0)
    for axis in (left, right):
        axis.legend(fontsize=8)
        axis.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown: machine, command, one line a length, the bounds."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    first = result["rows"][0]
    lines = [
        f"# {result['bench']}: save and load of one request, end to end",
        "",
        f"{result['machine']['gpu']}, {result['date']}, {versions}. `{result['command']}`",
        "",
        f"The link is the 1 GiB pinned copy of the same run: {first['save_limit_gbps']:.1f} GB/s to the host, "
        f"{first['load_limit_gbps']:.1f} GB/s back. Pages are scattered at random.",
        "",
        "| tokens | MB | save ms | of the link | load ms | of the link "
        "| per-layer gathers, save / load ms | engine's page kernels, save / load GB/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [f"{row['tokens']:,}", f"{row['bytes'] / 1e6:.1f}"]
        for way in ("save", "load"):
            cells += [f"{row[f'{way}_ms']:.2f}", f"{row[f'{way}_of_link']:.2f}"]
        cells.append(_pair(row, "reference_{}_ms"))
        cells.append(_pair(row, "engine_{}_gbps"))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| figure | bound | measured | met |", "|---|---|---|---|"]
    for entry in result["bounds"]:
        met = "yes" if entry["ok"] else "no"
        lines.append(f"| {entry['name']} | {entry['bound']} | {entry['value']} | {met} |")
    return "\n".join(lines) + "\n"


def _pair(row: dict[str, Any], name: str) -> str:
    """Save and load figure of a peer, where it was measured."""
    keys = [name.format(way) for way in ("save", "load")]
    return " / ".join(f"{row[key]:.1f}" for key in keys) if keys[0] in row else ""


if __name__ == "__main__":
    path = Path(sys.argv[1])
    found = json.loads(path.read_text())
    plot(found["rows"], path.with_suffix(".png"))
    path.with_suffix(".md").write_text(table(found))
