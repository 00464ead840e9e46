"""Prints a short summary of a result file: its key figures and its verdict."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

HEADLINE_TOKENS = (2048, 16384, 65536, 262144)


def card(result: dict[str, Any]) -> Panel:
    """Returns the machine, the share of its limit where the result knows it, every bound, and the verdict."""
    machine = result["machine"]
    parts: list[Any] = [
        Text(f"{machine['gpu'] or 'no GPU'}, {machine['cpu']}, {machine['memory_gib']} GiB"),
        Text(", ".join(f"{name} {number}" for name, number in result["versions"].items()), style="dim"),
    ]
    if any("save_of_link" in row for row in result["rows"]):
        parts += [Text(), _of_the_link(result["rows"])]
    if result["bounds"]:
        parts += [Text(), _bounds(result["bounds"])]
    parts += [Text(), verdict(result)]
    return Panel(Group(*parts), title=f"[bold]{result['bench']}[/bold]", title_align="left", expand=False)


def verdict(result: dict[str, Any]) -> Text:
    """Returns one line: nothing to judge, all bounds met, or how many were missed."""
    if result["machine"]["gpu"] is None or not result["bounds"]:
        return Text("no verdict: bounds are for a CUDA device", style="yellow")
    missed = sum(not bound["ok"] for bound in result["bounds"])
    if missed:
        return Text(f"{missed} of {len(result['bounds'])} bounds missed", style="bold red")
    return Text(f"all {len(result['bounds'])} bounds met", style="bold green")


def _of_the_link(rows: list[dict[str, Any]]) -> Table:
    """Returns the save and load rows of the headline lengths, or of all where none of those was measured."""
    known = [row for row in rows if "save_of_link" in row]
    first = known[0]
    shown = [row for row in known if row["tokens"] + 1 in HEADLINE_TOKENS] or known
    limits = f"link: {first['save_limit_gbps']:.1f} GB/s to the host, {first['load_limit_gbps']:.1f} GB/s back"
    table = Table(title=limits, title_justify="left", title_style="", box=None, pad_edge=False)
    for heading in ("tokens", "MB", "save ms", "of the link", "load ms", "of the link"):
        table.add_column(heading, justify="right")
    for row in shown:
        cells = [f"{row['tokens']:,}", f"{row['bytes'] / 1e6:.1f}"]
        for way in ("save", "load"):
            cells += [f"{row[f'{way}_ms']:.2f}", f"{row[f'{way}_of_link']:.0%}"]
        table.add_row(*cells)
    return table


def _bounds(bounds: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("figure")
    table.add_column("bound", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("")
    for bound in bounds:
        met = Text("met", style="green") if bound["ok"] else Text("missed", style="red")
        table.add_row(bound["name"], bound["bound"], f"{bound['value']:g}", met)
    return table
