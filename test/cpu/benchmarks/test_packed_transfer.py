"""What the benchmark of packed transfers measures, in which order, and what it asks of it."""

from __future__ import annotations

import argparse
import json
import urllib.error
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks.packed import differences, pairs, step, transfer
from benchmarks.packed.timed_transfers import switch
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Answer


class Pair:
    """Servers that answer at once, and note transfers as slow as their layout."""

    def __init__(self, layout: str, differs: bool = False, slow: int | None = None) -> None:
        self.layout, self.differs, self.room, self.lines, self.states = layout, differs, 0, [], []
        self.slow = slow or {"stock": 10, "page-major": 1}[layout]
        self.notes = {"prefill": None}

    def ask(self, prompt: list[int], timeout: float, *, compared: bool = False) -> tuple[Answer, float]:
        self.room += 2
        slow = self.slow if self.states[-1:] == ["worn down"] else 1
        self.lines.append({"room": self.room, "kv": True, "descriptors": 9, "pieces": slow, "build_ms": 0.0,
                           "post_ms": float(slow), "wire_ms": 2.0})  # fmt: skip
        if compared:
            for side in differences.SIDES:
                wrong = int(self.differs and side != "sent")
                file = self.folder / f"{self.layout}-{self.room}-{side}.npy"
                np.save(file, np.array([[1, 2], [3, 4 + wrong]]))
                self.lines.append({"room": self.room, "pages": 2, "runs": 1, "side": side, "sums": str(file),
                                   "checksum": "ab"[wrong]})  # fmt: skip
        return Answer("finished"), 5.0

    def wear_down(self, leave: int, timeout: float) -> None:
        self.states.append("worn down")

    def renew(self) -> None:
        self.states.append("fresh")

    def noted(self, role: str) -> list[dict[str, Any]]:
        return self.lines

    def transports(self) -> list[str]:
        return ["cuda_ipc"]


def measured(tmp_path: Path, pairs: list[Any], *more: str) -> dict[str, bool]:
    """The bounds of a run over them."""
    arguments = transfer.parse(
        ["--config", "c", "--tokens", "65536", "512", "--out", str(tmp_path), "--warm", "1", *more]
    )
    for pair in pairs:
        pair.folder = tmp_path
    measurement = transfer.Measurement(arguments, pairs, 50)
    measurement.run()
    return {bound["name"]: bound["ok"] for bound in transfer.report(measurement)}


def test_the_table_and_the_bounds(tmp_path: Path) -> None:
    found = measured(tmp_path, [Pair("stock"), Pair("page-major")])
    assert len(found) == 11 and all(found.values())
    result = json.loads((tmp_path / "packed-transfer.json").read_text())
    rows = [row for row in result["rows"] if row.get("tokens") == 65536 and row["pools"] == "worn down"]
    assert {(row["layout"], row["way"]): (row["requests"], row["posting_ms"]) for row in rows} == {
        (layout, way): (2, slow) for layout, slow in (("stock", 10), ("page-major", 1)) for way in ("cold", "warm")
    }
    assert "UCX: stock: cuda_ipc" in (tmp_path / "packed-transfer.md").read_text()


def test_bytes_that_differ_and_a_layout_that_is_no_faster_are_missed(tmp_path: Path) -> None:
    found = measured(tmp_path, [Pair("stock"), Pair("page-major", differs=True, slow=3)])
    assert [name for name, ok in found.items() if not ok] == [
        "page-major: requests whose bytes differ",
        "posting 64K, worn down, warm: stock / page-major",
        "posting 64K, worn down, cold: stock / page-major",
    ]


def test_a_difference_is_in_the_result(tmp_path: Path) -> None:
    measured(tmp_path, [Pair("stock", differs=True)], "--tokens", "512")
    rows = json.loads((tmp_path / "packed-transfer.json").read_text())["rows"]
    (found,) = [row["differences"] for row in rows if "differences" in row]
    assert [(one["regions"], one["pages"], one["places"]) for one in found] == [(["region 1"], [1], 1)] * 2


