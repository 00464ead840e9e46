"""Decides at start whether a plain server restores retracted requests, and reserves the memory.

An allow-list, like that of the layouts: with a feature not seen to be exact the engine prefills again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from sglang_dsv4.engine.coverage import (
    COMES_COMPUTED,
    IN_SLOTS,
    NO_PREFIX_CACHE,
    NOT_SHARED,
    Launch,
    Part,
    launch,
    leave_sessions,
    leave_store,
    reasons,
    refusal,
)
from sglang_dsv4.engine.decode import points
from sglang_dsv4.engine.memory import ranks_of, reserve_host_memory
from sglang_dsv4.engine.plain import publish
from sglang_dsv4.engine.plain.serving import NAME, PlainServing
from sglang_dsv4.engine.ranks import attention_ranks
from sglang_dsv4.engine.releases import engine_release
from sglang_dsv4.engine.state import server
from sglang_dsv4.pools.copy_service import whole_every
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.sessions.store import SessionStore
from sglang_dsv4.settings import read_settings

logger = logging.getLogger(__name__)

ALLOCATORS = {False: "SWATokenToKVPoolAllocator", True: "DeepSeekV4HiSparseTokenToKVPoolAllocator"}  # with HiSparse
NO_KEPT_ROWS = "HiSparse without pages for kept rows: mixed chunks, priorities, drafts, or no RAM for them"
TREES = ("UnifiedRadixCache", "SWAChunkCache")


def start_plain_serving(result: Any, scheduler: Any) -> None:
    """Runs AFTER Scheduler.init_disaggregation: where a decode server reserves its memory, too.

    A prefill server retracts nothing. It reserves memory only to keep sessions.
    """
    try:
        _start(scheduler)
    finally:
        if server.early_store is not None:
            server.early_store.close()  # unless a store took its process
            server.early_store = None


def _start(scheduler: Any) -> None:
    from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: PLC0415

    allocator, mode = scheduler.token_to_kv_pool_allocator, scheduler.disaggregation_mode
    pool = allocator.get_kvcache()
    if not isinstance(pool, TokenToKVPool):
        return
    for name in (NAME, points.NAME):
        if (before := getattr(pool, name, None)) is not None:  # of another role
            before.end()
            delattr(pool, name)
    if mode == DisaggregationMode.DECODE:
        leave_sessions(COMES_COMPUTED, and_store=False)
        if read_settings().store.backend:
            points.start_points(pool, scheduler)
        return
    prefills = mode == DisaggregationMode.PREFILL
    if prefills and not read_settings().sessions.asked:
        return
    on = launch(
        mode=mode.value, args=scheduler.server_args, drafts=scheduler.spec_algorithm, pdmux=scheduler.enable_pdmux,
        several_drafts=scheduler.server_args.enable_multi_layer_eagle,
    )  # fmt: skip
    reason = next(_reasons(scheduler, on), None)
    if reason is not None and not prefills:
        pool.kept_rows = None
        logger.warning("plain serving: the engine prefills retracted requests again: %s", reason)
        leave_sessions(reason)
        return
    reason = reason or next(session_reasons(scheduler, on), None)
    if prefills and reason is not None:
        leave_sessions(reason)
        return
    reserve_host_memory(pool, scheduler, engine_release().draft_pool(scheduler))
    if pool.host is None:
        return  # it has said why
    # A watermark begins with an extend, which gives the request's row its context.
    joins_decode = scheduler.spec_algorithm.is_none() and not scheduler.is_mixed_chunk and not on.watermark
    plain = PlainServing(pool, pool.host, joins_decode)
    setattr(pool, NAME, plain)
    start_sessions(plain, scheduler, reason)
    if prefills:
        return
    logger.info("plain serving: a retracted request comes back from its host copy, without a prefill")


def start_sessions(plain: PlainServing, scheduler: Any, reason: str | None) -> None:
    """Starts to keep the cache of requests that end, where DSV4_SESSIONS wants it. reason: against it, if any."""
    wanted, host = read_settings().sessions, plain.host
    if reason is None and whole_every(host.buffers) != host.buffers.geometry.page_size:
        reason = IN_SLOTS
    if reason is None and host.memory.ranks < attention_ranks():
        reason = NOT_SHARED
    if reason is not None:
        leave_sessions(reason)
        return
    if not wanted.kept:
        leave_store("DSV4_SESSIONS=off: a store keeps sessions")
        return
    bigram, log_saves = publish.is_bigram(scheduler.tree_cache), scheduler.server_args.log_requests
    plain.sessions = SessionStore(
        host, lambda: plain.pool.full_to_swa_index_mapping, bigram, wanted.most_bytes, log_saves
    )
    if host.counters.series:
        plain.sessions.counters.export(ranks_of(scheduler.metrics_collector))
    logger.info(
        "sessions: the cache of requests that end stays on the host, for the next turn%s",
        "" if wanted.asked else "; retracted requests go first, and DSV4_SESSIONS=off ends it",
    )
    if (reason := refusal(launch(), Part.STORE)) is not None:
        leave_store(reason)
    elif read_settings().store.backend:
        from sglang_dsv4.engine.store_start import join_store  # noqa: PLC0415

        plain.tier = join_store(plain.pool, scheduler, plain.sessions)


def session_reasons(scheduler: Any, on: Launch) -> Iterator[str]:
    """Returns the reasons against keeping sessions that are known before the host memory is reserved."""
    if type(scheduler.tree_cache).__name__ != TREES[0] or scheduler.tree_cache.disable:
        yield NO_PREFIX_CACHE
    yield from reasons(on, Part.SESSIONS)


def _reasons(scheduler: Any, on: Launch) -> Iterator[str]:
    """Returns the reasons against restoring requests in this server."""
    tree, allocator = type(scheduler.tree_cache).__name__, type(scheduler.token_to_kv_pool_allocator).__name__
    yield from reasons(on, Part.PLAIN)
    if on.hisparse and scheduler.token_to_kv_pool_allocator.get_kvcache().kept_rows is None:
        yield NO_KEPT_ROWS
    if tree not in TREES:
        yield f"prefix cache {tree}, covered: {' and '.join(TREES)}"
    if allocator != (covered := ALLOCATORS[on.hisparse]):
        yield f"allocator {allocator}, covered: {covered}"
    if scheduler.tp_worker.model_runner.prefill_aware_swa:
        yield "prefill-aware SWA, which keeps the window rows of a whole prefill"
