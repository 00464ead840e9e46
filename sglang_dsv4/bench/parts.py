"""Measures when each kernel and copy of a transfer ran on the card, to show where a slow transfer lost its time.

A save is below the link because the copy engine begins late, stands still in between, or is slow while it copies: the
summary has a figure of each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

WARM_UP = 3
ENGINE = ("blocks", "image")  # parts that the copy engine moves; the others are kernels


@dataclass
class Clock:
    """Clocks one transfer as the ``mark`` of a copier; ``begun`` is called first, with the device idle."""

    events: list[tuple[str, Any, int, float]] = field(default_factory=list)

    def begun(self) -> None:
        """Marks the begin of the transfer."""
        self("begin", torch.cuda.current_stream(), 0)

    def __call__(self, part: str, stream: Any, nbytes: int) -> None:
        """Marks a part, as ``Mark`` does."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        self.events.append((part, event, nbytes, time.perf_counter()))

    def parts(self) -> list[dict[str, Any]]:
        """Returns each part: when it was on the card and when the host had enqueued it, microseconds from the begin."""
        (_, begin, _, host), *marks, (_, end, _, ended) = self.events

        def since(event: Any) -> float:
            return float(begin.elapsed_time(event)) * 1e3

        found = [
            {"part": part, "bytes": nbytes, "begin_us": since(first), "end_us": since(last),
             "enqueued_us": (enqueued - host) * 1e6}
            for (part, first, nbytes, _), (_, last, _, enqueued) in zip(marks[::2], marks[1::2], strict=True)
        ]  # fmt: skip
        over = since(end)
        return [*found, {"part": "end", "bytes": 0, "begin_us": over, "end_us": over,
                         "enqueued_us": (ended - host) * 1e6}]  # fmt: skip


def median_parts(run: Callable[[Clock], None], count: int) -> list[dict[str, Any]]:
    """Returns the parts of ``run``, which makes the same transfer each time; each figure is a median."""
    runs = []
    for _ in range(count + WARM_UP):
        clock = Clock()
        run(clock)
        torch.cuda.synchronize()
        runs.append(clock.parts())
    names = ("begin_us", "end_us", "enqueued_us")
    return [
        same[0] | {name: round(statistics.median(part[name] for part in same), 1) for name in names}
        for same in zip(*runs[WARM_UP:], strict=True)
    ]


def summary(way: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns figures of ``way``, save or load: the copy engine's, and the time of each kind of kernel."""
    engine = [part for part in parts if part["part"] in ENGINE]
    blocks = [part for part in parts if part["part"] == "blocks"]

    def lasted(some: list[dict[str, Any]]) -> float:
        return float(sum(part["end_us"] - part["begin_us"] for part in some))

    begins, ends = min(part["begin_us"] for part in engine), max(part["end_us"] for part in engine)
    found = {
        f"{way}_engine_begins_us": begins,
        f"{way}_engine_idle_us": round(ends - begins - lasted(engine), 1),
        f"{way}_engine_ends_us": ends,
        f"{way}_ends_us": parts[-1]["end_us"],
        f"{way}_enqueued_us": parts[-1]["enqueued_us"],
        f"{way}_blocks_gbps": sum(part["bytes"] for part in blocks) / 1e3 / max(1e-3, lasted(blocks)),
    }
    for kind in ("locate", "rows", "pages", "image"):
        found[f"{way}_{kind}_us"] = round(lasted([part for part in parts if part["part"] == kind]), 1)
    return found
