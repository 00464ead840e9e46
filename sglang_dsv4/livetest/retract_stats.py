"""Counts the retracts of a server from its log, line by line, or from its metrics, before and after.

Both give the same fields, as far as they know them: saves, loads, bytes, copies alive, fallbacks, memory held, ranks.
"""

from __future__ import annotations

import http.client
import re
import statistics
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sglang_dsv4.command_line import CommandError
from sglang_dsv4.livetest import servers

# A line is known by its beginning: a client's text, such as a request's id, may say anything further on.
SAVED = re.compile(
    r"^\[[^\]]*\] saved (\d+) tokens, ([\d.]+) MB in ([\d.]+) ms; copies alive (\d+), ([\d.]+) of ([\d.]+) GiB held",
    re.M,
)
LOADED = re.compile(r"^\[[^\]]*\] loaded (\d+) tokens, ([\d.]+) MB in ([\d.]+) ms; copies alive (\d+)", re.M)
ALIVE = re.compile(r"^\[[^\]]*\] (?:saved|loaded) \d+ tokens.*; copies alive (\d+)", re.M)
# A session's point: tokens, new pages, the scheduler's time, points then.
KEPT = re.compile(r"^\[[^\]]*\] kept (\d+) tokens, (\d+) pages new, [\d.]+ MB in ([\d.]+) ms; (\d+) points", re.M)
PLACE = re.compile(r"^\[[^\]]*\]")  # how a line begins: time, and the rank of a server of several
RANK = re.compile(r" (DP|PP|TP)(\d+)")
FALLBACK = re.compile(r"^\[[^\]]*\] no host copy(?:, the engine's own behaviour follows| again) \((\w+)\)", re.M)
TROUBLE = (
    "VerifyMismatch",
    "Scheduler hit an exception",
    "NotImplementedError",
    "leak detected",
    "Leak Detected",  # by the check at every step
    "died without release",
)
PREFIX = "sglang_dsv4_"

Rank = tuple[int, int, int]  # of data, pipeline and tensor parallel: the first one speaks for those of its dp rank
Series = dict[str, float]  # by name without PREFIX, what has reasons or places as "fallbacks/REASON"
KINDS = ("reason", "where", "kind", "type", "op", "outcome")  # labels that divide a series
DECISIONS = {"saves", "loads", "fallbacks", "session_hits", "session_evicted"}  # alike on ranks that retract together
STORE = ("points", "asks", "units")  # series of a store, by outcome
EXACT = ("held_high_gib", "arena_gib", "copies_alive_at_end")  # the log has two decimals, and no copy that is dropped


def percentile(values: list[float], percent: int) -> float:
    """Returns the deviation; 0 without two values."""
    return statistics.quantiles(values, n=100)[percent - 1] if len(values) > 1 else 0.0


# A rank's graphs have this package's metadata kernel; some of them have the engine's.
GRAPH_PREP = "decode metadata in graphs is made by this package's kernel"
GRAPH_LEFT = "decode metadata of such graphs is left to the engine"


def read_log(path: Path, start: int = 0) -> dict[str, Any]:
    """Reads a decode server's log of retracts: one line a save and a load.

    Of the ranks of each data-parallel rank the first one speaks. start: byte where to begin. ranks: of one of these.
    ranks_apart: those that saved, loaded or fell back otherwise than the first one.
    """
    with path.open("rb") as log:
        log.seek(start)
        whole = log.read().decode(errors="replace")
    said = by_rank(whole)
    first = first_of_each(said)
    text = said_by_first(said)
    saved, loaded = SAVED.findall(text), LOADED.findall(text)
    alive = [[int(n) for n in ALIVE.findall(said[rank])] for rank in first.values()]
    fallbacks = FALLBACK.findall(text)
    return {
        "saves": len(saved),
        "loads": len(loaded),
        "saved_bytes": sum(float(line[1]) for line in saved) * 1e6,
        "loaded_bytes": sum(float(line[1]) for line in loaded) * 1e6,
        "save_ms_p50": percentile([float(line[2]) for line in saved], 50),
        "load_ms_p50": percentile([float(line[2]) for line in loaded], 50),
        "longest_saved": max((int(line[0]) for line in saved), default=0),
        "held_high_gib": max((float(line[4]) for line in saved), default=0.0),
        "arena_gib": float(saved[-1][5]) if saved else 0.0,
        "copies_alive_at_end": sum(counts[-1] for counts in alive if counts),
        "copies_alive_peak": max((max(counts) for counts in alive if counts), default=0),
        "fallbacks": dict(Counter(fallbacks)),
        "engine_retracts": sum(map(int, re.findall(r"#retracted_reqs: (\d+)", text))),
        "prefill_tokens": sum(map(int, re.findall(r"Prefill batch.*?#new-token: (\d+)", text))),
        "trouble": [word for word in TROUBLE if word in whole],
        "graph_prep": whole.count(GRAPH_PREP) - whole.count(GRAPH_LEFT),
        "ranks": ranks_of_one(said),
        "ranks_apart": sum(decisions(lines) != decisions(said[first[rank[0]]]) for rank, lines in said.items()),
    }


