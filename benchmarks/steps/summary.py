"""Two starts of one server differ by several percent, more than a hook costs. So a server is compared with itself:
blocks of steps with and without the hooks, in groups of four: with, without, without, with, or the other way round.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dsv4.bench import results
from sglang_dsv4.livetest.retract_stats import GRAPH_LEFT, PREP_REFUSED, read_log

MARGIN = 0.99  # of stock's speed: less than this, and a step is slower
BLOCKS = 4  # of a group
DRAWS = 4000
CONFIDENCE = 0.99  # of each interval
RESOLUTION = 0.05  # widest interval that could have shown a slower package
SLOW = 1.3  # times the time of the batch's fastest quarter: a step that something else slowed


@dataclass(frozen=True)
class Block:
    """Some steps of one server, with the hooks or without."""

    round: int
    group: int
    batch: int
    hooked: bool
    as_meant: bool
    prepared: int
    ns: tuple[int, ...]


def abba_groups(blocks: Sequence[Block], batch: int) -> dict[int, list[list[Block]]]:
    """The groups of ``batch`` that were not cut off, by round."""
    groups: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for block in blocks:
        if block.batch == batch:
            groups[block.round, block.group].append(block)
    found: dict[int, list[list[Block]]] = defaultdict(list)
    for (round_, _), group in sorted(groups.items()):
        if len(group) == BLOCKS:
            found[round_].append(group)
    return dict(found)


def ratio_of(group: Sequence[Block]) -> float:
    """Time without the hooks / time with them."""
    without, with_ = (sum(sum(block.ns) for block in group if block.hooked is hooked) for hooked in (False, True))
    return without / with_


def interval(ratios: Sequence[Sequence[float]], seed: int) -> tuple[float, float, float]:
    """(median, low, high) over the groups of every round."""
    draw = np.random.default_rng(seed)
    drawn = np.concatenate([np.array(r)[draw.integers(len(r), size=(DRAWS, len(r)))] for r in ratios], axis=1)
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(np.median(drawn, axis=1), [tail, 100 - tail])
    return float(np.median(np.concatenate(ratios))), float(low), float(high)


def summarise(blocks: Sequence[Block], batches: Sequence[int]) -> list[dict[str, Any]]:
    """One row a batch that has a whole group. slow: steps of SLOW times the fastest quarter's time, which a median does
    not show.
    """
    rows = []
    for batch in batches:
        rounds = abba_groups(blocks, batch)
        if not rounds:
            continue
        ratios = {round_: [ratio_of(group) for group in groups] for round_, groups in rounds.items()}
        middle, low, high = interval(list(ratios.values()), batch)
        kept = [block for groups in rounds.values() for group in groups for block in group]
        row: dict[str, Any] = {
            "batch": batch, "groups": sum(map(len, ratios.values())), "ratio": middle, "low": low, "high": high,
            "not_as_meant": sum(not block.as_meant for block in kept),
            "ratio_by_round": {round_: statistics.median(found) for round_, found in ratios.items()},
        }  # fmt: skip
        fast = np.percentile([span for block in kept for span in block.ns], 25)
        for name, hooked in (("without", False), ("with", True)):
            same = [block for block in kept if block.hooked is hooked]
            spans = np.array([span for block in same for span in block.ns])
            row |= {
                f"{name}_steps": len(spans), f"{name}_ms": float(np.median(spans)) / 1e6,
                f"{name}_p99_ms": float(np.percentile(spans, 99)) / 1e6,
                f"{name}_slow": int((spans > SLOW * fast).sum()),
                f"{name}_prepared": sum(block.prepared for block in same), f"{name}_blocks": len(same),
            }  # fmt: skip
        rows.append(row)
    return rows


@dataclass
class Requests:
    """What became of those that should all run undisturbed. left: graphs' metadata that was left to the engine."""

    lost: int = 0
    retracted: int = 0
    left: int = 0

    def count(self, logs: Iterable[Path]) -> None:
        """What the servers' logs say so far."""
        self.retracted = self.left = 0
        for log in logs:
            said = read_log(log)
            self.retracted += said["saves"] + sum(said["fallbacks"].values())
            text = log.read_text(errors="replace")
            self.left += text.count(GRAPH_LEFT) + text.count(PREP_REFUSED)  # the latter: of a draft's backend


def judge(rows: Sequence[dict[str, Any]], requests: Requests, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Nothing lost, not slower, a narrow interval; the builder at work in all steps with the hooks, in none without."""
    bounds = [
        results.bound("requests lost", "<= 0", requests.lost),
        results.bound("requests retracted", "<= 0", requests.retracted),
    ]
    if arguments.prep == "graph":
        bounds.append(results.bound("kinds of graphs left to the engine", "<= 0", requests.left))
    for batch in arguments.batches:
        starts = sum(len(row["ratio_by_round"]) for row in rows if row["batch"] == batch)
        bounds.append(results.bound(f"batch {batch}: starts measured", f">= {arguments.rounds}", starts))
    how = "early" if arguments.early else "here"
    for row in rows:
        where = f"batch {row['batch']}, without / with"
        bounds += [
            results.bound(f"batch {row['batch']}: blocks that ran otherwise than meant", "<= 0", row["not_as_meant"]),
            results.bound(f"{where}, low end", f">= {MARGIN}", row["low"]),
            results.bound(f"{where}, width of the interval", f"<= {RESOLUTION}", row["high"] - row["low"]),
        ]
        if arguments.prep == "stream" or (arguments.prep and arguments.eager):
            share = row["with_prepared"] / (row["with_blocks"] * arguments.steps)
            named = f"batch {row['batch']}: steps with the hooks, prepared {how}"
            bounds.append(results.bound(named, ">= 1.0", share))
        named = f"batch {row['batch']}: steps without them, prepared {how}"
        bounds.append(results.bound(named, "<= 0", row["without_prepared"]))
    return bounds


def table_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as Markdown."""
    lines = [
        "| batch | groups | step ms: without, with | without / with (interval) | by start | p99 ms | slow steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            str(row["batch"]),
            str(row["groups"]),
            f"{row['without_ms']:.3f}, {row['with_ms']:.3f}",
            f"{row['ratio']:.4f} ({row['low']:.4f} to {row['high']:.4f})",
            ", ".join(f"{found:.4f}" for found in row["ratio_by_round"].values()),
            f"{row['without_p99_ms']:.2f}, {row['with_p99_ms']:.2f}",
            f"{row['without_slow']}, {row['with_slow']} of {row['with_steps']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
