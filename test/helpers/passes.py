"""Runs a decode server's passes over its queues, on CPU.

Real: the admission rule with the engine's default reserve, process_decode_queue, pool and allocator. Not the handshake.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from server_fixture import PAGE, Recorder, World, made_request

from sglang_dsv4.testing.standalone import PoolSpec

RESERVED = 512  # the engine's default of --num-reserved-decode-tokens
TIMES = ("set_decode_transfer_queue_entry_time", "set_retract_time", "set_quick_finish_time")


class Transfers:
    """Plays the transfer queue, whose requests arrive when ``arrived`` is set."""

    def __init__(self) -> None:
        self.queue: list[Any] = []
        self.enable_staging = self.arrived = False

    def extend(self, entries: list[Any]) -> None:
        self.queue.extend(entries)

    def resolve_deferred_releases(self) -> None:
        """Defers nothing."""

    def has_pending_deferred_releases(self) -> bool:
        return False

    def pop_transferred(self) -> list[Any]:
        if not self.arrived:
            return []
        done, self.queue = [entry.req for entry in self.queue], []
        return done


def new_request(rid: str, tokens: int) -> Any:
    """Returns an entry of the preallocation queue, past its handshake."""
    req = made_request(rid, tokens, max_new=64)
    req.time_stats = timeless()
    return new_entry(req)


def new_entry(req: Any) -> Any:
    """Returns an entry for ``req``."""
    receiver = SimpleNamespace(send_metadata=Recorder(), init=Recorder(), conclude_state=None)
    return SimpleNamespace(
        req=req, is_rebootstrap=False, waiting_for_input=True, prefix_match=None, metadata_buffer_index=-1,
        host_staged=False, kv_receiver=receiver,
    )  # fmt: skip


def timeless() -> SimpleNamespace:
    return SimpleNamespace(**{name: lambda *_: None for name in TIMES})


class Server(World):
    """Runs the engine's own pass over the decode queues."""

    def __init__(self, refuse: str | None = None, swa_pages: int = 64) -> None:
        super().__init__(PoolSpec(pages=64, swa_pages=swa_pages, requests=32), refuse=refuse)
        rows = self.table.req_to_token.shape[0]
        self.table.req_to_token = torch.zeros((rows, 20000), dtype=torch.int32)
        self.transfers = Transfers()
        self.scheduler.disagg_decode_transfer_queue = self.queue.transfer_queue = self.transfers
        self.scheduler.enable_decode_hicache = False
        self.queue.num_reserved_decode_tokens = RESERVED
        buffers = list(range(64))
        self.queue.req_to_metadata_buffer_idx_allocator = SimpleNamespace(
            available_size=lambda: len(buffers), alloc=buffers.pop, free=buffers.append
        )
        self.queue._send_kv_metadata = lambda *_, **__: None
        self.queue.kv_manager.kv_args = SimpleNamespace(state_types=[])
        self.queue._resolve_pending_reqs = lambda: None
        self.queue._update_handshake_waiters = lambda *_: None

    def _enqueue(self, req: Any, is_rebootstrap: bool = False) -> Any:
        entry = new_entry(super()._enqueue(req, is_rebootstrap).req)
        entry.is_rebootstrap, entry.waiting_for_input = is_rebootstrap, False
        self.queue.queue[-1] = entry
        return entry

    def shake_hands(self) -> None:
        """Ends all handshakes with prefill servers."""
        for entry in self.queue.queue:
            entry.waiting_for_input = True

    def step(self) -> None:
        """Runs one pass of the event loop over the queues."""
        self.scheduler.process_decode_queue()

    def grow(self, req: Any, tokens: int) -> bool:
        """Decodes so many tokens; False when there is no page."""
        have = req.seqlen - 1
        if -(-(have + tokens) // PAGE) - -(-have // PAGE) > self.allocator.full_available_size() // PAGE:
            return False
        self._decode(req, have, tokens)
        req.output_ids.extend([5] * tokens)
        self._evict_window(req, have + tokens)
        return True
