"""What the GPU did, from torch.profiler: kernels, copies and their bytes, and when each named region ran where."""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
PAUSE_US = 30  # between two pieces of work that a picture shows apart
STEP_REGION = re.compile(r"[a-z]+ (\d+)")


@dataclass(frozen=True)
class Work:
    """One kernel, copy or memset on the device. region: the named region in which the host enqueued it, or ""."""

    kind: str
    name: str
    region: str
    stream: int
    start_us: float
    end_us: float
    nbytes: int

    @property
    def upload(self) -> bool:
        """Whether it is a copy from the host to the device."""
        return self.kind == "gpu_memcpy" and "HtoD" in self.name


@dataclass(frozen=True)
class Region:
    """A named region on the host."""

    name: str
    start_us: float
    end_us: float


def record(run: Callable[[], Any]) -> tuple[list[Work], list[Region]]:
    """Profile ``run`` and wait for the device."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return read(json.loads(path.read_text())["traceEvents"])


def read(events: list[dict[str, Any]]) -> tuple[list[Work], list[Region]]:
    """Work and regions of a trace in the order of their start. Work belongs to the innermost region of its launch."""
    events = [event for event in events if event.get("ph") == "X"]
    regions = sorted(
        (Region(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation"),
        key=lambda region: region.start_us,
    )
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in {"cuda_runtime", "cuda_driver"} and "correlation" in e.get("args", {})
    }
    starts = [region.start_us for region in regions]

    def region_of(event: dict[str, Any]) -> str:
        at = launched.get(event["args"].get("correlation"))
        if at is None:
            return ""
        around = [r for r in regions[: bisect_right(starts, at)] if at <= r.end_us]
        return around[-1].name if around else ""

    work = [
        Work(
            e["cat"], e["name"], region_of(e), int(e["args"]["stream"]), e["ts"], e["ts"] + e["dur"],
            int(e["args"].get("bytes", 0)),
        )
        for e in events if e.get("cat") in DEVICE_WORK
    ]  # fmt: skip
    return sorted(work, key=lambda w: w.start_us), regions


def count(work: list[Work], runs: int) -> dict[str, Any]:
    """Kernels, copies from the host and their bytes, other copies and memsets: of one run, the mean of ``runs``."""
    kinds = Counter("uploads" if w.upload else "kernels" if w.kind == "kernel" else "other" for w in work)
    totals = {kind: kinds[kind] for kind in ("kernels", "uploads", "other")}
    totals["upload_bytes"] = sum(w.nbytes for w in work if w.upload)
    return {kind: total // runs if total % runs == 0 else total / runs for kind, total in totals.items()}


def spans(work: list[Work], regions: list[Region], steps: range) -> list[dict[str, Any]]:
    """For a picture: when each region "WORD NUMBER" with a number in ``steps`` ran, on the CPU and on each stream.

    Microseconds from the first. Work of one region on one stream is one span up to the next longer pause, however many
    kernels it has. The stream with the regions called forward is the forward stream, any other the prep stream.
    """

    def shown(name: str) -> bool:
        found = STEP_REGION.fullmatch(name)
        return found is not None and int(found[1]) in steps

    work = [item for item in work if shown(item.region)]
    forward = {item.stream for item in work if item.region.startswith("forward ")}
    found: list[dict[str, Any]] = [
        {"lane": "CPU", "name": r.name, "start_us": r.start_us, "end_us": r.end_us} for r in regions if shown(r.name)
    ]
    stretches: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for item in work:
        mine = stretches.setdefault((item.stream, item.region), [])
        if not mine or item.start_us > mine[-1]["end_us"] + PAUSE_US:
            lane = "forward stream" if item.stream in forward else "prep stream"
            mine.append({"lane": lane, "name": item.region, "start_us": item.start_us, "end_us": 0.0, "kernels": 0})
        mine[-1]["end_us"] = max(mine[-1]["end_us"], item.end_us)
        mine[-1]["kernels"] += item.kind == "kernel"
    found += [span for mine in stretches.values() for span in mine]
    origin = min((span["start_us"] for span in found), default=0.0)
    for span in found:
        span |= {key: round(span[key] - origin, 1) for key in ("start_us", "end_us")}
    return found