@pytest.mark.parametrize(
    ("repeats", "states"), [("1", ["worn down", "fresh"]), ("2", ["worn down", "fresh", "worn down"])]
)
def test_pools_are_worn_down_first_where_time_is_short(repeats: str, states: list[str], tmp_path: Path) -> None:
    pair = Pair("stock")
    measured(tmp_path, [pair], "--pools", "worn down", "fresh", "--repeats", repeats)
    assert pair.states == states
    rows = json.loads((tmp_path / "packed-transfer.json").read_text())["rows"]
    assert {(row["pools"], row["posting_ms"]) for row in rows if "pools" in row} == {("worn down", 10.0), ("fresh", 1)}


def test_a_run_that_is_cut_off_has_each_kind_before_one_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two states of two lengths: after a compared and a clocked request of each, nothing is left out."""
    asked = len(("worn down", "fresh")) * 2 * 2
    monkeypatch.setattr(transfer.time, "monotonic", mock.Mock(side_effect=[0.0] * (1 + asked) + [1e9]))
    found = measured(tmp_path, [Pair("stock")])
    assert all(found.values())
    rows = json.loads((tmp_path / "packed-transfer.json").read_text())["rows"]
    assert [row["requests"] for row in rows if "way" in row] == [1] * 8


def test_a_transfer_that_nobody_saw_was_not_clocked(tmp_path: Path) -> None:
    """Posted in no time at all, it would be the fastest."""

    class Unseen(Pair):
        def noted(self, role: str) -> list[dict[str, Any]]:
            return [line | ({"kv": False} if "kv" in line else {}) for line in self.lines]

    found = measured(tmp_path, [Pair("stock"), Unseen("page-major")])
    assert [name for name, ok in found.items() if not ok] == ["kinds of requests that were not clocked"]


def test_each_request_is_in_the_result_at_once(tmp_path: Path) -> None:
    """Of a round that is ended between two servers' requests, the first one is kept."""

    class Killed(Pair):
        def ask(self, *args: Any, **kwargs: Any) -> Any:
            if self.room >= 2:
                raise KeyboardInterrupt
            return super().ask(*args, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, [Killed("stock"), Pair("page-major")], "--warm", "0")
    rows = json.loads((tmp_path / "packed-transfer.json").read_text())["rows"]
    assert [(row["layout"], row["requests"]) for row in rows if "way" in row] == [("page-major", 1)]


def test_without_time_there_is_a_result_all_the_same(tmp_path: Path) -> None:
    found = measured(tmp_path, [Pair("stock")], "--seconds", "0")
    assert found == {
        "kinds of requests that were not clocked": False, "stock: requests compared on both ends": False,
        "stock: requests whose bytes differ": True,
    }  # fmt: skip


