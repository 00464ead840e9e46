"""What a server puts on the wire for a request, and what it takes to post it. One JSON line a transfer:

    room, kv               the request, and whether it is of its history (else of its window and states)
    descriptors, pieces    as the engine gives them, and as NIXL posts them, which merges neighbours
    build_ms, post_ms      the engine's thread, until all is described; the call that posts it
    wire_ms                from there to the first look that finds it done

Requests in odd rooms are compared: sums of their pages, region by region, from four looks, each a line and a file of
sums. The sender looks right after a piece is posted (*posted*) and when all has gone (*sent*), the receiver when it is
told that all is there (*arrived*) and LATER seconds after that (*later*). A request whose name begins with CHURN wears
the server's pages down before it is served (see ``churn``): the name says how many pages to leave, and how long to do
so. The search for runs of pages is noted, too: ``order_ms`` of the scheduler's thread. With LAG_MS the card gets to
the LAST layers of each of a prefill server's forwards so much later, which a larger model's would do by itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.packed.timed_transfers.churn import STEPS, churn
from benchmarks.stall.timed_retracts.switch import Around, around

FILE = "TIMED_TRANSFERS_FILE"
LAG_MS = "TIMED_TRANSFERS_LAG_MS"
CHURN = "churn-"
LATER = 0.05  # seconds
LAST = 4  # layers: few enough kernels that the driver takes all of them while the card stands still
_CYCLES = 2_000_000  # of the card, at most, in a millisecond
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as int64
_MOST = 1 << 26  # bytes that are summed at once


def churned(leave: int, name: str, steps: int = STEPS) -> str:
    """The name of a request that wears a server's pages down; each ``name`` once."""
    return f"{CHURN}{leave}-{steps}-{name}"


def is_compared(room: int) -> bool:
    """Whether a request in ``room`` is compared."""
    return room % 2 == 1


