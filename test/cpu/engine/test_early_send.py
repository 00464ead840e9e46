"""A chunk that is sent through NIXL before its forward has ended: with the hooks the engine's own worker waits."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.utils import FastQueue
from sglang.srt.disaggregation.nixl.conn import NixlKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_dsv4.engine import early_send
from sglang_dsv4.engine.releases import engine_release

ROOM = 5

pytestmark = pytest.mark.skipif(
    not engine_release().nixl_gets_the_event, reason="NIXL gets no event: the variable must be 0"
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine's manager of a prefill server, with one peer, whose transfers are noted instead."""
    seen: list[Any] = []
    manager = object.__new__(NixlKVManager)
    manager.disaggregation_mode = DisaggregationMode.PREFILL
    manager.enable_staging = manager.enable_deferred_decode_kv_release = False
    manager.is_mla_backend, manager.src_mem_kind, manager.attn_tp_size = True, "VRAM", 1
    manager.kv_args = SimpleNamespace(kv_data_ptrs=[0], kv_item_lens=[64])
    manager.request_status = {ROOM: KVPoll.WaitingForInput}
    manager._staging_outstanding = defaultdict(int)
    pages = np.array([9, 10, 11], dtype=np.int32)
    peer = SimpleNamespace(room=ROOM, dst_port=1, is_dummy=False, agent_name="peer", dst_kv_indices=pages)
    manager.transfer_infos = {ROOM: {"peer": peer}}
    manager.decode_kv_args_table = {"peer": SimpleNamespace(
        decode_tp_size=1, requires_dcp_relayout=False, kv_xfer_segments=None, dst_homogeneous_mem_kind="VRAM",
        dst_kv_ptrs=[0], gpu_id=0, staging_base_ptr=0, staging_total_size=0,
    )}  # fmt: skip
    queue: list[Any] = []
    manager.transfer_queues = [SimpleNamespace(put=queue.append)]

    def generic(self: Any, *, prefill_data_indices: Any, **_: Any) -> None:
        assert type(prefill_data_indices) is np.ndarray
        seen.append(("sent", prefill_data_indices.tolist()))

    monkeypatch.setattr(NixlKVManager, "_send_kvcache_generic", generic)
    monkeypatch.setattr(NixlKVManager, "_await_handles", lambda *_, **__: (True, False))

    def work() -> None:
        with pytest.raises(KeyboardInterrupt):
            manager.transfer_worker(mock.Mock(**{"get.side_effect": [*queue, KeyboardInterrupt]}))

    return SimpleNamespace(manager=manager, seen=seen, work=work, queued=queue)


def send(server: Any, pages: list[int], begins: int, event: bool) -> None:
    """As CommonKVSender.send does."""
    found = SimpleNamespace(synchronize=lambda: server.seen.append("waited"))
    server.manager.add_transfer_request(
        ROOM, np.array(pages, dtype=np.int32), slice(begins, begins + len(pages)), False,
        wait_event=found if event else None,
    )  # fmt: skip


def test_the_worker_waits_for_the_forward_that_writes(server: Any) -> None:
    send(server, [1, 2], 0, event=True)
    send(server, [7], 2, event=False)
    assert server.seen == [], "the scheduler's thread waits for nothing"
    server.work()
    assert server.seen == ["waited", ("sent", [1, 2]), ("sent", [7])]


def test_a_piece_that_is_put_back_goes_to_the_same_queue(server: Any) -> None:
    """As where a peer is not ready; its pages are written by then."""
    send(server, [1, 2], 0, event=True)
    queue = early_send._Pieces(FastQueue())
    queue.put(server.queued[0])
    queue.put(queue.get())
    assert type(queue.get().prefill_kv_indices) is np.ndarray and server.seen == ["waited"]


def test_the_engine_itself_does_not_wait(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's worker gets no event; once it does, this fails, and engine.early_send can go."""
    for name in ("add_transfer_request", "transfer_worker"):
        monkeypatch.setattr(type(server.manager), name, getattr(type(server.manager), name).__wrapped__)
    send(server, [1, 2], 0, event=True)
    server.work()
    assert server.seen == [("sent", [1, 2])]
