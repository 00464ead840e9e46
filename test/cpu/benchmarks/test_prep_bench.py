"""The prep benchmark without a GPU: its engine's builder, its comparison, its reading of traces, its judgement."""

from __future__ import annotations

import pytest

from sglang_dsv4.bench import prep as bench_prep
from sglang_dsv4.bench.stepping import trace


def launch(correlation, at):
    return {"ph": "X", "cat": "cuda_runtime", "name": "l", "ts": at, "dur": 1, "args": {"correlation": correlation}}


def device(cat, name, correlation, at, dur, stream, **args):
    args = {"correlation": correlation, "stream": stream, **args}
    return {"ph": "X", "cat": cat, "name": name, "ts": at, "dur": dur, "args": args}


def region(name, at, dur):
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": at, "dur": dur}


TRACE = [
    {"ph": "M", "name": "process_name"},
    region("prepare 3", 100, 50), launch(1, 110), launch(2, 120), launch(5, 130),
    region("forward 3", 200, 50), launch(3, 210), launch(4, 220), launch(6, 230),
    region("inside", 201, 4), launch(9, 203),
    device("kernel", "mm", 4, 290, 40, 7), device("kernel", "mm", 6, 370, 5, 7),
    device("kernel", "mm", 3, 250, 30, 7),
    device("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1, 115, 5, 20, bytes=512),
    device("kernel", "prep", 2, 125, 10, 20),
    device("gpu_memset", "Memset (Device)", 5, 135, 2, 20, bytes=64),
    device("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 9, 400, 5, 7, bytes=1024),
]  # fmt: skip


def test_a_trace_is_read():
    work, regions = trace.read(TRACE)
    assert [(item.name[:6], item.region) for item in work] == [
        ("Memcpy", "prepare 3"), ("prep", "prepare 3"), ("Memset", "prepare 3"), ("mm", "forward 3"),
        ("mm", "forward 3"), ("mm", "forward 3"), ("Memcpy", "inside"),
    ]  # fmt: skip
    assert trace.count(work, 1) == {"kernels": 4, "uploads": 1, "other": 2, "upload_bytes": 512}
    found = trace.spans(work, regions, range(3, 4))
    assert [(s["lane"], s["name"], s["start_us"], s["end_us"], s.get("kernels")) for s in found] == [
        ("CPU", "prepare 3", 0.0, 50.0, None), ("CPU", "forward 3", 100.0, 150.0, None),
        ("prep stream", "prepare 3", 15.0, 37.0, 1), ("forward stream", "forward 3", 150.0, 230.0, 2),
        ("forward stream", "forward 3", 270.0, 275.0, 1),
    ]  # fmt: skip


def counted(**change):
    row = {"builder": "ours, host lengths", "batch": 128, "queries": 2, "kernels": 1, "uploads": 1, "other": 0,
           "upload_bytes": 512, "static_bytes": 0}  # fmt: skip
    return {**row, **change}


def timed(batch=8, queries=1, **change):
    names = ("engine_host", "engine_idle", "engine_busy", "ours_host", "ours_idle", "ours_busy", "engine_metadata")
    names += ("none_step", "engine_step", "in_line_step", "behind_step", "beside_step", "ours_beside_host")
    row = {f"{name}_us": 90.0 for name in names}
    row |= {f"{way}_late_percent": 3 for way in ("engine", "in_line", "behind", "beside")}
    row["in_line_metadata_us"] = 28.0
    return {"batch": batch, "queries": queries, **row, "behind_metadata_us": 29.0, "beside_metadata_us": 2.0, **change}


PLANNED = {"batch": 128, "queries": 2, "plan_us": 30.0, "by_token_us": 900.0, "device_operations": 15}


@pytest.mark.parametrize(
    ("faults", "count", "time", "planned", "missed"),
    [
        (0, {}, {}, {}, []),
        (3, {}, {}, {}, ["fields that differ"]),
        (0, {"kernels": 3}, {}, {}, ["ours, host lengths, batch 128, 2 a request: kernels"]),
        (0, {"uploads": 2}, {}, {}, ["ours, host lengths, batch 128, 2 a request: copies"]),
        (0, {"static_bytes": 4}, {}, {}, ["ours, host lengths, batch 128, 2 a request: static bytes"]),
        (0, {}, {"behind_metadata_us": 31.0}, {}, ["forward stream, prepared behind"]),
        (0, {}, {"beside_metadata_us": 60.0}, {}, ["forward stream, prepared beside"]),
        (0, {}, {"in_line_metadata_us": 60.0, "queries": 2}, {}, ["forward stream, prepared in line"]),
        (0, {}, {}, {"plan_us": 101.0}, ["plan on the CPU"]),
    ],
)
def test_each_fault_misses_its_bound(faults, count, time, planned, missed):
    bounds = bench_prep.judge(faults, [counted(**count)], [timed(1), timed(8, **time)], [PLANNED | planned])
    found = [bound["name"] for bound in bounds if not bound["ok"]]
    assert len(found) == len(missed) and all(name.startswith(m) for name, m in zip(found, missed, strict=True)), found
