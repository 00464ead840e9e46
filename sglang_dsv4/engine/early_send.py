"""Lets NIXL's worker wait for the forward that writes the pages which it sends.

Before it launches a chunk the engine sends its pages of the prompt, the chunk before included, and passes an event of
that chunk's forward along. Mooncake's worker waits for it; NIXL's is never told. Where the card is behind the host, the
decode server gets pages from before the write. Here the page numbers carry the event to NIXL's worker.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_dsv4.engine.hooks import passed


def switch() -> Any:
    """Returns the engine's variable of the early send."""
    from sglang.srt.environ import envs  # noqa: PLC0415

    return envs.SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX


class _Pages(np.ndarray):
    """Carries the page numbers of a piece. written: the event behind which the pages are, or None."""

    written: Any = None

    def __array_finalize__(self, of: Any) -> None:
        self.written = getattr(of, "written", None)


def add_transfer_request(
    original: Any, manager: Any, bootstrap_room: int, kv_indices: Any, *args: Any, **kwargs: Any
) -> Any:
    """Runs AROUND NixlKVManager.add_transfer_request, on the scheduler's thread."""
    event = passed(original, "wait_event", manager, bootstrap_room, kv_indices, *args, **kwargs)
    if event is not None:
        kv_indices = np.asarray(kv_indices).view(_Pages)
        kv_indices.written = event
    return original(manager, bootstrap_room, kv_indices, *args, **kwargs)


def send_kvcache(
    original: Any, manager: Any, peer_name: str, prefill_kv_indices: Any, *args: Any, **kwargs: Any
) -> Any:
    """Runs AROUND NixlKVManager.send_kvcache, on a worker's thread, which waits."""
    event = getattr(prefill_kv_indices, "written", None)
    if event is not None:
        event.synchronize()
        prefill_kv_indices = prefill_kv_indices.view(np.ndarray)
    return original(manager, peer_name, prefill_kv_indices, *args, **kwargs)
