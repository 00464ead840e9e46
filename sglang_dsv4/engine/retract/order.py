"""Orders the steps where the engine takes a request out of the batch: a retract, or a preemption by priority.

    0. with online compression a retract begins with the result of the step in flight; a preemption has none, and a
       request whose step is in flight gets no copy (``save.reasons_of_request``)
    1. its HiSparse rows are detached: the engine's coordinator would free them before a copy could keep them
    2. a plain server saves its copy; on a decode server the engine asks for it, in 3 (``save.backup_kv_cache``), and
       with a store the last page end is kept, whose window no copy has
    3. the engine frees the request's pages and its slot, for good where it asks for no copy: the forward in flight may
       still write them (``pages_in_use``)
    4. with a copy, the inputs of its next drafts go to the host

A pause retracts by another way, and keeps nothing.

Of 0: with online compression a request's open block of 128 tokens is one state row, which each step writes in place.
With the overlap scheduler a step is still in flight at a retract: its row would be one token late beside the
n = seqlen - 1 tokens of a copy. Such a copy is valid bytes, so that DSV4_VERIFY cannot see it. Once the step's result
is taken, seqlen counts its token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dsv4.engine.decode import points
from sglang_dsv4.engine.hisparse import rows
from sglang_dsv4.engine.memory import host_of
from sglang_dsv4.engine.plain import serving
from sglang_dsv4.engine.retract import drafts
from sglang_dsv4.pools.copy_service import CopyService


def retract_decode(original: Callable[..., Any], batch: Any) -> Any:
    """Runs AROUND ScheduleBatch.retract_decode: the stream waits for the saves when all of them are enqueued."""
    host = host_of(batch.token_to_kv_pool_allocator)
    if host is None:
        return original(batch)
    if retract_averted(host, batch):
        from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import (  # noqa: PLC0415
            NewTokenRatioTracker,
        )

        return [], NewTokenRatioTracker.estimate_new_token_ratio_after_retract(batch.reqs), []
    with host.pages_in_use.one_retract():
        return original(batch)


def retract_averted(host: CopyService, batch: Any) -> bool:
    """Takes the step in flight where copies need it; returns whether the requests that it ended left memory enough.

    Ranks that retract together have the same queue and the same memory, so that each decides alike.
    """
    if not host.buffers.folded:
        return False
    short = not batch.check_decode_mem()
    host.context.take_results()
    batch.filter_batch()
    return batch.is_empty() or (short and bool(batch.check_decode_mem()))


def release_req(
    original: Callable[..., Any], batch: Any, idx: int, remaing_req_count: int, offload_kv: bool = True
) -> Any:
    """Runs AROUND ScheduleBatch.release_req."""
    with rows.detached(batch, idx):
        serving.save_retracted(batch, idx)
        points.keep_retracted(batch, idx)
        result = original(batch, idx, remaing_req_count, offload_kv)
    host = host_of(batch.token_to_kv_pool_allocator)
    drafts.keep_inputs(batch, idx, host is not None and host.context.steps_in_flight(batch.reqs[idx]) > 0)
    if host is not None and not offload_kv:  # a save gives pages away itself
        host.pages_in_use.record_writers()
    return result
