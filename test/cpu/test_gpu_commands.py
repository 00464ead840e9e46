"""Runs the benchmarks of ``sglang-dsv4 bench`` to their end on a played card: every column is there, figures are not.

``stress`` and ``run_gsm8k.py`` run in livetest/, ``demo`` in test_cli_demo.py.
"""

import functools
import json

import pytest
import torch
from played_card import played_card
from prep_fixture import leave_out_planners

from sglang_dsv4.bench import peers, prep, prep_fields, prep_graphs, subject, transfer


@pytest.fixture
def card(monkeypatch):
    with played_card(monkeypatch) as device:
        yield device


@pytest.fixture
def small(monkeypatch, card):
    """The transfer benchmark with its copier on the played card, and peers that are quick."""
    make, limit = subject.Subject.__init__, subject.link_limit

    def init(self, *arguments):
        make(self, *arguments)
        card.serve(self.host)

    def short(device, host=None):
        return limit(device, torch.empty(4096, dtype=torch.uint8) if host is None else host[:4096])

    monkeypatch.setattr(subject.Subject, "__init__", init)
    for module in (subject, transfer):
        monkeypatch.setattr(module, "link_limit", short)
    monkeypatch.setattr(peers, "page_kernel", lambda: lambda *_: None)
    monkeypatch.setattr(transfer, "gather", functools.partial(peers.gather, rows=8, pages=2, size=64))
    monkeypatch.setattr(transfer, "ENQUEUED", {2047, 2303})
    monkeypatch.setattr(transfer, "POINT", 2048)
    monkeypatch.setitem(transfer.MODELS, "flash", transfer.MODELS["tiny"])


COLUMNS = ["ms", "gbps", "of_link", "limit_gbps", "arena_gbps", "enqueue_us"]


@pytest.mark.usefixtures("small")
def test_bench_transfer(tmp_path):
    words = ["--device", "cuda", "--tokens", "2047", "2303", "--count", "1", "--out", str(tmp_path)]
    assert transfer.main(words) < 2
    found = json.loads((tmp_path / "transfer.json").read_text())
    for row in found["rows"]:
        for way in ("save", "load"):
            assert all(row[f"{way}_{column}"] > 0 for column in COLUMNS)
            assert row[f"reference_{way}_ms"] > 0 and row[f"engine_{way}_ms"] > 0
        assert row["point_load_ms"] > 0 and row["point_save_ms"] > 0
    named = {bound["name"] for bound in found["bounds"]}
    assert {"save 2048 of the link", "load 2048 enqueued, us", "get_k_and_s of the device copy"} < named
    assert "load of a session at 2048, by a request's" in named


def test_a_session_that_takes_longer_than_a_request_or_holds_the_host_up_misses_its_bound():
    row = {"tokens": 65535, "load_ms": 4.0}
    times = {"point_load_ms": 4.39, "point_save_ms": 0.5}
    assert transfer.point_bounds(row) == transfer.point_bounds(row | times | {"tokens": 16383}) == []
    for changed, met in (
        ({}, [True, True]),
        ({"point_load_ms": 4.41}, [False, True]),
        ({"point_save_ms": 0.6}, [True, False]),
    ):
        assert [bound["ok"] for bound in transfer.point_bounds(row | times | changed)] == met


@pytest.mark.usefixtures("card")
def test_bench_prep(tmp_path, monkeypatch):
    """Over small pools. The engine makes no compress plans without a GPU, and the played graphs replay nothing."""
    leave_out_planners(monkeypatch)
    for module in (prep_fields, prep):
        monkeypatch.setattr(module, "LONGEST", 300)
    for module in (prep_fields, prep_graphs):
        monkeypatch.setattr(module, "HOSTILE", (1, 128, 257))
    monkeypatch.setattr(prep_graphs, "IN_A_ROW", 1)
    monkeypatch.setattr(prep_graphs, "WARM_UP", 1)
    monkeypatch.setattr(prep_fields, "_plans", lambda *_: {})
    monkeypatch.setattr(prep, "EAGER_QUERIES", (1,))
    monkeypatch.setattr(prep, "QUERIES", (4,))
    words = ["--batches", "2", "--contexts", "600", "--repeats", "2", "--out", str(tmp_path)]
    assert prep.main(words) < 2
    found = json.loads((tmp_path / "prep.json").read_text())
    assert [(row["way"], row["queries"]) for row in found["rows"]] == [("eager", 1), ("graph", 4)]
    assert {bound["name"] for bound in found["bounds"]} > {"graphs: fields that differ from the engine's"}


GRAPH = {"way": "graph", "context": 1 << 20, "differ": 0, "ours_kernels": 1, "ratio": 0.2, "engine_bytes": 100,
         "ours_bytes": 90}  # fmt: skip


@pytest.mark.parametrize(("change", "missed"), [
    ({}, []), ({"ratio": 0.26}, ["time at a context of 1048576"]),
    ({"context": 65536, "ratio": 1.01}, ["time at a context of 65536"]), ({"ours_kernels": 2}, ["ours: kernels"]),
    ({"ours_bytes": 101}, ["memory"]), ({"differ": 1}, ["graphs: fields that differ"]),
    ({"way": "eager", "differ": 2}, ["eager steps: fields that differ"]),
])  # fmt: skip
def test_a_bad_result_of_bench_prep_misses_its_bound(change, missed):
    found = [bound["name"] for bound in prep.judge([GRAPH, GRAPH | change]) if not bound["ok"]]
    assert len(found) == len(missed) and all(name.startswith(m) for name, m in zip(found, missed, strict=True)), found
