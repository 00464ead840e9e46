"""Lets a prefill server send cached pages before its next forward, behind all that writes them.

The engine sends a request's cached prefix when it launches the forward behind it, the chunk before included, and passes
on an event behind the forwards so far. Mooncake's worker waits for it; NIXL's is never told: where the card is behind
the host, the decode server gets pages from before the write. Here the page numbers carry the event to NIXL's worker.
Pages that a session brought back in this pass are behind it, too, once the forwards' stream is behind their load.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_dsv4.engine.hooks import passed
from sglang_dsv4.engine.releases import engine_release


def switch() -> Any:
    """Returns the engine's variable of the early send."""
    from sglang.srt.environ import envs  # noqa: PLC0415

    return envs.SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX


class _Pages(np.ndarray):
    """Carries the page numbers of a piece. written: the event behind which the pages are, or None."""

    written: Any = None


class _Pieces:
    """Gives the pieces of a worker's queue when their pages are written."""

    def __init__(self, queue: Any) -> None:
        self._queue, self.put = queue, queue.put

    def get(self) -> Any:
        """Waits for the next piece, and for its pages."""
        piece = self._queue.get()
        event = getattr(piece.prefill_kv_indices, "written", None)
        if event is not None:
            event.synchronize()
            piece.prefill_kv_indices = piece.prefill_kv_indices.view(np.ndarray)
        return piece


def add_transfer_request(
    original: Any, manager: Any, bootstrap_room: int, kv_indices: Any, *args: Any, **kwargs: Any
) -> Any:
    """Runs AROUND NixlKVManager.add_transfer_request, on the scheduler's thread."""
    event = passed(original, "wait_event", manager, bootstrap_room, kv_indices, *args, **kwargs)
    if event is not None:
        kv_indices = np.asarray(kv_indices).view(_Pages)
        kv_indices.written = event
    return original(manager, bootstrap_room, kv_indices, *args, **kwargs)


def transfer_worker(original: Any, manager: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs AROUND NixlKVManager.transfer_worker, on a worker's thread, which waits: whatever way a piece is sent."""
    return original(manager, _Pieces(queue), *args, **kwargs)


def send_what_was_loaded(original: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Sends the prefix of ``req`` in a pass that loaded pages, its own or another request's, perhaps among these.

    Where nobody waits for the event it is sent with the rest, behind the forward.
    """
    backend = scheduler.transfer_backend.value
    waits = backend == "mooncake" or (backend == "nixl" and engine_release().nixl_gets_the_event)
    if not (scheduler.enable_overlap and waits):
        return engine_release().keep_early_send(original, scheduler, req)
    scheduler.forward_stream.wait_stream(scheduler.schedule_stream)  # as the engine does before the forward
    return original(scheduler, req, *args, **kwargs)
