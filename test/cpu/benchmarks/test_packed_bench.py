"""What the benchmark of packed transfers puts into a server, and what it makes of its notes."""

from __future__ import annotations

import ctypes
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from benchmarks.packed import differences
from benchmarks.packed.timed_transfers import churn, switch
from benchmarks.stall.timed_retracts.switch import wrapped
from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.engine.standalone import PoolSpec, make_pool

LAYERS, PAGES, PAGE_BYTES = 3, 40, 64
ROOM = 7  # odd: compared


class Agent:
    """A NIXL agent that copies pages of host memory at once, and is done at the second look."""

    def __init__(self) -> None:
        self.looks = 0

    def make_prepped_xfer(self, how: str, mine: Any, source: Any, theirs: Any, target: Any, *notif: Any) -> Any:
        assert how == "WRITE"
        for regions, layout in ((mine, source), (theirs, target)):
            assert len(regions) * PAGES > max(layout)
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
def ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A sender and a receiver of the engine's classes, with regions of their own, and the notes of both."""
    file = tmp_path / "notes"
    file.touch()
    transfers = switch.Transfers(file)

    def init(manager: Any) -> None:
        manager.agent = Agent()

    def status(manager: Any, room: int, status: Any) -> None:
        manager.said.append(status)

    monkeypatch.setattr(NixlKVManager, "__init__", init)
    monkeypatch.setattr(NixlKVManager, "update_status", status, raising=False)
    monkeypatch.setattr(NixlKVReceiver, "send_metadata", lambda receiver, kv_indices, *_: None, raising=False)
    monkeypatch.setattr(NixlKVReceiver, "poll", lambda receiver: receiver.state, raising=False)

    def put(owner: Any, name: str, hook: Any) -> None:
        monkeypatch.setattr(owner, name, wrapped(getattr(owner, name), hook))

    switch.install(transfers, put)
    mine, theirs = ([torch.randint(256, (PAGES * PAGE_BYTES,)).byte() for _ in range(LAYERS)] for _ in range(2))
    sender = NixlKVManager()
    sender.said, sender.kv_args, sender._num_slots_src = [], kv_args(mine), PAGES
    sender.prep_handles = {"": mine, "peer": theirs}
    sender.decode_kv_args_table = {"peer": SimpleNamespace(dst_num_slots=PAGES)}
    receiver = object.__new__(NixlKVReceiver)
    receiver.bootstrap_room, receiver.state = ROOM, KVPoll.Transferring
    receiver.kv_mgr = SimpleNamespace(kv_args=kv_args(theirs))
    return SimpleNamespace(
        sender=sender, receiver=receiver, theirs=theirs, transfers=transfers,
        notes=lambda: [json.loads(line) for line in file.read_text().splitlines()],
    )  # fmt: skip


def send(ends: Any, source: list[int], target: list[int], room: int = ROOM) -> None:
    """As the engine's worker does, a chunk."""
    ends.sender.update_status(room, KVPoll.Transferring)
    takes = inspect.signature(NixlKVManager._send_kvcache_generic.__wrapped__).parameters
    handle = ends.sender._send_kvcache_generic(
        peer_name="peer", src_data_ptrs=ends.sender.kv_args.kv_data_ptrs, dst_data_ptrs=[], item_lens=[PAGE_BYTES] * 3,
        prefill_data_indices=np.array(source, dtype=np.int32), dst_data_indices=np.array(target, dtype=np.int32),
        dst_gpu_id=0, **({"notif": "chunk"} if "notif" in takes else {}),
    )  # fmt: skip
    while ends.sender.agent.check_xfer_state(handle) != "DONE":
        pass


def test_a_transfer_is_noted_and_compared_on_both_ends(ends: Any) -> None:
    ends.receiver.send_metadata(np.array([9, 10, 11, 30, 4], dtype=np.int32), 1)
    send(ends, [1, 2, 3], [9, 10, 11])
    send(ends, [6, 5], [30, 4])
    ends.sender.update_status(ROOM, KVPoll.Success)
    assert ends.receiver.poll() == KVPoll.Transferring
    ends.receiver.state = KVPoll.Success
    assert ends.receiver.poll() == ends.receiver.poll() == KVPoll.Success
    first, second, posted, sent, arrived, later = ends.notes()
    assert [(note["room"], note["kv"], note["descriptors"], note["pieces"]) for note in (first, second)] == [
        (ROOM, True, 9, 3), (ROOM, True, 6, 6)
    ]  # fmt: skip
    assert min(first["build_ms"], first["post_ms"], first["wire_ms"]) > 0
    assert [note["side"] for note in (posted, sent, arrived, later)] == list(differences.SIDES)
    assert len({note["checksum"] for note in (posted, sent, arrived, later)}) == 1
    assert np.load(sent["sums"]).shape == (LAYERS, 5)
    assert (sent["runs"], arrived["runs"]) == (3, 3)
    assert ends.sender.said == [KVPoll.Transferring] * 2 + [KVPoll.Success]


@pytest.mark.parametrize("wrong", ["a byte", "two words exchanged", "two pages exchanged", "two layers exchanged"])
def test_what_arrives_otherwise_has_other_sums(ends: Any, wrong: str) -> None:
    pages = [3, 4, 5]
    right = switch.page_sums(ends.receiver.kv_mgr.kv_args, pages)
    region = ends.theirs[1].view(PAGES, -1)
    if wrong == "a byte":
        region[4, 17] += 1
    elif wrong == "two words exchanged":
        region[4].view(torch.int64)[[0, 1]] = region[4].view(torch.int64)[[1, 0]].clone()
    elif wrong == "two pages exchanged":
        region[[3, 5]] = region[[5, 3]]
    else:
        ends.theirs[0][:], ends.theirs[2][:] = ends.theirs[2].clone(), ends.theirs[0].clone()
    found = switch.page_sums(ends.receiver.kv_mgr.kv_args, pages) != right
    assert (
        found.tolist()
        == {
            "a byte": [[False] * 3, [False, True, False], [False] * 3],
            "two words exchanged": [[False] * 3, [False, True, False], [False] * 3],
            "two pages exchanged": [[False] * 3, [True, False, True], [False] * 3],
            "two layers exchanged": [[True] * 3, [False] * 3, [True] * 3],
        }[wrong]
    )


