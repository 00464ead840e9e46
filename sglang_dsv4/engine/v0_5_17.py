"""SGLang 0.5.17 passes no request slot to the pool, and has no behaviour for a retracted request without a copy.

The copy is kept in ``req.kv_cache_cpu``. A request without one is sent back to its prefill server, through the engine's
own rebootstrap, which loses nothing, where that server can compute it again. The others (multimodal and embeddings, as
the payload has token ids only, and those of the fake transfer, which has no prefill server) are aborted with 503. The
same holds where a layout is refused and no copy is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from sglang_dsv4.engine import recompute
from sglang_dsv4.engine.aborting import NO_COPY, without
from sglang_dsv4.engine.prealloc_queue import PreallocQueue as _PreallocQueue
from sglang_dsv4.engine.saving import keeps_its_tokens, one_retract, save
from sglang_dsv4.engine.weight_updater import WeightUpdater
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.pools.token_to_kv import TokenToKVPool

__all__ = ["PreallocQueue", "WeightUpdater", "commit_transfer_to_req", "layout_refusal", "place_of", "retract_decode"]

Original = Callable[..., Any]


def copy_of(req: Any) -> HostCopy | None:
    """The request's host copy."""
    copy = getattr(req, "kv_cache_cpu", None)
    return copy if isinstance(copy, HostCopy) else None


def drop_copy(req: Any) -> None:
    """Release and forget the request's host copy."""
    copy = copy_of(req)
    if copy is not None:
        copy.release()
        del req.kv_cache_cpu


def _slots(req: Any, req_to_token_pool: Any) -> Any:
    # seqlen - 1 and not kv_committed_len: with overlap that one already counts the token in flight.
    return req_to_token_pool.req_to_token[req.req_pool_idx, : req.seqlen - 1]


def offload_kv_cache(original: Original, req: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any) -> None:
    """AROUND Req.offload_kv_cache. The engine's own raises where the layout is refused, and ends the server."""
    pool = token_to_kv_pool_allocator.get_kvcache()
    if not isinstance(pool, TokenToKVPool):
        original(req, req_to_token_pool, token_to_kv_pool_allocator)
        return
    drop_copy(req)
    copy = save(pool, req, _slots(req, req_to_token_pool), req.req_pool_idx)
    if copy is not None:
        req.kv_cache_cpu = copy


def load_kv_cache(original: Original, req: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any) -> None:
    """AROUND Req.load_kv_cache."""
    pool = token_to_kv_pool_allocator.get_kvcache()
    if not isinstance(pool, TokenToKVPool):
        original(req, req_to_token_pool, token_to_kv_pool_allocator)
        return
    pool.load_cpu_copy(req.kv_cache_cpu, _slots(req, req_to_token_pool), req_pool_index=req.req_pool_idx)
    del req.kv_cache_cpu


def can_recompute(req: Any, server_args: Any) -> bool:
    """Whether the recompute payload can carry the request, and there is a prefill server to take it."""
    from sglang.srt.disaggregation.utils import _is_fake_transfer  # noqa: PLC0415

    by_tokens = (
        req.multimodal_inputs is None
        and req.lora_id is None
        and req.positional_embed_overrides is None
        and keeps_its_tokens(req)
    )
    return by_tokens and not _is_fake_transfer(req, server_args)


class PreallocQueue(_PreallocQueue):
    """Retracted requests go our way on every server, also where no copy is made."""

    @property
    def handles_retracts(self) -> bool:
        """See the base."""
        return isinstance(self.token_to_kv_pool, TokenToKVPool)

    def copy_of(self, req: Any) -> HostCopy | None:
        """See the base."""
        return copy_of(req)

    def drop_copy(self, req: Any) -> None:
        """See the base."""
        drop_copy(req)

    def can_recompute(self, req: Any) -> bool:
        """See the base."""
        return can_recompute(req, self.scheduler.server_args)

    def before_abort(self, reqs: Iterable[Any]) -> None:
        """The engine frees all but HiSparse rows. Who gets the slot next would write over those on the host."""
        if self.scheduler.enable_hisparse:
            for req in reqs:
                self.scheduler.hisparse_coordinator.request_finished(req)


def retract_decode(original: Original, batch: Any, server_args: Any) -> Any:
    """AROUND ScheduleBatch.retract_decode, which returns (retracted, ratio, to abort)."""
    with one_retract(batch.token_to_kv_pool_allocator):
        retracted, ratio, to_abort = original(batch, server_args)
    ours = isinstance(batch.token_to_kv_pool_allocator.get_kvcache(), TokenToKVPool)
    if server_args.disaggregation_mode != "decode" or not ours:
        return retracted, ratio, to_abort
    for req in to_abort:
        drop_copy(req)  # the engine saves the last request too, aborts it, and never deletes its copy
    lost = [req for req in retracted if copy_of(req) is None and not can_recompute(req, server_args)]
    for req in lost:
        req.to_finish = _finish_abort()(NO_COPY, status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    return without(retracted, lost), ratio, [*to_abort, *lost]


def _finish_abort() -> Any:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415

    return FINISH_ABORT


def commit_transfer_to_req(original: Original, queue: Any, decode_req: Any) -> Any:
    """AROUND DecodeTransferQueue._commit_transfer_to_req."""
    recompute.remember_rank(decode_req)
    result = original(queue, decode_req)
    _trim_sampling_masks(decode_req)
    return result


def _trim_sampling_masks(decode_req: Any) -> None:
    """The mask of a token that is replayed is there already, and the engine appends another; no logprob is."""
    req = decode_req.req
    if decode_req.is_rebootstrap and req.return_sampling_mask:
        for rows in (req.output_token_sampling_mask, req.output_token_sampling_logprobs):
            if rows is not None:
                del rows[len(req.output_ids) :]


def place_of(req: Any) -> Any:
    """What has the request's slot and its committed length."""
    return req


def layout_refusal(pool: Any) -> str | None:
    """This line has no layouts but those that ``pools.describe`` tells apart."""
    return None
