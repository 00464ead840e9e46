"""The benchmark of page-major transfers over servers that answer at once: its rows, and the bounds of a bad result."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import packed_transfer as bench


class Pair:
    """Servers that answer at once, and note transfers as slow as their layout."""

    def __init__(self, layout: str, differs: bool = False, slow: int = 1, seen: bool = True, worn: bool = True) -> None:
        self.layout, self.differs, self.seen, self.wears = layout, differs, seen, worn
        self.slow = 10 if layout == "stock" else slow
        self.room, self.lines, self.worn = 0, list[Any](), False

    def ask(self, tokens: list[int], timeout: float, *, compared: bool = False) -> float:
        self.room += 2
        slow = self.slow if self.worn else 1
        self.lines.append({"room": self.room, "kv": self.seen, "descriptors": 9, "pieces": slow, "build_ms": 0.0,
                           "post_ms": float(slow), "wire_ms": 2.0})  # fmt: skip
        if compared:
            for side, checksum in (("sent", "a"), ("arrived", "b" if self.differs else "a")):
                self.lines.append({"room": self.room, "side": side, "checksum": checksum})
        return 5.0

    def wear_down(self, leave: int, timeout: float) -> None:
        if not self.wears:
            raise bench.Out
        self.worn = True

    def renew(self) -> None:
        self.worn = False

    def noted(self) -> list[dict[str, Any]]:
        return self.lines


NOT_CLOCKED = "kinds of requests that were not clocked"
MISSED = {
    "a good run": ({}, []),
    "bytes that differ, no faster": (
        {"differs": True, "slow": 3},
        ["page-major: requests whose bytes differ",
         *(f"posting 64K, worn down, {way}: stock / page-major" for way in ("warm", "cold"))],
    ),
    "transfers that nobody saw": ({"seen": False}, [NOT_CLOCKED]),  # in no time: the fastest
    # Fresh pools alone say nothing of worn-down ones, and a bound that is not there cannot be missed.
    "no time": (
        {"worn": False},
        [NOT_CLOCKED, *(f"{layout}: requests compared on both ends" for layout in ("stock", "page-major"))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSED)
def test_a_run_has_its_rows_and_misses_the_bounds_of_a_bad_result(tmp_path, case):
    change, missed = MISSED[case]
    words = ["--config", "c", "--tokens", "65536", "512", "--out", str(tmp_path), "--warm", "1"]
    measurement = bench.Measurement(bench.parse(words), [Pair("stock"), Pair("page-major", **change)], 50)
    measurement.run()
    assert [bound["name"] for bound in bench.report(measurement) if not bound["ok"]] == missed
    found = json.loads((tmp_path / "packed-transfer.json").read_text())["rows"]
    rows = [row for row in found if row.get("tokens") == 65536 and row["pools"] == "worn down"]
    if not missed:
        assert {(row["layout"], row["way"]): (row["requests"], row["posting_ms"]) for row in rows} == {
            (layout, way): (2, slow) for layout, slow in (("stock", 10), ("page-major", 1)) for way in ("cold", "warm")
        }