class Transfers:
    """The transfers of one server. Each of its sending threads has a request at a time."""

    def __init__(self, out: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self.out, self.clock = out, clock
        self.held: list[torch.Tensor] = []  # pages worn down
        self._writes = threading.Lock()
        self._thread = threading.local()
        self._open: dict[int, tuple[float, dict[str, Any]]] = {}  # by handle: when it was posted, its note
        self._sent: dict[int, list[Any]] = defaultdict(list)  # pages of a room that is compared
        self._posted: dict[int, list[Any]] = defaultdict(list)  # and their sums when they were posted
        self._wanted: dict[int, Any] = {}  # pages of the same, where they arrive

    def write(self, **note: Any) -> None:
        """A line."""
        with self._writes, self.out.open("a") as out:
            out.write(json.dumps(note) + "\n")

    # ------------------------------------------------------------------------------- what the sender does

    def manager(self, original: Around, manager: Any, *args: Any, **kwargs: Any) -> None:
        """Around NixlKVManager.__init__: its agent is listened to."""
        original(manager, *args, **kwargs)
        for name in ("make_prepped_xfer", "initialize_xfer", "transfer", "check_xfer_state"):
            around(manager.agent, name, getattr(self, name))

    def update_status(self, original: Around, manager: Any, room: int, status: Any) -> None:
        """Around NixlKVManager.update_status: whose transfer this thread makes, and that all of it is there."""
        from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: PLC0415

        if status == KVPoll.Transferring:
            self._thread.room = room
        if status == KVPoll.Success and room in self._sent:  # nobody was told yet: the pages are still the request's
            pages = np.concatenate(self._sent.pop(room))
            self._keep(room, "posted", pages, np.concatenate(self._posted.pop(room), axis=1))
            self._keep(room, "sent", pages, page_sums(manager.kv_args, pages))
        original(manager, room, status)

    def send(self, original: Around, manager: Any, *args: Any, **kwargs: Any) -> Any:
        """Around NixlKVManager._send_kvcache_generic."""
        self._thread.kv = kwargs["src_data_ptrs"] is manager.kv_args.kv_data_ptrs
        room = self._thread.room
        self._thread.began = self.clock()
        try:
            handle = original(manager, *args, **kwargs)
        finally:
            self._thread.began = None
        if self._thread.kv and is_compared(room):
            pages = np.array(kwargs["prefill_data_indices"])
            self._sent[room].append(pages)
            self._posted[room].append(page_sums(manager.kv_args, pages))
        return handle

    def make_prepped_xfer(self, original: Around, how: str, mine: Any, source: Any, theirs: Any, target: Any,
                          *args: Any, **kwargs: Any) -> Any:  # fmt: skip
        """Around the agent's: prepared descriptors, by their number."""
        handle, built = original(how, mine, source, theirs, target, *args, **kwargs), self.clock()
        return self._built(handle, built, len(source), pieces(source, target))

    def initialize_xfer(self, original: Around, how: str, mine: Any, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the agent's: descriptors made for this transfer, in which the engine has merged neighbours."""
        handle, built = original(how, mine, theirs, *args, **kwargs), self.clock()
        return self._built(handle, built, mine.descCount(), mine.descCount())

    def _built(self, handle: Any, built: float, descriptors: int, posted: int) -> Any:
        began = getattr(self._thread, "began", None)
        note = {"room": getattr(self._thread, "room", None), "kv": bool(began and self._thread.kv),
                "descriptors": descriptors, "pieces": posted, "build_ms": (built - (began or built)) * 1e3}  # fmt: skip
        self._open[id(handle)] = 0.0, note
        return handle

    def transfer(self, original: Around, handle: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the agent's: posts it."""
        started = self.clock()
        state, posted = original(handle, *args, **kwargs), self.clock()
        if id(handle) in self._open:
            note = self._open[id(handle)][1]
            self._open[id(handle)] = posted, note | {"post_ms": (posted - started) * 1e3}
        return state

    def check_xfer_state(self, original: Around, handle: Any) -> Any:
        """Around the agent's: the first look that finds it done ends the note."""
        state = original(handle)
        if state == "DONE" and id(handle) in self._open:
            posted, note = self._open.pop(id(handle))
            self.write(**note, wire_ms=(self.clock() - posted) * 1e3)
        return state

    # ------------------------------------------------------------------------------- what the receiver does

    def send_metadata(self, original: Around, receiver: Any, kv_indices: Any, *args: Any, **kwargs: Any) -> Any:
        """Around NixlKVReceiver.send_metadata: the pages that it wants to have filled."""
        if is_compared(receiver.bootstrap_room):
            self._wanted[receiver.bootstrap_room] = np.array(kv_indices)
        return original(receiver, kv_indices, *args, **kwargs)

    def poll(self, original: Around, receiver: Any) -> Any:
        """Around NixlKVReceiver.poll: compared before anybody writes to the pages."""
        from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: PLC0415

        state, room = original(receiver), receiver.bootstrap_room
        if state == KVPoll.Success and room in self._wanted:
            pages, kv_args = self._wanted.pop(room), receiver.kv_mgr.kv_args
            self._keep(room, "arrived", pages, page_sums(kv_args, pages))
            time.sleep(LATER)
            self._keep(room, "later", pages, page_sums(kv_args, pages))
        return state

    def _keep(self, room: int, side: str, pages: Any, sums: Any) -> None:
        file = self.out.with_name(f"{self.out.stem}-{room}-{side}.npy")
        np.save(file, sums)
        checksum = hashlib.sha256(sums.tobytes()).hexdigest()[:16]
        runs = pieces(pages, pages)
        self.write(room=room, side=side, pages=len(pages), runs=runs, checksum=checksum, sums=str(file))

    # ------------------------------------------------------------------------------- both

    def forward(self, original: Around, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Around DeepseekV4Model.forward, where the prefill server lags.

        The driver lets the host be about a thousand kernels ahead. Held before its first layer, the card would hold the
        host, too, and have caught up with it by the end of the launch.
        """
        cycles = int(float(os.environ[LAG_MS]) * _CYCLES)
        held = model.layers[model.end_layer - LAST].register_forward_pre_hook(lambda *_: torch.cuda._sleep(cycles))
        try:
            return original(model, *args, **kwargs)
        finally:
            held.remove()
            self.write(lagged=True)

    def handle_generate_request(self, original: Around, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Around Scheduler.handle_generate_request."""
        if str(request.rid).startswith(CHURN):
            leave, steps = map(int, request.rid.split("-")[1:3])
            pages = scheduler.token_to_kv_pool_allocator.full_attn_allocator
            self.held += churn(pages, leave, leave, steps)
            self.write(churned=True, free=pages.available_size() // pages.page_size)
        return original(scheduler, request, *args, **kwargs)


def pieces(source: Any, target: Any) -> int:
    """Of so many pieces is a transfer once neighbours on both sides are merged."""
    source, target = np.asarray(source), np.asarray(target)
    if not len(source):
        return 0
    return 1 + int(((np.diff(source) != 1) | (np.diff(target) != 1)).sum())


def page_sums(kv_args: Any, pages: Any) -> Any:
    """int64 ``[regions, pages]``: of the bytes of each of ``pages`` in each region that a transfer moves.

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
    """``length`` bytes at ``address``, not owned: of the GPU, or of the host where there is none."""
    if not torch.cuda.is_available():
        return torch.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype=torch.uint8)
    torch.cuda.set_device(gpu)  # of this thread
    array = type("Array", (), {"__cuda_array_interface__": {
        "shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3,
    }})  # fmt: skip
    return torch.as_tensor(array(), device=f"cuda:{gpu}")


def install(transfers: Transfers | None = None, put: Callable[[Any, str, Around], None] = around) -> None:
    """Into this process."""
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver  # noqa: PLC0415
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415
    from sglang.srt.managers.scheduler_components.invariant_checker import (  # noqa: PLC0415
        SchedulerInvariantChecker,
    )

    found = transfers or Transfers(Path(os.environ[FILE]))
    put(NixlKVManager, "__init__", found.manager)
    put(NixlKVManager, "update_status", found.update_status)
    put(NixlKVManager, "_send_kvcache_generic", found.send)
    put(NixlKVReceiver, "send_metadata", found.send_metadata)
    put(NixlKVReceiver, "poll", found.poll)
    put(Scheduler, "handle_generate_request", found.handle_generate_request)
    if LAG_MS in os.environ:
        from sglang.srt.models.deepseek_v4 import DeepseekV4Model  # noqa: PLC0415

        put(DeepseekV4Model, "forward", found.forward)
    # Held pages belong to no request, which an idle server would call a leak.
    put(SchedulerInvariantChecker, "_check_full_pool", lambda *_, **__: (False, ""))
