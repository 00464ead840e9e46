"""The benchmark of page-major transfers: its part in the servers, over the engine's classes, and its judgement."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from benchmarks import packed_in_server as inside
from benchmarks import packed_transfer as bench
from sglang_dsv4.livetest import servers

LAYERS, PAGES, PAGE_BYTES = 3, 40, 64
ROOM = 7  # odd: compared


class Agent:
    """A NIXL agent that copies pages of host memory at once, and is done at the second look."""

    looks = 0

    def make_prepped_xfer(self, how: str, mine: Any, source: Any, theirs: Any, target: Any, *notif: Any) -> Any:
        for one, other in zip(source, target, strict=True):
            theirs[other // PAGES].view(PAGES, -1)[other % PAGES] = mine[one // PAGES].view(PAGES, -1)[one % PAGES]
        return SimpleNamespace()

    def initialize_xfer(self, *args: Any) -> Any:
        raise AssertionError("history goes by prepared descriptors")

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        self.looks += 1
        return "DONE" if self.looks % 2 == 0 else "PROC"


def kv_args(regions: list[torch.Tensor]) -> Any:
    return SimpleNamespace(
        kv_data_ptrs=[region.data_ptr() for region in regions],
        kv_data_lens=[region.nbytes for region in regions],
        kv_item_lens=[PAGE_BYTES] * len(regions),
        gpu_id=0,
    )


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, installed: Any) -> Any:
    """A sender and a receiver of the engine's classes, with regions of their own, and the notes of both."""

    def init(manager: Any) -> None:
        manager.agent = Agent()

    monkeypatch.setattr(NixlKVManager, "__init__", init)
    monkeypatch.setattr(NixlKVManager, "update_status", lambda *_: None, raising=False)
    monkeypatch.setattr(NixlKVReceiver, "send_metadata", lambda *_: None, raising=False)
    monkeypatch.setattr(NixlKVReceiver, "poll", lambda receiver: receiver.state, raising=False)
    notes = installed(inside)
    mine, theirs = ([torch.randint(256, (PAGES * PAGE_BYTES,)).byte() for _ in range(LAYERS)] for _ in range(2))
    sender = NixlKVManager()
    sender.kv_args, sender._num_slots_src = kv_args(mine), PAGES
    sender.prep_handles = {"": mine, "peer": theirs}
    sender.decode_kv_args_table = {"peer": SimpleNamespace(dst_num_slots=PAGES)}
    receiver = object.__new__(NixlKVReceiver)
    receiver.bootstrap_room, receiver.state = ROOM, KVPoll.Transferring
    receiver.kv_mgr = SimpleNamespace(kv_args=kv_args(theirs))
    return SimpleNamespace(sender=sender, receiver=receiver, theirs=theirs, notes=notes)


def send(ends: Any, source: list[int], target: list[int], room: int = ROOM) -> None:
    """As the engine's worker does, a chunk."""
    ends.sender.update_status(room, KVPoll.Transferring)
    takes = inspect.signature(inspect.unwrap(NixlKVManager._send_kvcache_generic)).parameters
    handle = ends.sender._send_kvcache_generic(
        peer_name="peer", src_data_ptrs=ends.sender.kv_args.kv_data_ptrs, dst_data_ptrs=[], item_lens=[PAGE_BYTES] * 3,
        prefill_data_indices=np.array(source, dtype=np.int32), dst_data_indices=np.array(target, dtype=np.int32),
        dst_gpu_id=0, **({"notif": "chunk"} if "notif" in takes else {}),
    )  # fmt: skip
    while ends.sender.agent.check_xfer_state(handle) != "DONE":
        pass


@pytest.mark.parametrize("wrong", [False, True])
def test_a_transfer_is_noted_and_compared_on_both_ends(ends: Any, wrong: bool) -> None:
    ends.receiver.send_metadata(np.array([9, 10, 11, 30, 4], dtype=np.int32), 1)
    send(ends, [1, 2, 3], [9, 10, 11])
    send(ends, [6, 5], [30, 4])
    ends.sender.update_status(ROOM, KVPoll.Success)
    assert ends.receiver.poll() == KVPoll.Transferring
    ends.theirs[1].view(PAGES, -1)[30, 17] += wrong
    ends.receiver.state = KVPoll.Success
    assert ends.receiver.poll() == ends.receiver.poll() == KVPoll.Success
    first, second, sent, arrived = ends.notes()
    assert [(line["room"], line["kv"], line["descriptors"], line["pieces"]) for line in (first, second)] == [
        (ROOM, True, 9, 3), (ROOM, True, 6, 6)
    ]  # fmt: skip
    assert min(first["build_ms"], first["post_ms"], first["wire_ms"]) > 0
    assert (sent["side"], arrived["side"], sent["pages"]) == ("sent", "arrived", 5)
    pair = SimpleNamespace(layout="stock", noted=ends.notes, transports=list)
    found = bench.compared(pair)
    assert (found["compared"], found["different"]) == (1, int(wrong))


def test_even_rooms_are_clocked_and_not_compared(ends: Any) -> None:
    ends.receiver.bootstrap_room = ROOM + 1
    ends.receiver.send_metadata(np.array([9]), 1)
    send(ends, [1], [9], ROOM + 1)
    ends.sender.update_status(ROOM + 1, KVPoll.Success)
    ends.receiver.state = KVPoll.Success
    ends.receiver.poll()
    assert [line["room"] for line in ends.notes()] == [ROOM + 1]