NAMES = ["c4_kv 2", "c4_kv 4", "c4_indexer 2"]


@pytest.mark.parametrize("cause", ["written_after_posting", "landed_late", "the wire"])
def test_a_difference_says_where_it_is_and_who_changed_it(ends: Any, cause: str, monkeypatch: Any) -> None:
    """The engine sends pages that a forward still writes; a look comes too early; another's write is neither."""
    mine = torch.frombuffer(
        (ctypes.c_uint8 * (PAGES * PAGE_BYTES)).from_address(ends.sender.kv_args.kv_data_ptrs[1]), dtype=torch.uint8
    ).view(PAGES, -1)
    theirs = ends.theirs[1].view(PAGES, -1)
    ends.receiver.send_metadata(np.array([9, 10, 11], dtype=np.int32), 1)
    send(ends, [1, 2, 3], [9, 10, 11])
    if cause == "written_after_posting":
        mine[2] += 1
    ends.sender.update_status(ROOM, KVPoll.Success)
    if cause != "written_after_posting":
        theirs[10] += 1
    if cause == "landed_late":
        monkeypatch.setattr(switch.time, "sleep", lambda _: theirs[10].sub_(1))
    ends.receiver.state = KVPoll.Success
    ends.receiver.poll()
    ((room, sides),) = differences.looks(ends.notes()).items()
    assert differences.differs(sides)
    found = differences.difference(room, sides, NAMES)
    assert (found["room"], found["places"], found["of"], found["regions"], found["pages"], found["last_page"]) == (
        ROOM, 1, 9, ["c4_kv 4"], [1], 1
    )  # fmt: skip
    assert {name for name in ("written_after_posting", "landed_late") if found[name]} == {cause} - {"the wire"}
    assert found["as_posted"] == (cause == "written_after_posting")


def test_regions_are_named_in_the_order_of_the_engine() -> None:
    """By their sizes: a page of the indexer is not as long as one of the kv rows."""
    pool = make_pool(PoolSpec((0, 0, 4, 128, 4, 128)))
    lengths = pool.get_contiguous_buf_infos()[2]
    found = differences.region_names(Geometry((0, 0, 4, 128, 4, 128)))
    sizes = {family.name: family.page_bytes for family in families(Geometry((0, 0, 4, 128, 4, 128)))}
    assert [sizes[name.split()[0]] for name in found] == lengths


def test_even_rooms_are_clocked_and_not_compared(ends: Any) -> None:
    ends.receiver.bootstrap_room = ROOM + 1
    ends.receiver.send_metadata(np.array([9]), 1)
    send(ends, [1], [9], ROOM + 1)
    ends.sender.update_status(ROOM + 1, KVPoll.Success)
    ends.receiver.state = KVPoll.Success
    ends.receiver.poll()
    assert [note["room"] for note in ends.notes()] == [ROOM + 1]


def test_a_card_that_lags_is_held_before_the_last_layers(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first ones it would hold the host, too, which then sends nothing too early."""
    ran: list[Any] = []

    class Layer(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, *, positions: int) -> None:
            ran.append(self.number)

    class Model(torch.nn.Module):
        end_layer = 2 + switch.LAST

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(map(Layer, range(self.end_layer)))

        def forward(self) -> None:
            for layer in self.layers:
                layer(positions=1)

    monkeypatch.setenv(switch.LAG_MS, "300")
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: ran.append("held" if cycles > 1e8 else "briefly"))
    model = Model()
    for _ in range(2):
        ends.transfers.forward(Model.forward, model)
    assert ran == [0, 1, "held", *range(2, model.end_layer)] * 2
    assert ends.notes() == [{"lagged": True}] * 2


def test_a_pool_is_worn_down() -> None:
    """Of the engine's own allocator no long run is left; what is held and what is free are all pages."""
    pages = PagedTokenToKVPoolAllocator(1000 * 2, 2, torch.float8_e4m3fn, "cpu", None, True)
    held = torch.cat(churn.churn(pages, 100, 1, 60))
    pages.merge_and_sort_free()
    assert 100 <= len(pages.free_pages) < 300
    assert sorted(torch.cat((held[::2] // 2, pages.free_pages)).tolist()) == list(range(1, 1001))
    first = pages.free_pages[:64]
    assert switch.pieces(first, first) > 8


def test_only_a_request_of_that_name_wears_the_pages_down(tmp_path: Path) -> None:
    pages = PagedTokenToKVPoolAllocator(1000 * 2, 2, torch.float8_e4m3fn, "cpu", None, True)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(full_attn_allocator=pages))
    transfers, asked = switch.Transfers(tmp_path / "notes"), []
    for rid in ("other", switch.churned(200, "stock")):
        transfers.handle_generate_request(lambda _, request: asked.append(request.rid), scheduler,
                                          SimpleNamespace(rid=rid))  # fmt: skip
        free = pages.available_size() // 2
        assert free == 1000 if rid == "other" else 200 <= free < 1000
    assert len(asked) == 2 and len((tmp_path / "notes").read_text().splitlines()) == 1
