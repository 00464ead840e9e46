"""Makes the table of a transfer result."""

from __future__ import annotations

from typing import Any

from sglang_dsv4.bench.results import headline


def table(result: dict[str, Any]) -> str:
    """Returns the result as Markdown: machine, command, one line a length, the bounds."""
    first = result["rows"][0]
    lines = [
        f"# {result['bench']}: save and load of one request, end to end",
        "",
        headline(result),
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
    """Returns the save and load figures of a peer, where it was measured."""
    keys = [name.format(way) for way in ("save", "load")]
    return " / ".join(f"{row[key]:.1f}" for key in keys) if keys[0] in row else ""
