"""Times a save and a load on the scheduler of a live server, and the gap that another running request sees at each.

    DSV4_HOST_GB=32 python3 -m benchmarks.stall --config benchmarks/flash_config.json --experts 8 \\
        -- --mem-fraction-static 0.9

A decode server with this package (fake transfer) retracts the longer of two requests again and again. Each save and
each load gives the host time that the package counts for it; nothing here waits for the device. The other request
stays: the largest gap between its tokens is taken at each save, at each load, and before each save, where nothing is
moved. Resumes are held back for some passes, so that a save and a load do not fall into one gap. The server's log tells
how long it pinned DSV4_HOST_GB. Arguments after -- go to the server. Exit status 1 when a bound is missed.
"""

import argparse
import bisect
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import client
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.in_server import around, note, read
from sglang_dsv4.livetest.retract_stats import percentile

MOST_MS = 1.5  # of the scheduler, for a save and for a load, median
LEAST_SEEN = 100
APART = 8  # passes from a save to its load
GAPS = 3  # from an event on: the host is late in the first ones, the device in the next, and a token takes its way
PINNED = re.compile(r"^\[[^\]]*\] pinned ([\d.]+) GiB in ([\d.]+) s", re.M)


def install(notes: Path) -> None:
    """Notes each save and each load: its tokens, when it began, and the milliseconds that the package counts."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue  # noqa: PLC0415 - in the server alone, as below

    from sglang_dsv4.pools.copy_service import CopyService  # noqa: PLC0415

    passes, saved_in = 0, -APART

    def a_pass(original: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        return [] if passes - saved_in < APART else original(queue, *args, **kwargs)

    def save(original: Any, host: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal saved_in
        began, counted = time.time(), host.counters.save_seconds
        copy = original(host, *args, **kwargs)
        ms, saved_in = (host.counters.save_seconds - counted) * 1e3, passes
        note(notes, what="save", tokens=copy.tokens, began=began, ms=ms)
        return copy

    def load(original: Any, host: Any, copy: Any, *args: Any, **kwargs: Any) -> None:
        began, counted = time.time(), host.counters.load_seconds
        original(host, copy, *args, **kwargs)
        ms = (host.counters.load_seconds - counted) * 1e3
        note(notes, what="load", tokens=copy.tokens, began=began, ms=ms)

    for owner, name, hook in (
        (DecodePreallocQueue, "resume_retracted_reqs", a_pass), (CopyService, "save", save),
        (CopyService, "load", load),
    ):  # fmt: skip
        around(owner, name, hook)


def largest_gap(arrived: Sequence[float], at: float, before: bool = False) -> float:
    """Returns the largest of GAPS gaps, in ms: from the one that ``at`` falls into, or of those before it.

    arrived: when each token came, in order.
    """
    end = bisect.bisect(arrived, at)
    ends = range(end - GAPS, end) if before else range(end, end + GAPS)
    return max((arrived[i] - arrived[i - 1] for i in ends if 0 < i < len(arrived)), default=0.0) * 1e3


def summarise(noted: Sequence[dict[str, Any]], arrived: Sequence[float]) -> dict[str, Any]:
    """Returns medians and 99th percentiles of saves and loads, and of the gaps at them and without them."""
    of = {what: [one for one in noted if one["what"] == what] for what in ("save", "load")}
    values = {"gap_ms": [largest_gap(arrived, one["began"], before=True) for one in of["save"]]}
    for what, events in of.items():
        values[f"{what}_ms"] = [one["ms"] for one in events]
        values[f"gap_at_{what}_ms"] = [largest_gap(arrived, one["began"]) for one in events]
    row: dict[str, Any] = {f"{what}s": len(events) for what, events in of.items()}
    return row | {f"{name}_p{share}": percentile(found, share) for name, found in values.items() for share in (50, 99)}


def pinned(log: Path) -> dict[str, float]:
    """Returns how much a server pinned at its start, and in how many seconds. Raises ServerDied where its log has
    neither.
    """
    found = PINNED.search(log.read_text(errors="replace"))
    if not found:
        raise servers.ServerDied(f"{log} does not say that host memory was pinned: the server makes no copies")
    return {"pinned_gib": float(found[1]), "pinned_s": float(found[2])}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of the result. Raises ServerDied."""
    tokens = max(arguments.tokens)
    with client.retracting("benchmarks.stall", arguments) as (asked, notes):
        asked.generate(tokens, arguments.new_tokens)
        warm = len(read(notes))  # the first request compiles
        for _ in range(arguments.repeats):
            asked.generate(tokens, arguments.new_tokens)
    noted = [one for one in read(notes)[warm:] if one["tokens"] >= tokens]
    return {"tokens": tokens, **summarise(noted, sorted(asked.beside.values())), **pinned(notes.parent / "decode.log")}


def judge(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the bounds: enough of both, and a short stop of the scheduler."""
    return [
        *(results.bound(f"{what} seen", f">= {LEAST_SEEN}", row[what]) for what in ("saves", "loads")),
        *(
            results.bound(f"{what}, ms of the scheduler, median", f"<= {MOST_MS}", row[f"{what}_ms_p50"])
            for what in ("save", "load")
        ),
    ]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = client.parser(__doc__, "stall", (65536,), 24)
    parser.set_defaults(new_tokens=600)
    return servers.parse(parser, argv)


def main() -> int:
    arguments = parse()
    servers.end_when_told()
    row = measure(arguments)
    results.show([row])
    return results.finish(arguments, [row], judge(row))


if __name__ == "__main__":
    raise SystemExit(main())
