"""Decides at start whether a plain server restores retracted requests, and reserves the memory.

An allow-list, like that of the layouts: with a feature not seen to be exact the engine prefills again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from sglang_dsv4.engine.memory import (
    arenas_a_machine,
    attention_ranks,
    ranks_a_machine,
    ranks_of,
    reserve_host_memory,
)
from sglang_dsv4.engine.plain import hicache, tree
from sglang_dsv4.engine.plain.serving import NAME, PlainServing
from sglang_dsv4.engine.releases import current
from sglang_dsv4.engine.saving import records_choices
from sglang_dsv4.pools.copy_service import whole_every
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.sessions.store import SessionStore
from sglang_dsv4.settings import OFF, read_settings

logger = logging.getLogger(__name__)

ALLOCATORS = {False: "SWATokenToKVPoolAllocator", True: "DeepSeekV4HiSparseTokenToKVPoolAllocator"}  # with HiSparse
NO_KEPT_ROWS = "HiSparse without pages for kept rows: mixed chunks, priorities, drafts, or no RAM for them"
COMES_COMPUTED = "prompts come to a decode server computed"
NO_PREFIX_CACHE = "there is no prefix cache (--disable-radix-cache, HiSparse)"
NOT_SHARED = "tensor-parallel ranks that do not share their host memory (DSV4_SHARE=off, or several machines)"
TREES = ("UnifiedRadixCache", "SWAChunkCache")


def start_plain_serving(result: Any, scheduler: Any) -> None:
    """Runs AFTER Scheduler.init_disaggregation: where a decode server reserves its memory, too.

    A prefill server retracts nothing. It reserves memory only to keep sessions.
    """
    from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: PLC0415
    from sglang.srt.runtime_context import get_disagg  # noqa: PLC0415

    allocator, mode = scheduler.token_to_kv_pool_allocator, scheduler.disaggregation_mode
    pool = allocator.get_kvcache()
    if not isinstance(pool, TokenToKVPool):
        return
    if (before := getattr(pool, NAME, None)) is not None:  # of another role
        before.end()
        delattr(pool, NAME)
    if mode == DisaggregationMode.DECODE:
        _leave_sessions(COMES_COMPUTED)
        return
    prefills = mode == DisaggregationMode.PREFILL
    if prefills and read_settings().sessions == OFF:
        return
    reason = next(_reasons(scheduler), None)
    if reason is not None and not prefills:
        pool.kept_rows = None
        logger.warning("plain serving: the engine prefills retracted requests again: %s", reason)
        _leave_sessions(reason)
        return
    reason = reason or next(session_reasons(scheduler), None)
    if prefills and reason is not None:
        _leave_sessions(reason)
        return
    retracts = not prefills or get_disagg().enable_pd_role_switch
    reserve_host_memory(pool, scheduler, current().draft_pool(scheduler), reason is None, retracts)
    if pool.host is None:
        return  # it has said why
    # A watermark begins with an extend, which gives the request's row its context.
    joins_decode = scheduler.spec_algorithm.is_none() and not scheduler.is_mixed_chunk and not has_watermark()
    publishes = not records_choices()
    plain = PlainServing(pool, pool.host, joins_decode, publishes)
    setattr(pool, NAME, plain)
    start_sessions(plain, scheduler, reason)
    if prefills:
        return
    logger.info("plain serving: a retracted request comes back from its host copy, without a prefill")
    if not publishes:
        logger.warning("plain serving: expert or indexer choices are returned, so restored requests are not published")


def start_sessions(plain: PlainServing, scheduler: Any, reason: str | None) -> None:
    """Starts to keep the cache of requests that end, where DSV4_SESSIONS wants it. reason: against it, if any."""
    wanted, host = read_settings().sessions, plain.host
    if reason is None and whole_every(host.buffers) != host.buffers.geometry.page_size:
        reason = "a cache with states in a request's slot at page ends"
    if reason is None and host.memory.ranks < attention_ranks():
        reason = NOT_SHARED
    if reason is not None:
        _leave_sessions(reason)
        return
    if wanted == OFF:
        return
    most = None if wanted is None else int(wanted * 2**30)
    pairs, tells = tree.pairs_tokens(scheduler.tree_cache), scheduler.server_args.log_requests
    plain.sessions = SessionStore(host, lambda: plain.pool.full_to_swa_index_mapping, pairs, most, tells)
    if host.counters.series:
        plain.sessions.counters.export(ranks_of(scheduler.metrics_collector))
    logger.info("sessions: the cache of requests that end stays on the host, for the next turn")


def _leave_sessions(reason: str) -> None:
    if read_settings().sessions != OFF:
        logger.warning("sessions: the cache of requests that end is not kept: %s", reason)


def session_reasons(scheduler: Any) -> Iterator[str]:
    """Returns the reasons against keeping sessions that are known before the host memory is reserved."""
    if type(scheduler.tree_cache).__name__ != TREES[0] or scheduler.tree_cache.disable:
        yield NO_PREFIX_CACHE
    yield from session_launch_reasons(scheduler.server_args, read_settings().share)


def session_launch_reasons(args: Any, share: str) -> Iterator[str]:
    """Returns the reasons that the launch arguments tell. share: DSV4_SHARE."""
    from sglang.srt.environ import envs  # noqa: PLC0415
    from sglang.srt.runtime_context import get_memory, get_parallel  # noqa: PLC0415

    if get_memory().disable_radix_cache:
        yield NO_PREFIX_CACHE
    if get_memory().enable_hierarchical_cache:
        yield "beside a hierarchical cache, which keeps pages on the host itself"
    if records_choices():
        yield "expert or indexer choices are returned, which are recorded by cache slot"
    if envs.SGLANG_RADIX_FORCE_MISS.get():
        yield "SGLANG_RADIX_FORCE_MISS, with which no request finds its prefix"
    if arenas_a_machine(args, share) * get_parallel().attn_tp_size > ranks_a_machine(args):  # else whole groups share
        yield NOT_SHARED


def _reasons(scheduler: Any) -> Iterator[str]:
    """Returns the reasons against restoring requests in this server."""
    from sglang.srt.runtime_context import get_memory  # noqa: PLC0415

    tree, allocator = type(scheduler.tree_cache).__name__, type(scheduler.token_to_kv_pool_allocator).__name__
    drafts, hisparse = scheduler.spec_algorithm, get_memory().enable_hisparse
    yield from server_reasons()
    if hisparse and scheduler.token_to_kv_pool_allocator.get_kvcache().kept_rows is None:
        yield NO_KEPT_ROWS
    if tree not in TREES:
        yield f"prefix cache {tree}, covered: {' and '.join(TREES)}"
    if allocator != (covered := ALLOCATORS[hisparse]):
        yield f"allocator {allocator}, covered: {covered}"
    if scheduler.tp_worker.model_runner.prefill_aware_swa:
        yield "prefill-aware SWA, which keeps the window rows of a whole prefill"
    yield from feature_reasons(drafts, scheduler.enable_pdmux, scheduler.server_args.enable_multi_layer_eagle)


def feature_reasons(drafts: Any, pdmux: bool, several_drafts: bool) -> Iterator[str]:
    """Returns the reasons that the launch arguments tell. drafts: the engine's SpeculativeAlgorithm."""
    if pdmux:
        yield "PD multiplexing, which runs two forwards at a time"
    if drafts.is_frozen_kv_mtp() or not (drafts.is_none() or drafts.is_eagle() or drafts.is_dspark()):
        yield f"speculative decoding by {drafts.name}, covered: EAGLE and DSPARK"
    if several_drafts:
        yield "several draft models, each with a pool of its own"


def has_watermark() -> bool:
    """Returns whether sampled tokens get a watermark, whose context is kept by row."""
    from sglang.srt.runtime_context import get_exec  # noqa: PLC0415

    return bool(get_exec().features.enable_watermark)


def server_reasons() -> Iterator[str]:
    """Returns the reasons known before the pools are built: HiSparse reserves its pages then."""
    from sglang.srt.runtime_context import get_context, get_memory, get_parallel  # noqa: PLC0415

    parallel = get_parallel()
    if reason := hicache.refusal(get_memory()):
        yield reason
    if get_context().server_args.pp_size > 1:
        yield "pipeline parallelism: its stages would have to agree on each copy"
    if parallel.attn_cp_size > 1:
        yield "context parallel attention"
    if parallel.dcp_enabled:
        yield "decode context parallelism"
    if get_memory().enable_hisparse and has_watermark():
        yield "HiSparse beside a watermark, which begins with an extend"
    if reason := current().plain_refusal():
        yield reason