@pytest.mark.parametrize("wrong", ["two words exchanged", "two pages exchanged", "two layers exchanged"])
def test_what_arrives_elsewhere_has_other_sums(ends: Any, wrong: str) -> None:
    right = inside.page_sums(ends.receiver.kv_mgr.kv_args, [3, 4, 5])
    region = ends.theirs[1].view(PAGES, -1)
    if wrong == "two words exchanged":
        region[4].view(torch.int64)[[0, 1]] = region[4].view(torch.int64)[[1, 0]].clone()
    elif wrong == "two pages exchanged":
        region[[3, 5]] = region[[5, 3]]
    else:
        ends.theirs[0][:], ends.theirs[2][:] = ends.theirs[2].clone(), ends.theirs[0].clone()
    assert (inside.page_sums(ends.receiver.kv_mgr.kv_args, [3, 4, 5]) != right).any()


def test_only_a_request_of_that_name_wears_the_pages_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No long run is left; what is held and what is free are all pages."""
    pages = PagedTokenToKVPoolAllocator(1000 * 2, 2, torch.float8_e4m3fn, "cpu", None, True)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(full_attn_allocator=pages))
    transfers, asked = inside.Transfers(tmp_path / "notes"), []
    for rid in ("other", f"{inside.CHURN}100-stock"):
        transfers.handle_generate_request(lambda _, request: asked.append(request.rid), scheduler,
                                          SimpleNamespace(rid=rid))  # fmt: skip
        free = pages.available_size() // 2
        assert free == 1000 if rid == "other" else 100 <= free < 300
    pages.merge_and_sort_free()
    held = torch.cat(transfers.held)
    assert sorted(torch.cat((held[::2] // 2, pages.free_pages)).tolist()) == list(range(1, 1001))
    assert inside.pieces(pages.free_pages[:64], pages.free_pages[:64]) > 8
    assert len(asked) == 2 and len((tmp_path / "notes").read_text().splitlines()) == 1


# ---------------------------------------------------------------------- the driver


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

    def transports(self) -> list[str]:
        return ["cuda_ipc"]


def measured(tmp_path: Path, pairs: list[Any], *more: str) -> list[str]:
    """The bounds that a run over them misses."""
    words = ["--config", "c", "--tokens", "65536", "512", "--out", str(tmp_path), "--warm", "1", *more]
    measurement = bench.Measurement(bench.parse(words), pairs, 50)
    measurement.run()
    return [bound["name"] for bound in bench.report(measurement) if not bound["ok"]]


def rows_in(tmp_path: Path) -> list[dict[str, Any]]:
    return json.loads((tmp_path / "packed-transfer.json").read_text())["rows"]


def test_a_run_has_a_row_for_each_kind_and_its_bounds(tmp_path: Path) -> None:
    assert measured(tmp_path, [Pair("stock"), Pair("page-major")]) == []
    rows = [row for row in rows_in(tmp_path) if row.get("tokens") == 65536 and row["pools"] == "worn down"]
    assert {(row["layout"], row["way"]): (row["requests"], row["posting_ms"]) for row in rows} == {
        (layout, way): (2, slow) for layout, slow in (("stock", 10), ("page-major", 1)) for way in ("cold", "warm")
    }


def test_bytes_that_differ_and_a_layout_that_is_no_faster_are_missed(tmp_path: Path) -> None:
    assert measured(tmp_path, [Pair("stock"), Pair("page-major", differs=True, slow=3)]) == [
        "page-major: requests whose bytes differ",
        "posting 64K, worn down, warm: stock / page-major",
        "posting 64K, worn down, cold: stock / page-major",
    ]


def test_a_run_that_is_cut_off_has_each_kind_before_one_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two states of two lengths: after a compared and a clocked request of each, nothing is left out."""
    monkeypatch.setattr(bench.time, "monotonic", mock.Mock(side_effect=[0.0] * (1 + 2 * 2 * 2) + [1e9]))
    assert measured(tmp_path, [Pair("stock")]) == []
    assert [row["requests"] for row in rows_in(tmp_path) if "way" in row] == [1] * 8


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


UCX_SAYS = """
[17.9] [vm:1 :0]   | active message by ucp_am_send*      |
[17.9] [vm:1 :0]   |   0..8184 | short | tcp/lo          |
[17.9] [vm:1 :0]   | remote memory write by ucp_put*(fast-completion) from cuda/GPU0 |
[17.9] [vm:1 :0]   | Range  | Description | Config       |
[17.9] [vm:1 :0]   | 0..inf | zero-copy | cuda_ipc/cuda  |
"""


def test_the_servers_of_each_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def launch(role, model, given, environment, folder, way, apart):
        seen.append((role, environment["DSV4_LAYOUT"], apart, given[given.index("--base-gpu-id") + 1]))
        assert given[-1] == "--x" and environment["BENCHMARK_MODULE"] == "benchmarks.packed_in_server"
        log = folder / f"{role}.log"
        log.write_text(UCX_SAYS)
        return SimpleNamespace(url="u", log=log, kill=lambda: None)

    monkeypatch.setattr(servers, "launch", launch)
    monkeypatch.setattr(servers, "wait_until_up", lambda *_: None)
    arguments = bench.parse(["--config", "c", "--devices", "0", "1", "--logs", str(tmp_path), "--", "--x"])
    with bench.pairs_up(arguments, Path("m")) as up:
        assert [pair.transports() for pair in up] == [["zero-copy by cuda_ipc/cuda"]] * 2
    assert seen == [("prefill", "stock", 0, "0"), ("decode", "stock", 0, "1"),
                    ("prefill", "page-major", 50, "0"), ("decode", "page-major", 50, "1")]  # fmt: skip
    with pytest.raises(SystemExit):
        bench.parse(["--config", "c", "--tokens", "1000"])
