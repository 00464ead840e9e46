"""SGLang 0.5.22 and later declares that no DeepSeek-V4 pool keeps a host copy, and recomputes each retracted request.

The copy is kept in ``req.kv.retraction_backup.cpu_tensors``. The requests that have one take the path that the engine
has for other pools. Only for the backup choice ``cpu_tensor``: ``none`` keeps meaning abort and ``host_pool`` is the
engine's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from sglang_dsv4.engine import canary, recompute
from sglang_dsv4.engine.attach import backup_refusal, host_of
from sglang_dsv4.engine.prealloc_queue import PreallocQueue as _PreallocQueue
from sglang_dsv4.engine.saving import one_retract, save
from sglang_dsv4.engine.weight_updater import WeightUpdater as _WeightUpdater
from sglang_dsv4.engine.weights import changing_weights
from sglang_dsv4.hostmem.memory import HostCopy

logger = logging.getLogger(__name__)
Original = Callable[..., Any]


def copy_of(req: Any) -> HostCopy | None:
    """The request's host copy."""
    backup = req.kv.retraction_backup
    copy = backup.cpu_tensors if backup is not None else None
    return copy if isinstance(copy, HostCopy) else None


def drop_copy(req: Any) -> None:
    """Release and forget the request's host copy."""
    copy = copy_of(req)
    if copy is not None:
        copy.release()
        req.kv.retraction_backup = None


def backup_kv_cache(
    original: Original,
    req: Any,
    tree_cache: Any,
    req_to_token_pool: Any,
    token_to_kv_pool_allocator: Any,
    backend: str,
) -> bool:
    """AROUND mem_cache.common.backup_kv_cache."""
    if backend == "cpu_tensor" and host_of(token_to_kv_pool_allocator) is not None:
        from sglang.srt.mem_cache.common import RetractionBackup  # noqa: PLC0415

        drop_copy(req)
        # seqlen - 1 and not kv_committed_len: with overlap that one already counts the token in flight.
        slots = req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.seqlen - 1]
        copy = save(token_to_kv_pool_allocator.get_kvcache(), req, slots, req.kv.req_pool_idx)
        if copy is not None:
            req.kv.retraction_backup = RetractionBackup(cpu_tensors=copy)
            # The prefill server's digest was checked when the request began to decode; its last page has grown since.
            # 0.5.22 would compare again at the resume, and abort; 0.5.23 forgets the digest after one look.
            req.expected_kv_checksum = 0
            return True
    return bool(original(req, tree_cache, req_to_token_pool, token_to_kv_pool_allocator, backend))


def retract_decode(original: Original, batch: Any) -> Any:
    """AROUND ScheduleBatch.retract_decode."""
    with one_retract(batch.token_to_kv_pool_allocator):
        return original(batch)


def commit_transfer_to_req(original: Original, queue: Any, decode_req: Any) -> Any:
    """AROUND DecodeTransferQueue._commit_transfer_to_req."""
    recompute.remember_rank(decode_req)
    return original(queue, decode_req)


class PreallocQueue(_PreallocQueue):
    """Copies are made for the backup choice cpu_tensor alone."""

    def reserve_host_memory(self) -> None:
        """See the base."""
        from sglang.srt.runtime_context import get_disagg  # noqa: PLC0415

        choice = get_disagg().disaggregation_decode_retraction_backup
        if backup_refusal(choice) is None:
            super().reserve_host_memory()
        else:
            logger.info("retraction backup is %s: no host copies", choice)

    def copy_of(self, req: Any) -> HostCopy | None:
        """See the base."""
        return copy_of(req)

    def drop_copy(self, req: Any) -> None:
        """See the base."""
        drop_copy(req)

    def can_recompute(self, req: Any) -> bool:
        """The engine sends back all but multimodal ones."""
        return req.multimodal_inputs is None


class WeightUpdater(_WeightUpdater):
    """Weights can also be written from outside, between these two calls."""

    @override
    def begin_weight_update(self, recv_req: Any) -> Any:
        with changing_weights():
            return super().begin_weight_update(recv_req)

    @override
    def end_weight_update(self, recv_req: Any) -> Any:
        with changing_weights():
            return super().end_weight_update(recv_req)


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


def place_of(req: Any) -> Any:
    """What has the request's slot and its committed length."""
    return req.kv


def layout_refusal(pool: Any) -> str | None:
    """What only this line can tell of a pool: uniform rows, request windows, draft rings; and a canary beside it."""
    if pool.uniform_fp8:
        return "uniform fp8 rows (trtllm attention)"
    if pool.request_window is not None:
        return "request_window keeps the SWA rows by request"
    # 0.5.22 has no such rings, hence no such attribute. (swa_valid_from is copied: paged DSpark drafts have it too.)
    if getattr(pool, "swa_req_ring_size", None) is not None:
        return "draft SWA ring"
    return canary.refusal()
