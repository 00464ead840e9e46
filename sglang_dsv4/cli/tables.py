"""Lays out tables for a terminal, and writes sizes and times."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDEST = 12  # of a column's name, but for the first: longer ones are folded, figures never
GAP = "  "


def table(
    title: str, names: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,), note: str = ""
) -> str:
    """Returns a table with a title above and a note below. left: columns of words; others are figures.

    Retracts
    tokens   saved
    ---------------
     4,096  29 MiB
    """
    heads = [[names[0]], *(textwrap.wrap(name, WIDEST) or [""] for name in names[1:])]
    height = max(len(head) for head in heads)
    above = [tuple(line) for line in zip(*([*[""] * (height - len(head)), *head] for head in heads), strict=True)]
    widths = [max(map(len, column)) for column in zip(*above, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        placed = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return GAP.join(placed).rstrip()

    rule = "-" * (sum(widths) + len(GAP) * (len(widths) - 1))
    notes = textwrap.wrap(note, max(len(rule), 60))
    return "\n".join([title, *map(line, above), rule, *map(line, rows), *notes])


def facts(title: str, found: dict[str, str]) -> str:
    """Returns lines of a name and its fact each, below a title."""
    width = max(map(len, found))
    return "\n".join([title, *(f"{name.ljust(width)}{GAP}{fact}" for name, fact in found.items())])


def size(nbytes: float) -> str:
    """Returns bytes in the unit of DSV4_HOST_GB, or in smaller ones of its kind."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.1f} {unit}"
    return f"{nbytes:,.0f} B"


def duration(milliseconds: float) -> str:
    """Returns a time with a unit that fits it."""
    if milliseconds >= 1e3:
        return f"{milliseconds / 1e3:,.1f} s"
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f} ms"
