"""Each command that needs a GPU runs to its end where the card is played: none may break unseen.

``stress`` and ``run_gsm8k.py`` do so in livetest/test_stress.py and livetest/test_gsm8k.py, ``demo`` in
test_cli_demo.py. Figures are made up here; what is held is that every column is there and that the result is written.
"""

from __future__ import annotations

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
    monkeypatch.setitem(transfer.MODELS, "flash", transfer.MODELS["tiny"])


TIMES = "engine_begins engine_idle engine_ends ends enqueued locate rows pages image enqueue".split()  # noqa: SIM905
COLUMNS = ["ms", "gbps", "of_link", "limit_gbps", "arena_gbps", "blocks_gbps", *(f"{name}_us" for name in TIMES)]
PARTS = {"locate", "rows", "pages", "image", "blocks", "end"}


@pytest.mark.usefixtures("small")
def test_bench_transfer(tmp_path):
    words = ["--device", "cuda", "--tokens", "2047", "2303", "--count", "1", "--out", str(tmp_path)]
    assert not transfer.main(words)
    found = json.loads((tmp_path / "transfer.json").read_text())
    for row in found["rows"]:
        for way in ("save", "load"):
            assert all(row[f"{way}_{column}"] > 0 for column in COLUMNS)
            assert {part["part"] for part in row[f"{way}_parts"]} == {
                "locate",
                "rows",
                "pages",
                "image",
                "blocks",
                "end",
            }
            assert row[f"reference_{way}_ms"] > 0 and row[f"engine_{way}_ms"] > 0
        assert row["launches"] == {"save": [1, 1], "load": [1, 1]}
    named = {bound["name"] for bound in found["bounds"]}
    assert {"save 2048 of the link", "load 2048 enqueued, us", "get_k_and_s of the device copy"} < named
    assert "| 2,303 |" in (tmp_path / "transfer.md").read_text()


@pytest.fixture
def small_prep(monkeypatch, card):
    """The prep benchmark over small pools. The engine makes no compress plans without a GPU."""
    leave_out_planners(monkeypatch)
    for module in (prep_fields, prep):
        monkeypatch.setattr(module, "LONGEST", 300)
    for module in (prep_fields, prep_graphs):
        monkeypatch.setattr(module, "HOSTILE", (1, 128, 257))
    for name in ("IN_A_ROW", "WARM_UP"):
        monkeypatch.setattr(prep_graphs, name, 1)
    monkeypatch.setattr(prep, "QUERIES", (1, 4))
    monkeypatch.setattr(prep_fields, "_plans", lambda *_: {})


@pytest.mark.usefixtures("small_prep")
def test_bench_prep(tmp_path):
    words = ["--batches", "2", "--contexts", "600", "--repeats", "1", "--out", str(tmp_path)]
    assert prep.main(words) < 2
    found = json.loads((tmp_path / "prep.json").read_text())
    assert [(row["way"], row["queries"]) for row in found["rows"]] == [
        ("eager", 1), ("eager", 2), ("graph", 1), ("graph", 4)
    ]  # fmt: skip
    assert all(bound["ok"] for bound in found["bounds"][:3]), "fields equal, nothing left out"
