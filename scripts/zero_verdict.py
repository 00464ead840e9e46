"""What the runs of zero_family must show: no change without damage, a change by every family's."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

import results
from witness import LOADED
from zero_answers import Answer, distance
from zeroing.switch import NONE, OFF

from sglang_dsv4.cache.families import Geometry, families

FAMILIES = tuple(family.name for family in families(Geometry((0, 4, 128))))
CONTROL, AGAIN = "control", "control again"
# Which rows the indexer chooses can only matter where it leaves some out.
MATTER = {
    "short": tuple(name for name in FAMILIES if "indexer" not in name),
    "long": tuple(name for name in FAMILIES if "indexer" in name),
}
# The runs of each set, and the switch's word in each.
RUNS = {
    kind: {CONTROL: OFF, AGAIN: OFF, NONE: NONE, **{name: name for name in names}} for kind, names in MATTER.items()
}
ZEROED = re.compile(r"zeroed (\d+) bytes of (\w+)")
FLOOR = 0.01  # less than one step of a bf16 logit above 2
ANY = 1e-7  # less than one step of an fp32 log probability below -2: more than nothing


def events(log: str, word: str) -> dict[str, int]:
    """Loads in a part of the decode server's log, and those with family ``word`` zeroed."""
    zeroed = [int(count) for count, name in ZEROED.findall(log) if name == word]
    return {"loads": len(LOADED.findall(log)), "zeroed": len(zeroed), "zeroed_bytes": sum(zeroed)}


def compared(control: Sequence[Answer | None], given: Sequence[Answer | None]) -> dict[str, Any]:
    """Requests answered in both runs, how many of them changed, median and largest distance (-1: none answered)."""
    pairs = [(a, b) for a, b in zip(control, given, strict=True) if a is not None and b is not None]
    distances = [distance(a.choices, b.choices) for a, b in pairs]
    return {
        "requests": len(given),
        "answered": len(pairs),
        "other_first_token": sum(a.first != b.first for a, b in pairs),
        "changed": sum(item > 0 for item in distances),
        "median": statistics.median(distances) if distances else -1.0,
        "largest": max(distances, default=-1.0),
    }


def judge(rows: list[dict[str, Any]], trouble: list[str]) -> list[dict[str, Any]]:
    """The bounds of all runs; ``rows`` has one for each of RUNS, in any order."""
    bounds = [
        results.bound("requests lost", "<= 0", sum(row["requests"] - row["answered"] for row in rows)),
        results.bound("trouble in the log", "<= 0", len(trouble)),
    ]
    for kind, names in MATTER.items():
        by_name = {row["run"]: row for row in rows if row["set"] == kind}
        bounds += _noise(kind, by_name)
        for family in names:
            bounds += _damage(kind, family, by_name)
    return bounds


def _noise(kind: str, rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    again, none = rows[AGAIN], rows[NONE]
    allowed = max(2 * again["median"], FLOOR)
    bounds = [
        results.bound(f"{kind}: loads in the controls", "<= 0", rows[CONTROL]["loads"] + again["loads"]),
        results.bound(f"{kind}: exact loads, other than one a request", "<= 0", abs(none["loads"] - none["requests"])),
        results.bound(f"{kind}: median distance of exact loads", f"<= {allowed:.6g}", none["median"]),
    ]
    if kind == "short":  # every step there is the same in every run
        bounds.append(results.bound("short: requests changed in the control's repetition", "<= 0", again["changed"]))
        bounds.append(results.bound("short: requests changed by exact loads", "<= 0", none["changed"]))
    return bounds


def _damage(kind: str, family: str, rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    row, again, none = rows[family], rows[AGAIN], rows[NONE]
    noise = max(again["median"], none["median"])
    unchanged = row["requests"] - row["changed"]
    wrong = abs(row["loads"] - row["requests"]) + abs(row["zeroed"] - row["loads"]) + (row["zeroed_bytes"] == 0)
    bounds = [results.bound(f"{kind}: loads other than one zeroed a request, {family}", "<= 0", wrong)]
    if kind == "short":
        bounds.append(results.bound(f"short: requests unchanged by zeroing {family}", "<= 0", unchanged))
    if family == "c4_indexer_state" and again["largest"] == none["largest"] == 0:
        # It makes one row, which many requests leave out in any case. Without noise, one that changes shows it.
        bounds.append(results.bound(f"long: requests changed by zeroing {family}", ">= 1", row["changed"]))
    else:
        least = max(2 * noise, ANY)
        bounds.append(results.bound(f"{kind}: median distance by zeroing {family}", f">= {least:.6g}", row["median"]))
    return bounds
