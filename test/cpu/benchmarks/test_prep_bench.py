"""The prep benchmark without a GPU: its engine's builder, its comparison, its reading of traces, its judgement."""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
import pytest
from prep_fixture import SIZES, leave_out_planners

from sglang_dsv4.bench import prep as bench_prep
from sglang_dsv4.bench import prep_graph
from sglang_dsv4.bench.stepping import graphs, trace
from sglang_dsv4.engine import eager_builder
from sglang_dsv4.prep import in_graph


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


@pytest.mark.parametrize("queries", [1, 4])
def test_metadata_of_graphs_is_compared_with_the_engines(queries, monkeypatch):
    """Without a GPU nothing is captured and the engine has no compress plans; all else is as there."""
    leave_out_planners(monkeypatch)
    engine = eager_builder.Engine(SIZES.__class__(12, queries, 1500, 100, "cpu"))
    monkeypatch.setattr(graphs, "random_lengths", lambda count, seed: np.arange(1, count + 1) * 99 % 700 + 1)
    cases = [len(lengths) for lengths in graphs.batches(engine, 12)]
    assert min(cases) == 1 and max(cases) == 12 and cases[-3] == 9, "whole ones and padded ones"

    def fields():
        found, compared = graphs.compare_in_graph(engine, 12)
        assert compared == len(cases)
        return {line.rsplit(": ", 2)[1].split("[")[0] for line in found if ".plan" not in line and ".write" not in line}

    assert fields() == set()
    built = in_graph.prep_rows_torch

    def one_off(sizes, inputs, outputs):
        built(sizes, inputs, outputs)
        outputs.c128_out_locs[-1] += 1

    monkeypatch.setattr(in_graph, "prep_rows_torch", one_off)
    assert fields() == {"c128_out_locs"}


def graph_row(context, **change):
    row = {
        "context": context, "batch": 8, "queries": 1, "engine_kernels": 12, "ours_kernels": 1, "engine_us": 100.0,
        "ours_us": 20.0, "engine_all_us": 120.0, "ours_all_us": 40.0, "engine_bytes": 100, "ours_bytes": 90,
    }  # fmt: skip
    row |= change
    return row | {"ratio": row["ours_us"] / row["engine_us"], "all_ratio": row["ours_all_us"] / row["engine_all_us"]}


@pytest.mark.parametrize(
    ("context", "change", "missed"),
    [
        (65536, {}, []),
        (1 << 20, {"ours_us": 26.0}, ["time at a context of 1048576"]),
        (65536, {"ours_us": 26.0}, []),
        (65536, {"ours_us": 101.0}, ["time at a context of 65536"]),
        (65536, {"ours_kernels": 2}, ["ours: kernels"]),
        (65536, {"ours_bytes": 101}, ["memory"]),
    ],
)
def test_each_fault_in_a_graph_misses_its_bound(context, change, missed):
    bounds = prep_graph.judge_times([graph_row(1 << 20), graph_row(65536), graph_row(context, **change)])
    found = [bound["name"] for bound in bounds if not bound["ok"]]
    assert len(found) == len(missed) and all(name.startswith(m) for name, m in zip(found, missed, strict=True)), found


def test_a_run_that_is_out_of_time_writes_what_it_has(tmp_path, monkeypatch):
    """And misses a bound of its own."""
    monkeypatch.setattr(prep_graph, "engine_of", lambda *_: object())
    monkeypatch.setattr(prep_graph, "compare_in_graph", lambda *_: ([], 7))
    monkeypatch.setattr(prep_graph, "graph_times", lambda *_: graph_row(1 << 20))
    given = {"contexts": (65536, 1 << 20), "batches": (1, 8), "suffix": "-x", "out": tmp_path, "repeats": 1}
    for until, graphs_done, status in ((math.inf, 12, 0), (0.0, 1, 1)):
        arguments = argparse.Namespace(**given, until=until)
        for run, name in ((prep_graph.fields, "graph-fields-x"), (prep_graph.times, "graph-metadata-x")):
            assert run(arguments) == status
            assert len(json.loads((tmp_path / f"{name}.json").read_text())["rows"]) == graphs_done


def test_a_run_that_is_killed_has_written_what_it_had(tmp_path, monkeypatch):
    left = iter([graph_row(1 << 20)] * 3)
    monkeypatch.setattr(prep_graph, "engine_of", lambda *_: object())
    monkeypatch.setattr(prep_graph, "graph_times", lambda *_: next(left))
    given = {"contexts": (65536, 1 << 20), "batches": (1, 8), "suffix": "", "out": tmp_path, "repeats": 1}
    with pytest.raises(StopIteration):
        prep_graph.times(argparse.Namespace(**given, until=math.inf))
    found = json.loads((tmp_path / "graph-metadata.json").read_text())
    assert len(found["rows"]) == 3 and found["bounds"][-1]["value"] == 9 and (tmp_path / "graph-metadata.md").exists()
