"""The prep benchmark without a GPU: its comparison in graphs, and its judgement."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from prep_fixture import SIZES, leave_out_planners

from sglang_dsv4.bench import prep as bench
from sglang_dsv4.bench import prep_graphs as graphs
from sglang_dsv4.prep import in_graph
from sglang_dsv4.testing import eager_builder


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


def graph_row(**change):
    row = {
        "way": "graph", "context": 1 << 20, "differ": 0, "ours_kernels": 1, "ratio": 0.2, "engine_bytes": 100,
        "ours_bytes": 90,
    }  # fmt: skip
    return row | change


@pytest.mark.parametrize(
    ("row", "missed"),
    [
        (graph_row(), []),
        (graph_row(ratio=0.26), ["time at a context of 1048576"]),
        (graph_row(context=65536, ratio=0.26), []),
        (graph_row(context=65536, ratio=1.01), ["time at a context of 65536"]),
        (graph_row(ours_kernels=2), ["ours: kernels"]),
        (graph_row(ours_bytes=101), ["memory"]),
        (graph_row(differ=1), ["graphs: fields that differ"]),
        ({"way": "eager", "differ": 2}, ["eager steps: fields that differ"]),
    ],
)
def test_each_fault_misses_its_bound(row, missed):
    bounds = bench.judge([graph_row(), row], 0)
    found = [bound["name"] for bound in bounds if not bound["ok"]]
    assert len(found) == len(missed) and all(name.startswith(m) for name, m in zip(found, missed, strict=True)), found


@pytest.mark.parametrize(("seconds", "graphs_done", "status"), [("99", 12, 0), ("0.001", 1, 1)])
def test_a_run_that_is_out_of_time_writes_what_it_has(seconds, graphs_done, status, tmp_path, monkeypatch):
    """And misses a bound of its own."""
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "engine_of", lambda *_: object())
    monkeypatch.setattr(bench, "compare", lambda *_: time.sleep(0.01) or ([], 7))
    monkeypatch.setattr(bench, "compare_in_graph", lambda *_: ([], 7))
    monkeypatch.setattr(bench, "graph_times", lambda *_: graph_row())
    monkeypatch.setattr(bench.results, "machine", dict)
    words = ["--batches", "1", "8", "--contexts", "65536", "1048576", "--out", str(tmp_path), "--seconds", seconds]
    assert bench.main(words) == status
    rows = json.loads((tmp_path / "prep.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["eager"] * 2 + ["graph"] * graphs_done