def by_rank(log: str) -> dict[Rank, str]:
    """Returns the lines of each rank; a server of one does not name it."""
    lines: dict[Rank, list[str]] = defaultdict(list)
    for line in log.splitlines():
        place = PLACE.match(line)
        named = dict(RANK.findall(place[0])) if place else {}
        if named:
            lines[tuple(int(named.get(kind, 0)) for kind in ("DP", "PP", "TP"))].append(line)  # type: ignore[index]
    return {rank: "\n".join(lines[rank]) for rank in sorted(lines)} or {(0, 0, 0): log}


def first_of_each(ranks: Iterable[Rank]) -> dict[int, Rank]:
    """Returns the rank that speaks for those of each data-parallel rank."""
    ranks = list(ranks)
    return {dp: min(rank for rank in ranks if rank[0] == dp) for dp in sorted({rank[0] for rank in ranks})}


def said_by_first(said: Mapping[Rank, str]) -> str:
    """Returns the lines of the ranks that speak for those of their data-parallel rank."""
    return "\n".join(said[rank] for rank in first_of_each(said).values())


def ranks_of_one(ranks: Iterable[Rank]) -> int:
    """Returns the most ranks of any data-parallel rank."""
    return max(Counter(rank[0] for rank in ranks).values(), default=0)


def decisions(log: str) -> list[tuple[str, ...]]:
    """Returns the decisions of a rank, in order: (saved or loaded, tokens), points kept, and why there was no copy.

    Points are logged with DSV4_VERIFY, the default of a run.
    """
    found = re.findall(r"^\[[^\]]*\] (saved|loaded) (\d+) tokens", log, re.M)
    kept = [(tokens, pages, points) for tokens, pages, _, points in KEPT.findall(log)]
    return [*found, *kept, *(("no copy", reason) for reason in FALLBACK.findall(log))]


