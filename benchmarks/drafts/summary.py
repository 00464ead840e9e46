"""Steps of resumed requests -> tokens a step by how far the resume lies behind, arm by arm, with their intervals."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np

from sglang_dsv4.bench import results
from sglang_dsv4.livetest.drafting import ARMS, BOTH, NO_RETRACT, ROWS, WITHOUT, ZEROED

mpl.use("Agg")
import matplotlib.pyplot as plt

BUCKETS = ((1, 8), (9, 16), (17, 32), (33, 64), (65, 127), (128, 256))  # tokens since the resume at a step's begin
WINDOW = (1, 127)
REACHED = (64, 128)  # tokens after the resume whose time is told
DRAWS, CONFIDENCE = 8000, 0.99
CLEARLY = 0.05  # tokens a step by which an arm must be below, at the near end of the interval


class Step(NamedTuple):
    """One step of a request; see ``livetest.drafting.switch``."""

    word: str
    request: str
    number: int
    had: int
    since: int
    accepted: int
    seconds: float


def read_steps(path: Path, least_before: int = 0) -> list[Step]:
    """The steps in a file. least_before: only of requests that had so many tokens at their retract."""
    found = [Step(*json.loads(line)) for line in path.read_text().splitlines() if line.endswith("]")]
    return [step for step in found if step.had >= least_before]


def by_resume(steps: Iterable[Step], word: str) -> list[list[Step]]:
    """The steps of each resume of an arm, in order."""
    found: dict[tuple[str, int], list[Step]] = defaultdict(list)
    for step in steps:
        if step.word == word:
            found[step.request, step.number].append(step)
    return list(found.values())


def sums(resumes: Sequence[Sequence[Step]], bucket: tuple[int, int]) -> np.ndarray:
    """(tokens accepted, steps) of each resume that has steps in the bucket, ``[n, 2]``."""
    first, last = bucket
    each = [[step.accepted for step in resume if first <= step.since + 1 <= last] for resume in resumes]
    return np.array([(sum(found), len(found)) for found in each if found], np.float64).reshape(-1, 2)


def draws(pairs: np.ndarray, seed: int) -> np.ndarray:
    """Tokens a step of resumes drawn again and again: steps of one resume are alike, so resumes are drawn whole."""
    rng = np.random.default_rng(seed)
    drawn = pairs[rng.integers(0, len(pairs), (DRAWS, len(pairs)))].sum(1)
    return np.asarray(drawn[:, 0] / drawn[:, 1])


def ends(values: np.ndarray, among: int = 1) -> tuple[float, float]:
    """The interval that holds CONFIDENCE of ``values``; among: of so many, together."""
    outside = (1 - CONFIDENCE) / among / 2
    low, high = np.quantile(values, (outside, 1 - outside))
    return float(low), float(high)


def acceptance(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """A row for each arm and bucket, and for the first window as a whole."""
    return [row for word in ARMS for row in _rows_of(by_resume(steps, word), word)]


def _rows_of(resumes: Sequence[Sequence[Step]], word: str) -> Iterator[dict[str, Any]]:
    for bucket in (*BUCKETS, WINDOW):
        pairs = sums(resumes, bucket)
        if len(pairs):
            low, high = ends(draws(pairs, 1))
            yield {
                "arm": word, "first": bucket[0], "last": bucket[1], "resumes": len(pairs),
                "steps": int(pairs[:, 1].sum()), "mean": pairs[:, 0].sum() / pairs[:, 1].sum(),
                "low": low, "high": high,
            }  # fmt: skip


def reached(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """A row for each arm and distance: milliseconds from a resume to that token, and how many steps that took.

    resumes: which came so far, of all; the others were retracted again, or ended.
    """
    rows = []
    for word in ARMS:
        resumes = by_resume(steps, word)
        for tokens in REACHED:
            there = [found for resume in resumes if (found := _arrival(resume, tokens))]
            if there:
                times = sorted(ms for ms, _ in there)
                rows.append({
                    "arm": word, "to_token": tokens, "resumes": len(there), "of": len(resumes),
                    "p50_ms": statistics.median(times), "p10_ms": times[len(times) // 10],
                    "p90_ms": times[len(times) * 9 // 10], "steps": statistics.mean(number for _, number in there),
                })  # fmt: skip
    return rows


def _arrival(resume: Sequence[Step], tokens: int) -> tuple[float, int] | None:
    """(milliseconds, steps) to the step that brings that token."""
    arrived = ((step.seconds * 1e3, number) for number, step in enumerate(resume, 1)
               if step.since + step.accepted >= tokens)  # fmt: skip
    return next(arrived, None)


def difference(steps: Sequence[Step], word: str, bucket: tuple[int, int]) -> tuple[float, float] | None:
    """How far the arm lies above no retract in a bucket: one of as many intervals as there are buckets, which hold
    together. None where either has no step there."""
    ours, control = (sums(by_resume(steps, name), bucket) for name in (word, NO_RETRACT))
    if not len(ours) or not len(control):
        return None
    return ends(draws(ours, 2) - draws(control, 3), len(BUCKETS))


def judge(steps: Sequence[Step], words: Sequence[str]) -> list[dict[str, Any]]:
    """With rows and state no bucket differs from no retract; without, the first window is below.

    words: the arms of the run. A plain server has none with rows alone: the extend of a restore makes the state anew.
    """
    bounds = []
    for bucket in BUCKETS if BOTH in words else ():
        low, high = difference(steps, BOTH, bucket) or (1.0, -1.0)
        name = f"{BOTH}, tokens {bucket[0]} to {bucket[1]}: tokens a step above no retract"
        bounds += [
            results.bound(f"{name}, low end", "<= 0", low),
            results.bound(f"{name}, high end", ">= 0", high),
        ]
    below = ((WITHOUT, WINDOW), (ZEROED, WINDOW), (ROWS, BUCKETS[0]))
    for word, bucket in (one for one in below if one[0] in words):
        found = difference(steps, word, bucket)
        name = f"{word}, tokens {bucket[0]} to {bucket[1]}: tokens a step above no retract, high end"
        bounds.append(results.bound(name, f"<= -{CLEARLY}", found[1] if found else 1.0))
    times = {(row["arm"], row["to_token"]): row["p50_ms"] for row in reached(steps)}
    for tokens in REACHED:
        if (BOTH, tokens) in times and (WITHOUT, tokens) in times:
            name = f"time from the resume to token {tokens}, with rows and state by without"
            bounds.append(results.bound(name, "<= 1", times[BOTH, tokens] / times[WITHOUT, tokens]))
    return bounds


def table(rows: Sequence[dict[str, Any]], times: Sequence[dict[str, Any]]) -> list[str]:
    """Tokens a step by arm and bucket, as Markdown."""
    cells = {(row["arm"], row["first"], row["last"]): row for row in rows}
    buckets = sorted({key[1:] for key in cells})
    lines = [
        "| tokens since the resume | " + " | ".join(f"{first} to {last}" for first, last in buckets)
        + "".join(f" | median ms to token {tokens}" for tokens in REACHED) + " |",
        "|---" * (len(buckets) + 1 + len(REACHED)) + "|",
    ]  # fmt: skip
    milliseconds = {(row["arm"], row["to_token"]): f"{row['p50_ms']:,.0f}" for row in times}
    for word in ARMS:
        if any(key[0] == word for key in cells):
            found = [cells.get((word, *bucket)) for bucket in buckets]
            said = [f"{row['mean']:.2f} ({row['low']:.2f} to {row['high']:.2f})" if row else "" for row in found]
            said += [milliseconds.get((word, tokens), "") for tokens in REACHED]
            lines.append(f"| {word} | {' | '.join(said)} |")
    return lines


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens a step by tokens since the resume, a line an arm, with the intervals."""
    figure, axis = plt.subplots(figsize=(9, 4.5))
    for shift, word in enumerate(ARMS):
        found = [row for row in rows if row["arm"] == word and (row["first"], row["last"]) in BUCKETS]
        if not found:
            continue
        places = [BUCKETS.index((row["first"], row["last"])) + 0.06 * (shift - 2) for row in found]
        means = np.array([row["mean"] for row in found])
        errors = np.array([[row["mean"] - row["low"] for row in found], [row["high"] - row["mean"] for row in found]])
        axis.errorbar(places, means, np.abs(errors), marker="o", capsize=3, label=word)
    axis.set_xticks(range(len(BUCKETS)), [f"{first}-{last}" for first, last in BUCKETS])
    axis.set_xlabel("tokens since the resume")
    axis.set_ylabel("tokens a step")
    axis.set_ylim(bottom=0)
    axis.grid(visible=True, alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
