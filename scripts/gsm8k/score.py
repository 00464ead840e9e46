"""Scores of one run and of a pair: shares with their intervals, McNemar's test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

Z95 = statistics.NormalDist().inv_cdf(0.975)


def mcnemar(b: int, c: int) -> float:
    """Exact two-sided p-value of ``b`` against ``c`` discordant pairs: a fair coin thrown b + c times."""
    tail = sum(math.comb(b + c, i) for i in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2 ** (b + c))


def wilson(right: int, count: int) -> tuple[float, float] | None:
    """95% interval of the share ``right`` / ``count``; None of nothing."""
    if not count:
        return None
    share, z2 = right / count, Z95**2
    middle = share + z2 / (2 * count)
    half = Z95 * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    low, high = ((middle + side * half) / (1 + z2 / count) for side in (-1, 1))
    return max(0.0, low), min(1.0, high)


def summarise(answers: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Counts and shares of one run; seconds are the wall's."""
    answered = [row for row in answers if row["ok"] is not None]
    right = sum(row["ok"] for row in answered)
    tokens = [row["completion_tokens"] for row in answered if "completion_tokens" in row]
    interval = wilson(right, len(answered))
    return {
        "asked": len(answers),
        "answered": len(answered),
        "failed": len(answers) - len(answered),
        "right": right,
        "unparsable": sum(row["answer"] is None for row in answered),
        "cut": sum(row.get("finish") == "length" for row in answered),
        "prefill_errors": sum("prefill_error" in row for row in answered),
        "accuracy": round(right / len(answered), 4) if answered else None,
        "interval95": [round(end, 4) for end in interval] if interval else None,
        "completion_tokens": sum(tokens) if tokens else None,
        "latency_median_s": statistics.median(row["latency_s"] for row in answered) if answered else None,
        "seconds": round(seconds, 4),
    }


def compare(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """McNemar's test over the questions that both answered; b: only the first is right, c: only the second."""
    pairs = [(x, y) for x, y in zip(first, second, strict=True) if x["ok"] is not None and y["ok"] is not None]
    b = sum(x["ok"] and not y["ok"] for x, y in pairs)
    c = sum(y["ok"] and not x["ok"] for x, y in pairs)
    identical = sum(x["text_sha256"] == y["text_sha256"] for x, y in pairs)
    return {"pairs": len(pairs), "b": b, "c": c, "p": mcnemar(b, c) if pairs else None, "identical": identical}
