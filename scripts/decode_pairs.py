"""What passes over live servers say: stock and package compared pair by pair, with intervals, bounds and a table."""

from __future__ import annotations

import itertools
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import results

VARIANTS = ("stock", "package")
CONTROL = "control"  # stock once more: how far apart servers are that do not differ
MEASURES = ("tokens_a_second", "gap_p50_ms", "gap_p99_ms")
PREFIX = {"package": "", CONTROL: f"{CONTROL}_"}  # of a ratio's fields in a row
DRAWS = 4000
CONFIDENCE = 0.99  # of each interval
RESOLUTION = 0.05  # widest interval of the tokens/s ratio that could have shown a slower package
SLOW = 1.3  # times the time of the batch's faster quarter: a pass that something else slowed


Kind = tuple[int, str]  # round and variant: one server


@dataclass(frozen=True)
class Pass:
    """One batch of requests over one running server."""

    round: int
    variant: str
    batch: int
    lost: int
    tokens_a_second: float
    gap_p50_ms: float
    gap_p99_ms: float


def ratio(
    passes: Sequence[Pass], batch: int, name: str, confidence: float = CONFIDENCE, variant: str = "package"
) -> tuple[float, float, float]:
    """(variant / stock, low, high) of measure ``name`` over the passes of ``batch``: the median of its pairs, seeded.

    A pair is the n-th pass of each kind in one round. The median, because some passes of live servers take half as long
    again; what it hides, ``slow`` counts. A draw of the bootstrap takes as many rounds as there are, with replacement,
    and in each as many pairs as it has; with few rounds it knows little of how starts differ.
    """
    pairs = []
    for round_ in sorted({p.round for p in passes}):
        stock, compared = (
            [getattr(p, name) for p in passes if (p.round, p.variant, p.batch) == (round_, kind, batch)]
            for kind in ("stock", variant)
        )
        pairs.append(np.array(compared) / np.array(stock))
    table = np.stack(pairs)  # rounds have equally many pairs
    rounds, each = table.shape
    draw = np.random.default_rng(batch)
    picked = draw.integers(rounds, size=(DRAWS, rounds, 1))
    drawn = table[picked, draw.integers(each, size=(DRAWS, rounds, each))].reshape(DRAWS, -1)
    tail = (1 - confidence) / 2 * 100
    low, high = np.percentile(np.median(drawn, axis=1), [tail, 100 - tail])
    return float(np.median(table)), float(low), float(high)


def slow(passes: Sequence[Pass], batch: int, variant: str) -> int:
    """How many passes of ``variant`` were slow: what a median does not show, and the package could be the cause of."""
    fast = np.percentile([p.tokens_a_second for p in passes if p.batch == batch], 75)
    mine = (p for p in passes if (p.batch, p.variant) == (batch, variant))
    return sum(bool(fast > SLOW * p.tokens_a_second) for p in mine)


def summarise(passes: Sequence[Pass], arguments: Namespace) -> list[dict[str, Any]]:
    """One row a batch: the median of each measure of each kind, the slow passes, and the ratios with their intervals.

    Fields of the package's ratio begin with the measure, those of the control's with ``control_``.
    """
    variants = [*VARIANTS, *([CONTROL] if any(p.variant == CONTROL for p in passes) else [])]
    rows = []
    for batch in arguments.batches:
        row: dict[str, Any] = {"batch": batch, "passes": sum((p.batch, p.variant) == (batch, "stock") for p in passes)}
        for name, variant in itertools.product(MEASURES, variants):
            values = [getattr(p, name) for p in passes if (p.batch, p.variant) == (batch, variant)]
            row[f"{variant}_{name}"] = statistics.median(values)
            if variant != "stock":
                found = ratio(passes, batch, name, variant=variant)
                start = PREFIX[variant] + name
                row[f"{start}_ratio"], row[f"{start}_low"], row[f"{start}_high"] = found
        row |= {f"{variant}_slow": slow(passes, batch, variant) for variant in variants}
        rows.append(row)
    return rows


def judge(rows: Sequence[dict[str, Any]], passes: Sequence[Pass], arguments: Namespace) -> list[dict[str, Any]]:
    """Nothing lost; no interval wholly on the slower side; no interval so wide that it could not have been there."""
    bounds = [results.bound("requests lost", "<= 0", sum(p.lost for p in passes))]
    for row in rows:
        where = f"batch {row['batch']}, package / stock"
        speed, gap = "tokens_a_second", "gap_p50_ms"
        bounds += [
            results.bound(f"{where}: tokens a second, high end", ">= 1.0", row[f"{speed}_high"]),
            results.bound(f"{where}: inter-token p50, low end", "<= 1.0", row[f"{gap}_low"]),
            results.bound(
                f"{where}: tokens a second, width of the interval", f"<= {RESOLUTION}",
                row[f"{speed}_high"] - row[f"{speed}_low"],
            ),
        ]  # fmt: skip
    return bounds


def table_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as Markdown, one line for each kind that stock is compared with."""
    lines = [
        "| batch | tokens/s: stock, the other | ratio (interval) | p50 ms: stock, the other | ratio (interval) "
        "| p99 ms: stock, the other | ratio (interval) | slow passes: stock, the other |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, variant in itertools.product(rows, PREFIX):
        if f"{variant}_slow" not in row:
            continue
        cells = [f"{row['batch']}, {variant}"]
        for name, digits in zip(MEASURES, (0, 2, 2), strict=True):
            start = PREFIX[variant] + name
            cells.append(f"{row[f'stock_{name}']:.{digits}f}, {row[f'{variant}_{name}']:.{digits}f}")
            cells.append(f"{row[f'{start}_ratio']:.3f} ({row[f'{start}_low']:.3f} to {row[f'{start}_high']:.3f})")
        cells.append(f"{row['stock_slow']}, {row[f'{variant}_slow']} of {row['passes']}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines
