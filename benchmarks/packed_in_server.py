"""Notes the transfers of a server, a line each, and compares or wears down its pages. One line a transfer:

    room, kv               the request, and whether it is of its history (else of its window and states)
    descriptors, pieces    as the engine gives them, and as NIXL posts them, which merges neighbours
    build_ms, post_ms      the engine's thread, until all is described; the call that posts it
    wire_ms                from there to the first look that finds it done

Requests in odd rooms are compared: a checksum of their pages, region by region, from the sender when all has gone, and
from the receiver when it is told that all is there. A request whose name begins with CHURN wears the server's pages
down before it is served, until as many are left as the name says: requests without tokens come, grow page by page and
end in no order, through the allocator's own calls, which takes seconds where serving takes hours.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.in_server import around, note

CHURN = "churn-"
SIZES = {4: 0.3, 16: 0.4, 64: 0.2, 256: 0.1}  # pages of a made-up request, and how many are so long
GROWS, TURNS = 12, 300  # pages of growth, at most; turns of the wear of a pool of some thousand pages
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as int64
_MOST = 1 << 26  # bytes that are summed at once


class Transfers:
    """Notes the transfers of one server. Each of its sending threads has a request at a time."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.held: list[torch.Tensor] = []  # pages worn down
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._open: dict[int, tuple[float, dict[str, Any]]] = {}  # by handle: when it was posted, its note
        self._sent: dict[int, list[Any]] = defaultdict(list)  # pages of a room that is compared
        self._wanted: dict[int, Any] = {}  # pages of the same, where they arrive

    def write(self, **facts: Any) -> None:
        with self._lock:
            note(self.notes, **facts)

    def manager(self, original: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
        """Wraps NixlKVManager.__init__: its agent is listened to."""
        original(manager, *args, **kwargs)
        for name in ("make_prepped_xfer", "initialize_xfer", "transfer", "check_xfer_state"):
            around(manager.agent, name, getattr(self, name))

    def update_status(self, original: Any, manager: Any, room: int, status: Any) -> None:
        """Wraps NixlKVManager.update_status: notes this thread's transfer, and that all of it is there."""
        from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: PLC0415

        if status == KVPoll.Transferring:
            self._thread.room = room
        if status == KVPoll.Success and room in self._sent:  # nobody was told yet: the pages are still the request's
            self._compare(room, "sent", manager.kv_args, np.concatenate(self._sent.pop(room)))
        original(manager, room, status)

    def send(self, original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps NixlKVManager._send_kvcache_generic."""
        self._thread.kv = kwargs["src_data_ptrs"] is manager.kv_args.kv_data_ptrs
        self._thread.began = time.perf_counter()
        try:
            handle = original(manager, *args, **kwargs)
        finally:
            self._thread.began = None
        if self._thread.kv and self._thread.room % 2:
            self._sent[self._thread.room].append(np.array(kwargs["prefill_data_indices"]))
        return handle

    def make_prepped_xfer(self, original: Any, how: str, mine: Any, source: Any, theirs: Any, target: Any,
                          *args: Any, **kwargs: Any) -> Any:  # fmt: skip
        """Wraps the agent's method: prepared descriptors, by their number."""
        handle, built = original(how, mine, source, theirs, target, *args, **kwargs), time.perf_counter()
        return self._built(handle, built, len(source), pieces(source, target))

    def initialize_xfer(self, original: Any, how: str, mine: Any, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps the agent's method: descriptors made for this transfer, in which the engine has merged neighbours."""
        handle, built = original(how, mine, theirs, *args, **kwargs), time.perf_counter()
        return self._built(handle, built, mine.descCount(), mine.descCount())

    def _built(self, handle: Any, built: float, descriptors: int, posted: int) -> Any:
        began = getattr(self._thread, "began", None)
        facts = {
            "room": getattr(self._thread, "room", None), "kv": bool(began and self._thread.kv),
            "descriptors": descriptors, "pieces": posted, "build_ms": (built - (began or built)) * 1e3,
        }  # fmt: skip
        self._open[id(handle)] = 0.0, facts
        return handle

    def transfer(self, original: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        state, posted = original(handle, *args, **kwargs), time.perf_counter()
        if id(handle) in self._open:
            self._open[id(handle)] = posted, self._open[id(handle)][1] | {"post_ms": (posted - started) * 1e3}
        return state

    def check_xfer_state(self, original: Any, handle: Any) -> Any:
        """Wraps the agent's method: the first look that finds the transfer done ends the note."""
        state = original(handle)
        if state == "DONE" and id(handle) in self._open:
            posted, facts = self._open.pop(id(handle))
            self.write(**facts, wire_ms=(time.perf_counter() - posted) * 1e3)
        return state

    def send_metadata(self, original: Any, receiver: Any, kv_indices: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps NixlKVReceiver.send_metadata: the pages that it wants to have filled."""
        if receiver.bootstrap_room % 2:
            self._wanted[receiver.bootstrap_room] = np.array(kv_indices)
        return original(receiver, kv_indices, *args, **kwargs)

    def poll(self, original: Any, receiver: Any) -> Any:
        """Wraps NixlKVReceiver.poll: compares the pages before any write to them."""
        from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: PLC0415

        state, room = original(receiver), receiver.bootstrap_room
        if state == KVPoll.Success and room in self._wanted:
            self._compare(room, "arrived", receiver.kv_mgr.kv_args, self._wanted.pop(room))
        return state

    def _compare(self, room: int, side: str, kv_args: Any, pages: Any) -> None:
        checksum = hashlib.sha256(page_sums(kv_args, pages).tobytes()).hexdigest()[:16]
        self.write(room=room, side=side, pages=len(pages), checksum=checksum)

    def handle_generate_request(self, original: Any, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps Scheduler.handle_generate_request."""
        if str(request.rid).startswith(CHURN):
            leave = int(request.rid.split("-")[1])
            pages = scheduler.token_to_kv_pool_allocator.full_attn_allocator
            self.held += churn(pages, leave, leave)
            self.write(churned=True, free=pages.available_size() // pages.page_size)
        return original(scheduler, request, *args, **kwargs)


def pieces(source: Any, target: Any) -> int:
    """Returns the pieces of a transfer once neighbours on both sides are merged."""
    source, target = np.asarray(source), np.asarray(target)
    return 1 + int(((np.diff(source) != 1) | (np.diff(target) != 1)).sum()) if len(source) else 0


def page_sums(kv_args: Any, pages: Any) -> Any:
    """Returns int64 ``[regions, pages]``, sums over the bytes of each of ``pages`` in each region that a transfer
    moves.

    Each word counts with its place in the page, so that one that is wrong, or elsewhere, shows.
    """
    found = np.zeros((len(kv_args.kv_data_ptrs), len(pages)), dtype=np.int64)
    regions = zip(kv_args.kv_data_ptrs, kv_args.kv_data_lens, kv_args.kv_item_lens, strict=True)
    for number, (address, length, page_bytes) in enumerate(regions):
        memory = _memory(address, length, kv_args.gpu_id).view(-1, page_bytes)
        where = torch.as_tensor(np.asarray(pages, dtype=np.int64), device=memory.device)
        weights = torch.arange(page_bytes // 8, device=memory.device) * _MIX | 1
        for first in range(0, len(where), most := max(1, _MOST // page_bytes)):
            words = memory[where[first : first + most]].view(torch.int64)
            found[number, first : first + most] = (words * weights).sum(1).cpu().numpy()
    return found


def _memory(address: int, length: int, gpu: int) -> torch.Tensor:
    """Returns ``length`` bytes at ``address``, not owned: of the GPU, or of the host where there is none."""
    if not torch.cuda.is_available():
        return torch.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype=torch.uint8)
    torch.cuda.set_device(gpu)  # of this thread
    array = type("Array", (), {"__cuda_array_interface__": {
        "shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3,
    }})  # fmt: skip
    return torch.as_tensor(array(), device=f"cuda:{gpu}")


@dataclass(eq=False)
class _Request:
    slots: list[torch.Tensor]
    pages: int
    turns: int  # that are left, each of which brings a page where there is room


def churn(pages: Any, leave: int, seed: int, turns: int = TURNS) -> list[torch.Tensor]:
    """Wears ``pages``, an allocator of full pages, down until ``leave`` are free; returns the held slots."""
    draw, live = random.Random(seed), list[_Request]()
    for _ in range(turns):
        while _free(pages) - (size := draw.choices([*SIZES], [*SIZES.values()])[0]) >= leave:
            live.append(_Request([_extend(pages, size)], size, draw.randint(1, GROWS)))
        turn = [request for request in live if draw.random() < 0.2]
        for request in turn:
            request.turns -= 1
        growing = turn[: max(0, _free(pages) - leave)]
        for request, slots in zip(growing, _grow(pages, growing), strict=True):
            request.slots.append(slots)
            request.pages += 1
        for request in turn:
            if not request.turns:
                pages.free(torch.cat(request.slots))
                live.remove(request)
    return [slots for request in live for slots in request.slots]


def _free(pages: Any) -> int:
    return int(pages.available_size() // pages.page_size)


def _extend(pages: Any, size: int) -> torch.Tensor:
    """Returns the slots of a new request of ``size`` pages."""
    tokens = size * pages.page_size
    nothing, length = torch.zeros(1, dtype=torch.int64), torch.tensor([tokens])
    last = torch.tensor([-1], device=pages.device)
    slots: torch.Tensor = pages.alloc_extend(
        nothing.to(pages.device), nothing, length.to(pages.device), length, last, tokens
    )
    return slots


def _grow(pages: Any, growing: list[_Request]) -> list[torch.Tensor]:
    """Returns the slots of one page more for each of ``growing``."""
    if not growing:
        return []
    lengths = torch.tensor([request.pages * pages.page_size + 1 for request in growing])
    last = torch.stack([request.slots[-1][-1] for request in growing])
    first: torch.Tensor = pages.alloc_decode(lengths.to(pages.device), lengths, last)
    return list(first[:, None] + torch.arange(pages.page_size, device=pages.device))


def install(notes: Path) -> None:
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver  # noqa: PLC0415
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415
    from sglang.srt.managers.scheduler_components.invariant_checker import (  # noqa: PLC0415
        SchedulerInvariantChecker,
    )

    found = Transfers(notes)
    around(NixlKVManager, "__init__", found.manager)
    around(NixlKVManager, "update_status", found.update_status)
    around(NixlKVManager, "_send_kvcache_generic", found.send)
    around(NixlKVReceiver, "send_metadata", found.send_metadata)
    around(NixlKVReceiver, "poll", found.poll)
    around(Scheduler, "handle_generate_request", found.handle_generate_request)
    # Held pages belong to no request, which an idle server would call a leak.
    around(SchedulerInvariantChecker, "_check_full_pool", lambda *_, **__: (False, ""))
