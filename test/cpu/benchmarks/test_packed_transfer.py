"""The benchmark of page-major transfers over servers that answer at once: its rows, and the bounds of a bad result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks import packed_transfer as bench


class Pair:
    """Servers that answer at once, and note transfers as slow as their layout."""

    def __init__(self, layout: str, differs: bool = False, slow: int | None = None) -> None:
        self.layout, self.differs, self.room, self.lines, self.states = layout, differs, 0, list[Any](), list[str]()
        self.slow = slow or {"stock": 10, "page-major": 1}[layout]

    def ask(self, tokens: list[int], timeout: float, *, compared: bool = False) -> float:
        self.room += 2
        slow = self.slow if self.states[-1:] == ["worn down"] else 1
        self.lines.append({"room": self.room, "kv": True, "descriptors": 9, "pieces": slow, "build_ms": 0.0,
                           "post_ms": float(slow), "wire_ms": 2.0})  # fmt: skip
        if compared:
            for side, checksum in (("sent", "a"), ("arrived", "b" if self.differs else "a")):
                self.lines.append({"room": self.room, "side": side, "checksum": checksum})
        return 5.0

    def wear_down(self, leave: int, timeout: float) -> None:
        self.states.append("worn down")

    def renew(self) -> None:
        self.states.append("fresh")

    def noted(self) -> list[dict[str, Any]]:
        return self.lines


def measured(tmp_path: Path, pairs: list[Any], *more: str) -> list[str]:
    """The bounds that a run over them misses."""
    words = ["--config", "c", "--tokens", "65536", "512", "--out", str(tmp_path), "--warm", "1", *more]
    measurement = bench.Measurement(bench.parse(words), pairs, 50)
    measurement.run()
    return [bound["name"] for bound in bench.report(measurement) if not bound["ok"]]


def test_a_run_has_a_row_for_each_kind_and_its_bounds(tmp_path: Path) -> None:
    assert measured(tmp_path, [Pair("stock"), Pair("page-major")]) == []
    found = json.loads((tmp_path / "packed-transfer.json").read_text())["rows"]
    rows = [row for row in found if row.get("tokens") == 65536 and row["pools"] == "worn down"]
    assert {(row["layout"], row["way"]): (row["requests"], row["posting_ms"]) for row in rows} == {
        (layout, way): (2, slow) for layout, slow in (("stock", 10), ("page-major", 1)) for way in ("cold", "warm")
    }


def test_bytes_that_differ_and_a_layout_that_is_no_faster_are_missed(tmp_path: Path) -> None:
    assert measured(tmp_path, [Pair("stock"), Pair("page-major", differs=True, slow=3)]) == [
        "page-major: requests whose bytes differ",
        "posting 64K, worn down, warm: stock / page-major",
        "posting 64K, worn down, cold: stock / page-major",
    ]


def test_a_transfer_that_nobody_saw_was_not_clocked(tmp_path: Path) -> None:
    """Posted in no time at all, it would be the fastest."""

    class Unseen(Pair):
        def noted(self) -> list[dict[str, Any]]:
            return [line | ({"kv": False} if "kv" in line else {}) for line in self.lines]

    assert measured(tmp_path, [Pair("stock"), Unseen("page-major")]) == ["kinds of requests that were not clocked"]


def test_what_there_was_no_time_for_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh pools alone say nothing of worn-down ones, and a bound that is not there cannot be missed."""
    monkeypatch.setattr(Pair, "wear_down", mock.Mock(side_effect=bench.Out))
    assert measured(tmp_path, [Pair("stock"), Pair("page-major")]) == [
        "kinds of requests that were not clocked", "stock: requests compared on both ends",
        "page-major: requests compared on both ends",
    ]  # fmt: skip