def read_metrics(url: str) -> dict[Rank, Series]:
    """Returns the series of this package at a server's /metrics, by rank; empty where it has none."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, ValueError, http.client.HTTPException):  # no answer, or one of another kind of server
        return {}
    found: dict[Rank, Series] = defaultdict(dict)
    for family in families:
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                name += "".join(f"/{sample.labels[kind]}" for kind in KINDS if kind in sample.labels)
                rank = tuple(int(sample.labels.get(f"{kind}_rank", 0)) for kind in ("dp", "pp", "tp"))
                found[rank][name] = sample.value  # type: ignore[index]
    return dict(found)


def counted_at(url: str) -> dict[str, Any]:
    """Returns the counts of the server at ``url`` since its start, as ``between``; empty where it has no series."""
    series = read_metrics(url)
    return between({}, series) if series else {}


def between(before: Mapping[Rank, Series], after: Mapping[Rank, Series]) -> dict[str, Any]:
    """Returns the difference between two readings of the metrics; the gauges are those of the second.

    sessions, store: of a server that has them.
    """
    grown = {
        rank: {name: value - before.get(rank, {}).get(name, 0.0) for name, value in series.items()}
        for rank, series in after.items()
    }
    first = first_of_each(after)
    speaking = [grown[rank] for rank in first.values()]
    count = {name: sum(series.get(name, 0.0) for series in speaking) for name in {n for s in speaking for n in s}}

    def gauge(name: str) -> float:
        return sum(after[rank].get(name, 0.0) for rank in first.values())

    def each_ms(kind: str) -> float:
        return 1e3 * count.get(f"{kind}_seconds", 0.0) / max(1.0, count.get(f"{kind}s", 0.0))

    def divided(name: str) -> dict[str, int]:
        return {kind.split("/", 1)[1]: int(n) for kind, n in count.items() if kind.startswith(f"{name}/") and n}

    fallbacks = divided("fallbacks")
    sessions = {
        **{name: int(gauge(f"session_{name}")) for name in ("points", "bytes")},
        **{name: divided(f"session_{name}") for name in ("hits", "evicted")},
        **{
            name: int(count.get(f"session_{name}", 0)) for name in ("tokens", "verified", "saved_bytes", "loaded_bytes")
        },
        "save_seconds": count.get("session_save_seconds", 0.0),
    }
    return {
        **({"sessions": sessions} if "session_points" in count else {}),
        **({"store": {name: divided(f"store_{name}") for name in STORE}} if "store_up" in count else {}),
        "saves": int(count.get("saves", 0)),
        "loads": int(count.get("loads", 0)),
        "verified": int(count.get("verified", 0)),
        "saved_bytes": count.get("saved_bytes", 0.0),
        "loaded_bytes": count.get("loaded_bytes", 0.0),
        "save_ms_mean": each_ms("save"),
        "load_ms_mean": each_ms("load"),
        "held_high_gib": gauge("host_high_water_bytes") / 2**30,
        "arena_gib": gauge("host_bytes") / 2**30,
        "copies_alive_at_end": int(gauge("copies")),
        "held_bytes_at_end": int(gauge("host_held_bytes") + gauge("hisparse_kept_bytes")),
        "fallbacks": fallbacks,
        "prefill_tokens_saved": int(count.get("prefill_tokens_saved", 0)),
        "prep_steps": divided("prep_steps"),
        "prep_left": divided("prep_left"),
        "engine_retracts": int(count.get("saves", 0)) + sum(fallbacks.values()),
        "ranks": ranks_of_one(after),
        "ranks_apart": sum(_decided(grown[rank]) != _decided(grown[first[rank[0]]]) for rank in after),
    }


def _decided(series: Series) -> Series:
    return {name: n for name, n in series.items() if n and name.split("/")[0] in DECISIONS}


class SaysNothing(CommandError):
    """Reports a server that does not answer, or tells nothing of its retracts; names the setting to change."""


class RetractStats:
    """Reads the retracts of a running server since this object was made."""

    def __init__(self, url: str, log: Path | None) -> None:
        """Raises SaysNothing where the server does not answer, or has no series and no log was given."""
        self.url, self.log = url, log
        trouble = servers.unreachable(url)
        if trouble is not None:
            raise SaysNothing(f"--attach {url}: {trouble}: is the server up, and is this its port?")
        self.start = log.stat().st_size if log else 0
        self.before = read_metrics(url)
        if not self.before and log is None:
            raise SaysNothing(
                f"{url} has no {PREFIX} series: start it with this package and --enable-metrics, or name its log: --log"
            )

    def read(self) -> dict[str, Any]:
        """Returns the fields of ``between`` and of ``read_log``; where both know one, the log's, but for EXACT."""
        found = between(self.before, read_metrics(self.url)) if self.before else {}
        return together(found, read_log(self.log, self.start) if self.log else {})


def together(counted: dict[str, Any], logged: dict[str, Any]) -> dict[str, Any]:
    """Joins the facts of metrics and log; either may be empty. Each knows decisions that the other does not."""
    apart = max((facts["ranks_apart"] for facts in (counted, logged) if facts), default=0)
    return counted | logged | {name: counted[name] for name in EXACT if name in counted} | {"ranks_apart": apart}