def test_what_there_was_no_time_for_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh pools alone say nothing of worn-down ones, and a bound that is not there cannot be missed."""
    monkeypatch.setattr(Pair, "wear_down", mock.Mock(side_effect=transfer.Out))
    found = measured(tmp_path, [Pair("stock"), Pair("page-major")])
    assert [name for name, ok in found.items() if not ok] == [
        "kinds of requests that were not clocked", "stock: requests compared on both ends",
        "page-major: requests compared on both ends",
    ]  # fmt: skip


@pytest.mark.parametrize("lags", [False, True])
def test_a_card_that_should_lag_does(lags: bool, tmp_path: Path) -> None:
    """Else nothing is sent early, and equal bytes say nothing."""
    pair = Pair("stock")
    pair.lines += [{"lagged": True}] * lags
    assert measured(tmp_path, [pair], "--lag", "300")["stock: forwards that lagged"] is lags


@pytest.mark.parametrize("differs", [False, True])
def test_equal_bytes_say_nothing_where_the_control_has_them(differs: bool, tmp_path: Path) -> None:
    pairs = [Pair("stock", differs), Pair("page-major", differs)]
    found = measured(tmp_path, pairs, "--lag", "300")
    assert found["stock: requests sent before they were written"] is differs
    assert found["page-major: requests whose bytes differ"] is not differs
    assert measured(tmp_path, [Pair("stock")], "--lag", "300", "--no-early-send")["stock: requests whose bytes differ"]


def test_a_flush_waits_until_the_server_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def post(url: str, path: str, body: Any, timeout: float) -> None:
        asked.append(path)
        if len(asked) < 3:
            raise urllib.error.HTTPError(url, 400, "busy", Message(), None)

    monkeypatch.setattr(servers, "post", post)
    monkeypatch.setattr(pairs.time, "sleep", lambda seconds: None)
    server = SimpleNamespace(url="u", role="prefill", log="l")
    pairs.flush(server)
    assert asked == ["/flush_cache"] * 3
    monkeypatch.setattr(pairs, "IDLE", 0)
    with pytest.raises(servers.ServerDied, match="never idle"):
        pairs.flush(server)


def test_a_server_that_took_less_is_believed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("server_args max_total_tokens=99\n[t] max_total_num_tokens=2560, \n")
    assert step.tokens_in(log) == 2560
    log.write_text("")
    assert step.tokens_in(log) == 0


UCX_SAYS = """
[17.9] [vm:1 :0]   +--------+-----------+---------------+
[17.9] [vm:1 :0]   | A intra-node cfg#1                  |
[17.9] [vm:1 :0]   | active message by ucp_am_send*      |
[17.9] [vm:1 :0]   |   0..8184 | short | tcp/lo          |
[17.9] [vm:1 :0]   | A intra-node cfg#1                  |
[17.9] [vm:1 :0]   | remote memory write by ucp_put*(fast-completion) from cuda/GPU0 |
[17.9] [vm:1 :0]   +--------+-----------+---------------+
[17.9] [vm:1 :0]   | Range  | Description | Config       |
[17.9] [vm:1 :0]   +--------+-----------+---------------+
[17.9] [vm:1 :0]   | 0..inf | zero-copy | cuda_ipc/cuda  |
"""


def test_what_the_servers_are_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def launch(role, model, given, environment, folder, way, apart):
        seen.append((role, given, environment, apart))
        log = folder / f"{role}.log"
        log.write_text(UCX_SAYS)
        return SimpleNamespace(url="u", log=log, kill=lambda: None)

    monkeypatch.setattr(servers, "launch", launch)
    monkeypatch.setattr(servers, "wait_until_up", lambda *_: None)
    arguments = transfer.parse(
        [
            "--config",
            "c",
            "--devices",
            "0",
            "1",
            "--layouts",
            "stock",
            "page-major",
            "--logs",
            str(tmp_path),
            "--",
            "--x",
        ]
    )
    with pairs.pairs_up(arguments, Path("m")) as up:
        assert [pair.transports() for pair in up] == [["zero-copy by cuda_ipc/cuda"]] * 2
    assert [(role, environment["DSV4_LAYOUT"], apart) for role, _, environment, apart in seen] == [
        ("prefill", "stock", 0), ("decode", "stock", 0), ("prefill", "page-major", 50), ("decode", "page-major", 50)
    ]  # fmt: skip
    for role, given, environment, _ in seen:
        known = argparse.ArgumentParser()
        for name in ("--base-gpu-id", "--context-length", "--max-total-tokens"):
            known.add_argument(name, type=int)
        found = known.parse_known_args(given)[0]
        assert found.base_gpu_id == (role == "decode")
        assert found.max_total_tokens > found.context_length > 131072
        assert given[-1] == "--x" and Path(environment[switch.FILE]).name == f"{role}.jsonl"
    with pytest.raises(SystemExit):
        transfer.parse(["--config", "c", "--tokens", "1000"])
