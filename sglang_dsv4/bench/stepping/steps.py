"""Steps as an overlapping scheduler runs them, with a stand-in for the forward, and clocks around their metadata."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

WARM_UP = 5
BUSY_CYCLES = 8_000_000  # some ms: longer than any builder takes to be enqueued


@dataclass(frozen=True)
class Took:
    """Median microseconds: between events around it on its stream, and of the host until it was enqueued."""

    stream_us: float
    host_us: float


def clocked(run: Callable[[], Any], times: int, busy: bool) -> Took:
    """``run`` on the current stream. busy: the device has work until all of it is enqueued, so that only device time
    counts; else it is idle, and waits for the host between kernels.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(times + WARM_UP):
        torch.cuda.synchronize()
        if busy:
            torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        began = time.perf_counter()
        run()
        host = time.perf_counter() - began
        end.record()
        if busy and start.query():
            raise RuntimeError("the device came to the work before all of it was enqueued; raise BUSY_CYCLES")
        end.synchronize()
        found.append((start.elapsed_time(end) * 1e3, host * 1e6))
    return Took(*(statistics.median(column) for column in zip(*found[WARM_UP:], strict=True)))


class Forward:
    """A decode forward for the clock: matrix products of few rows in a row, bound by memory as those of a real one.

    Each takes the device longer than its launch takes the host, so that the forward stream never waits for the host.
    """

    def __init__(self, kernels: int, width: int = 8192) -> None:
        self.kernels = kernels
        self._weight = torch.randn(width, width, dtype=torch.bfloat16, device="cuda") / width**0.5
        self._x = [torch.randn(128, width, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

    def __call__(self) -> None:
        """Enqueue it on the current stream."""
        for number in range(self.kernels):
            torch.mm(self._x[number % 2], self._weight, out=self._x[1 - number % 2])


class Steady:
    """A loop of steps: while forward k runs, step k+1 is prepared; the host waits for k when k+1 is enqueued.

    prepare and attach are called between two forwards, with the forward stream current as in the engine. What is on
    that stream from the begin of attach to its end is what the metadata costs it. schedule: the stream of the
    scheduler, which has written all that the metadata is made from.
    """

    def __init__(self, forward: Callable[[], None], prepare: Callable[[], Any], attach: Callable[[], Any]) -> None:
        self._forward, self._prepare, self._attach = forward, prepare, attach
        self.schedule, self.forward_stream = torch.cuda.Stream(), torch.cuda.Stream()
        for stream in (self.schedule, self.forward_stream):
            stream.wait_stream(torch.cuda.current_stream())

    def run(self, steps: int, named: bool = False) -> dict[str, float]:
        """Median microseconds over ``steps``: ``metadata_us`` on the forward stream, ``step_us`` from end to end.

        ``late_percent``: steps whose previous forward had ended before the metadata was enqueued: there the host's time
        shows on the forward stream too.
        named: mark each part as a region of the profiler, "prepare 3", "metadata 3", "forward 3".
        """
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(steps + WARM_UP)]
        late = 0
        for number, (before, behind, end) in enumerate(events):
            with torch.cuda.stream(self.forward_stream):
                with _region(f"prepare {number}", named):
                    self._prepare()
                before.record()
                with _region(f"metadata {number}", named):
                    self._attach()
                behind.record()
                late += number >= WARM_UP and before.query()
                with _region(f"forward {number}", named):
                    self._forward()
                end.record()
            if number:
                events[number - 1][2].synchronize()
        torch.cuda.synchronize()
        kept = events[WARM_UP:]
        waits = [before.elapsed_time(behind) * 1e3 for before, behind, _ in kept]
        lasted = [first[2].elapsed_time(then[2]) * 1e3 for first, then in itertools.pairwise(kept)]
        return {
            "metadata_us": statistics.median(waits),
            "step_us": statistics.median(lasted),
            "late_percent": round(100 * late / steps),
        }


@contextmanager
def _region(name: str, named: bool) -> Iterator[None]:
    with torch.profiler.record_function(name) if named else nullcontext():
        yield


def host_time(run: Callable[[], Any], times: int) -> float:
    """Median microseconds of ``run`` on the host alone."""
    found = []
    for _ in range(times + WARM_UP):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return statistics.median(found[WARM_UP:]) * 1e6
