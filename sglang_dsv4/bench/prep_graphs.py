"""Captures metadata into a graph as a server does, replays it with other batches, compares, counts and clocks it."""

from __future__ import annotations

import functools
import gc
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_dsv4.bench.prep_fields import HOSTILE, differences, random_lengths
from sglang_dsv4.prep.step import Lengths
from sglang_dsv4.testing.eager_builder import Batch, Engine

DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
WARM_UP = 5
IN_A_ROW = 16  # builds in the graph that is clocked, so that its launch does not count
PADDED = 0.75  # of a graph's batch, the requests of a padded one
WARM_UPS = 2  # before a capture, as the engine's


class RawInputs:
    """Holds the inputs of a graph: tensors that are filled anew before each replay, as the engine's runner does.

    Begins as the engine's captures do, with padding alone: length 1, slot 0, output slot 0.
    """

    def __init__(self, engine: Engine, size: int) -> None:
        longs = {"dtype": torch.int64, "device": engine.sizes.device}
        self.size, self.queries = size, engine.sizes.queries
        self.slots, self.lengths = torch.zeros(size, **longs), torch.ones(size, **longs)
        self.out_locs = torch.zeros(size * self.queries, **longs)
        self.raw = engine.raw(self.slots, self.lengths, self.out_locs)

    def fill(self, batch: Batch) -> Lengths:
        """Returns ``batch``, and padding behind; the lengths of all rows, as the host knows them."""
        own = len(batch.lengths)
        for mine, theirs, padding in (
            (self.slots, batch.slots, 0), (self.lengths, batch.device_lengths, 1), (self.out_locs, batch.out_locs, 0),
        ):  # fmt: skip
            mine.fill_(padding)
            mine[: len(theirs)] = theirs
        return np.concatenate([batch.lengths, np.ones(self.size - own, np.int64)])


class Captured:
    """Captures a graph that makes metadata of ``inputs`` ``times`` in a row. Without a GPU a replay makes it anew.

    metadata: the engine's object, of the last time; its tensors lie in the graph's pool. nbytes: most memory that the
    capture had allocated at once, where it is made once.
    """

    def __init__(self, engine: Engine, inputs: RawInputs, ours: bool, times: int = 1) -> None:
        self._run = functools.partial(self._make, engine, inputs, ours, times)
        self.metadata, self.nbytes = None, 0
        self._graph = None
        if engine.sizes.device == "cpu":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._run()
        self.metadata = None
        torch.cuda.synchronize()
        if times == 1:  # else the memory is not asked for, and a collection takes longer than the rest
            gc.collect()
            torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._run()
        self.nbytes = torch.cuda.max_memory_allocated() - before

    def _make(self, engine: Engine, inputs: RawInputs, ours: bool, times: int) -> None:
        for _ in range(times):
            self.metadata = None  # as at the end of a forward: the next one may have the memory
            self.metadata = engine.from_raw(inputs.raw, ours)

    def replay(self) -> None:
        """Runs it on the current stream, with the present inputs."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()


def batches(engine: Engine, size: int) -> Iterator[Lengths]:
    """Yields batches for a graph of ``size`` requests: hostile and random lengths, whole and padded batches, the ends.

    One after the other in one table: requests come back in other slots, on other pages, shorter or longer.
    """
    queries = engine.sizes.queries
    longest = engine.sizes.context - (queries if queries > 1 else 0)
    hostile = [length for length in HOSTILE if length <= longest]
    for first in range(0, len(hostile), size):
        yield np.array(hostile[first : first + size], np.int64)
    yield np.array([longest], np.int64)
    yield np.array([longest - 1, *hostile][:size], np.int64)
    for seed, count in enumerate((size, max(1, int(size * PADDED)), 1, size)):
        yield random_lengths(count, seed=1000 * size + seed)


def compare_in_graph(engine: Engine, size: int) -> tuple[list[str], int]:
    """Returns (one line a difference, batches compared) over ``batches``, each replayed by the engine's graph and by
    ours.
    """
    inputs = RawInputs(engine, size)
    theirs, ours = (Captured(engine, inputs, ours=own) for own in (False, True))
    found, count = [], 0
    for lengths in batches(engine, size):
        every = inputs.fill(engine.place(lengths))
        theirs.replay()
        ours.replay()
        label = f"graph of {size}, {inputs.queries} a request, lengths {str(lengths.tolist())[:40]}"
        found += [f"{label}: {line}" for line in differences(theirs.metadata, ours.metadata, every)]
        count += 1
    return found, count


def graph_times(engine: Engine, size: int, repeats: int) -> dict[str, Any]:
    """Returns kernels of one build, its microseconds, most bytes of its memory; the engine's and ours."""
    inputs = RawInputs(engine, size)
    inputs.fill(engine.place(random_lengths(size, seed=100 + size)))
    row: dict[str, Any] = {}
    for name, ours in (("engine", False), ("ours", True)):
        once = Captured(engine, inputs, ours)
        row[f"{name}_kernels"] = launches(once.replay)
        row[f"{name}_bytes"] = once.nbytes
        del once
        row[f"{name}_us"] = _clock(Captured(engine, inputs, ours, IN_A_ROW), repeats)
    return row | {"ratio": row["ours_us"] / row["engine_us"]}


def launches(run: Callable[[], Any]) -> int:
    """Returns kernels, copies and memsets on the device while ``run`` runs, by the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return sum(event.get("cat") in DEVICE_WORK for event in json.loads(path.read_text())["traceEvents"])


def _clock(captured: Captured, repeats: int) -> float:
    """Returns median microseconds of one build on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spans = []
    for _ in range(repeats + WARM_UP):
        start.record()
        captured.replay()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) * 1e3 / IN_A_ROW)
    return statistics.median(spans[WARM_UP:])
