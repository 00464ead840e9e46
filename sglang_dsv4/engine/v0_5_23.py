"""SGLang 0.5.22 and later.

The copy is kept in ``req.kv.retraction_backup.cpu_tensors``. The engine declares that no DeepSeek-V4 pool keeps
a host copy and sends every retracted request back to prefill; the hooks give the requests that have one the
path that the engine has for other pools. Only for the backup choice ``cpu_tensor``: ``none`` keeps meaning abort
and ``host_pool`` is the engine's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sglang_dsv4.engine import recompute, server
from sglang_dsv4.engine.resume import needing, resuming
from sglang_dsv4.engine.server import (
    contains,
    host_of,
    may_copy,
    save_or_fall_back,
)
from sglang_dsv4.hostmem.memory import HostCopy

logger = logging.getLogger(__name__)
Original = Callable[..., Any]

# Set while a request with a copy is queued: the engine's question has no request in it.
_has_copy: ContextVar[bool] = ContextVar("dsv4_has_copy", default=False)


def copy_of(req: Any) -> HostCopy | None:
    """The request's host copy."""
    backup = req.kv.retraction_backup
    copy = backup.cpu_tensors if backup is not None else None
    return copy if isinstance(copy, HostCopy) else None


def release(req: Any) -> None:
    """Release and forget the request's host copy."""
    copy = copy_of(req)
    if copy is not None:
        copy.release()
        req.kv.retraction_backup = None


def attach(result: Any, queue: Any, *_: Any, **__: Any) -> None:
    """AFTER DecodePreallocQueue.__init__: no host memory is reserved for a backup choice that makes no copies."""
    from sglang.srt.runtime_context import get_disagg  # noqa: PLC0415

    choice = get_disagg().disaggregation_decode_retraction_backup
    if choice == "cpu_tensor":
        server.attach(result, queue)
    else:
        logger.info("retraction backup is %s: no host copies", choice)


def backup_kv_cache(
    original: Original,
    req: Any,
    tree_cache: Any,
    req_to_token_pool: Any,
    token_to_kv_pool_allocator: Any,
    backend: str,
) -> bool:
    """AROUND mem_cache.common.backup_kv_cache."""
    host = host_of(token_to_kv_pool_allocator)
    if backend == "cpu_tensor" and host is not None and may_copy(host, req):
        release(req)
        if save_or_fall_back(host, lambda: req.offload_kv_cache(req_to_token_pool, token_to_kv_pool_allocator)):
            return True
    return bool(original(req, tree_cache, req_to_token_pool, token_to_kv_pool_allocator, backend))


def retract_decode(batch: Any, *_: Any, **__: Any) -> None:
    """BEFORE ScheduleBatch.retract_decode: the last request is aborted without a save, perhaps right after its resume.

    Every other retract saves on the stream of the loads, and waits for it.
    """
    server.settle(batch.token_to_kv_pool_allocator)


def dsv4_needs_rebootstrap(original: Original, token_to_kv_pool_allocator: Any) -> bool:
    """AROUND mem_cache.common.dsv4_needs_rebootstrap."""
    return False if _has_copy.get() else bool(original(token_to_kv_pool_allocator))


def add(original: Original, queue: Any, req: Any, is_retracted: bool = False, is_rebootstrap: bool = False) -> None:
    """AROUND DecodePreallocQueue.add: with a copy, the request keeps its boundary token and waits for memory."""
    host = host_of(queue.token_to_kv_pool_allocator)
    if host is not None and is_rebootstrap:
        recompute.send_back(req)
    if host is None or not is_retracted:
        original(queue, req, is_retracted=is_retracted, is_rebootstrap=is_rebootstrap)
        return
    if copy_of(req) is None:
        req.time_stats.set_retract_time()
        recompute.hold(queue, req)
        return
    token = _has_copy.set(True)
    try:
        original(queue, req, is_retracted=True)
    finally:
        _has_copy.reset(token)
    if not contains(queue.retracted_queue, req):
        release(req)  # the engine refused the request


def can_recompute(req: Any, server_args: Any) -> bool:
    """Whether the prefill server can compute its cache again: the engine sends back all but multimodal ones."""
    return req.multimodal_inputs is None


resume_retracted_reqs = resuming(copy_of, release, can_recompute)
prealloc_required_tokens = needing(copy_of)


def discard_kv_cache_backup(original: Original, req: Any, tree_cache: Any, backend: str) -> None:
    """AROUND mem_cache.common.discard_kv_cache_backup."""
    release(req)
    original(req, tree_cache, backend)


def handle_pd_role_switch(original: Original, scheduler: Any, recv_req: Any) -> Any:
    """AROUND Scheduler.handle_pd_role_switch: not while a request is held for its recompute.

    The engine asks whether it is idle, does not look there, and the queue ends with the role.
    """
    from sglang.srt.managers.io_struct import PdRoleSwitchReqOutput  # noqa: PLC0415

    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    role = scheduler.disaggregation_mode.value
    held = queue.held_rebootstrap_reqs if queue is not None else []
    if not held or recv_req.new_role.lower() == role or host_of(queue.token_to_kv_pool_allocator) is None:
        return original(scheduler, recv_req)
    message = f"instance is not idle; {len(held)} requests are held for their recompute"
    logger.warning("role switch rejected (%s to %s): %s", role, recv_req.new_role, message)
    return PdRoleSwitchReqOutput(
        success=False, message=message, old_role=role, new_role=recv_req.new_role, safe_to_restore=True
    )


def layout_refusal(pool: Any) -> str | None:
    """What only this line can tell of a pool: V4.1 layouts, request windows, draft rings."""
    if pool.uniform_fp8:
        return "uniform fp8 rows (trtllm attention)"
    if pool.kv_layout.value != "v4":
        return f"KV layout {pool.kv_layout.value}"
    if pool.request_window is not None:
        return "request_window keeps the SWA rows by request"
    # 0.5.22 has no such rings, hence no such attributes.
    if any(getattr(pool, name, None) is not None for name in ("swa_valid_from", "swa_req_ring_size")):
        return "draft SWA ring"
    return None
