"""SGLang 0.5.17.

The copy is kept in ``req.kv_cache_cpu``. The engine passes no request slot to the pool, and has no behaviour for
a retracted request without a copy: one that its prefill server can compute again is sent back there, through the
engine's own rebootstrap, which loses nothing; the others (multimodal and embeddings, as the payload has token ids only,
and those of the fake transfer, which has no prefill server) are aborted with 503.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang_dsv4.engine import recompute
from sglang_dsv4.engine.resume import needing, resuming
from sglang_dsv4.engine.server import (
    NO_COPY,
    contains,
    drain,
    host_of,
    keeps_its_tokens,
    may_copy,
    save_or_fall_back,
    without,
)
from sglang_dsv4.hostmem.memory import HostCopy

Original = Callable[..., Any]


def copy_of(req: Any) -> HostCopy | None:
    """The request's host copy."""
    copy = getattr(req, "kv_cache_cpu", None)
    return copy if isinstance(copy, HostCopy) else None


def release(req: Any) -> None:
    """Release and forget the request's host copy."""
    copy = copy_of(req)
    if copy is not None:
        copy.release()
        del req.kv_cache_cpu


def _slots(req: Any, req_to_token_pool: Any) -> Any:
    # seqlen - 1 and not kv_committed_len: with overlap that one already counts the token in flight.
    return req_to_token_pool.req_to_token[req.req_pool_idx, : req.seqlen - 1]


def offload_kv_cache(original: Original, req: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any) -> None:
    """AROUND Req.offload_kv_cache."""
    host = host_of(token_to_kv_pool_allocator)
    if host is None:
        original(req, req_to_token_pool, token_to_kv_pool_allocator)
        return
    release(req)
    if not may_copy(host, req):
        drain(host)
        return

    def save() -> None:
        req.kv_cache_cpu = token_to_kv_pool_allocator.get_kvcache().get_cpu_copy(
            _slots(req, req_to_token_pool), req_pool_index=req.req_pool_idx
        )

    save_or_fall_back(host, save)


def load_kv_cache(original: Original, req: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any) -> None:
    """AROUND Req.load_kv_cache."""
    if host_of(token_to_kv_pool_allocator) is None:
        original(req, req_to_token_pool, token_to_kv_pool_allocator)
        return
    token_to_kv_pool_allocator.get_kvcache().load_cpu_copy(
        req.kv_cache_cpu, _slots(req, req_to_token_pool), req_pool_index=req.req_pool_idx
    )
    del req.kv_cache_cpu


def can_recompute(req: Any, server_args: Any) -> bool:
    """Whether the request's prefill server can compute its cache again."""
    from sglang.srt.disaggregation.utils import _is_fake_transfer  # noqa: PLC0415

    by_tokens = (  # what the recompute payload can carry
        req.multimodal_inputs is None
        and req.lora_id is None
        and req.positional_embed_overrides is None
        and keeps_its_tokens(req)
    )
    return by_tokens and not _is_fake_transfer(req, server_args)


def retract_decode(result: Any, batch: Any, server_args: Any, *_: Any, **__: Any) -> Any:
    """AFTER ScheduleBatch.retract_decode: (retracted, ratio, to abort)."""
    retracted, ratio, to_abort = result
    if server_args.disaggregation_mode != "decode" or host_of(batch.token_to_kv_pool_allocator) is None:
        return None
    for req in to_abort:
        release(req)  # the engine saves the last request too, aborts it, and never deletes its copy
    lost = [req for req in retracted if copy_of(req) is None and not can_recompute(req, server_args)]
    for req in lost:
        req.to_finish = _finish_abort()(NO_COPY, status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    return without(retracted, lost), ratio, [*to_abort, *lost]


def _finish_abort() -> Any:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415

    return FINISH_ABORT


def add(original: Original, queue: Any, req: Any, is_retracted: bool = False, is_rebootstrap: bool = False) -> None:
    """AROUND DecodePreallocQueue.add."""
    host = host_of(queue.token_to_kv_pool_allocator)
    if host is not None and is_rebootstrap:
        recompute.send_back(req)
    if host is None or not is_retracted:
        original(queue, req, is_retracted=is_retracted, is_rebootstrap=is_rebootstrap)
    elif copy_of(req) is None:
        recompute.hold(queue, req)
    else:
        original(queue, req, is_retracted=True)
        if not contains(queue.retracted_queue, req):
            release(req)  # the engine refused the request


def trim_sampling_masks(result: Any, queue: Any, decode_req: Any) -> None:
    """AFTER DecodeTransferQueue._commit_transfer_to_req: the mask of a token that is replayed is there already.

    The engine appends another one; of logprobs it knows better.
    """
    req = decode_req.req
    if decode_req.is_rebootstrap and req.return_sampling_mask:
        for rows in (req.output_token_sampling_mask, req.output_token_sampling_logprobs):
            if rows is not None:
                del rows[len(req.output_ids) :]


resume_retracted_reqs = resuming(copy_of, release, can_recompute)
prealloc_required_tokens = needing(copy_of)


def flush_cache(original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND Scheduler.flush_cache: a request that waits with its copy holds no page, no slot and no lock.

    The engine would not flush while one waits; a weight update asserts that it does, and ends the server.
    """
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    if queue is None or host_of(queue.token_to_kv_pool_allocator) is None:
        return original(scheduler, *args, **kwargs)
    away, queue.retracted_queue = queue.retracted_queue, []
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        queue.retracted_queue = away


def abort_request(original: Original, scheduler: Any, recv_req: Any) -> Any:
    """AROUND Scheduler.abort_request: the engine drops copies; they are released at once and not when collected."""
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    waiting = [(req, copy_of(req)) for req in queue.retracted_queue] if queue is not None else []
    result = original(scheduler, recv_req)
    for req, copy in waiting:
        if copy is not None and not contains(queue.retracted_queue, req):
            copy.release()
    return result


def release_memory_occupation(queue: Any, *_: Any, **__: Any) -> None:
    """BEFORE DecodePreallocQueue.release_memory_occupation."""
    for req in queue.retracted_queue:
        release(req)
