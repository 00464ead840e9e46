"""The queue's pass over what was retracted, the same on both lines, and what a request needs to be admitted by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dsv4.engine import recompute
from sglang_dsv4.engine.server import abort_waiting, host_of, room_of, take_arrived, take_stale
from sglang_dsv4.hostmem.memory import HostCopy


def resuming(
    copy_of: Callable[[Any], HostCopy | None],
    release: Callable[[Any], None],
    can_recompute: Callable[[Any, Any], bool],
) -> Callable[..., Any]:
    """The hook of a line that keeps, frees and replaces a request's copy so. can_recompute: (req, server_args)."""

    def resume_retracted_reqs(original: Callable[..., Any], queue: Any, rids_to_check: Any = None) -> Any:
        """AROUND DecodePreallocQueue.resume_retracted_reqs, which every step calls."""
        if not queue.retracted_queue and not queue.held_rebootstrap_reqs:
            return original(queue, rids_to_check)
        for req in take_stale(queue, copy_of):
            release(req)
            if can_recompute(req, queue.scheduler.server_args):
                queue.add(req, is_retracted=True)
            else:
                abort_waiting(queue, req)
        recompute.send_waiting(queue)
        resumed = original(queue, rids_to_check)
        if rids_to_check is None:  # else the ranks of a pipeline agree on what has arrived
            take_arrived(queue)
        return resumed

    return resume_retracted_reqs


def needing(copy_of: Callable[[Any], HostCopy | None]) -> Callable[..., Any]:
    """The hook of a line that keeps a request's copy so."""

    def prealloc_required_tokens(result: Any, queue: Any, req: Any) -> Any:
        """AFTER DecodePreallocQueue._prealloc_required_tokens: (full, SWA) tokens.

        Never less than their whole pages: 0.5.17 takes one such number after the other from what is free, and asserts
        that each allocation fits. Of a request with a copy never more than the pool has: what has grown to nearly all
        of it is more with the engine's reserve for decoding, and would wait for ever, with all that is behind it.
        """
        allocator = queue.token_to_kv_pool_allocator
        if host_of(allocator) is None:
            return None
        page = allocator.page_size
        most = room_of(allocator) if copy_of(req) is not None else result
        lengths = queue._prealloc_kv_lens(req)
        return tuple(
            max(-(-length // page) * page, min(tokens, room))
            for tokens, length, room in zip(result, lengths, most, strict=True)
        )

    return prealloc_required_tokens
