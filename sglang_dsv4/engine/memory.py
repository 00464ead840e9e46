"""Reserves and pins the host memory of a server at its start, once, with all ranks of it.

Ranks agree on the units, so that "is there room?" has one answer on each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sglang_dsv4.engine.ranks import agreed_size, place, true_on_every_rank, world
from sglang_dsv4.engine.retract import choices
from sglang_dsv4.engine.state import server
from sglang_dsv4.pools.copy_service import CopyService, ServerContext
from sglang_dsv4.pools.describe import DraftPool
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.settings import read_settings

RANKS = ("tp_rank", "pp_rank", "dp_rank")


def reserve_host_memory(pool: Any, scheduler: Any, draft_pool: Any = None) -> None:
    """Reserves and pins the host memory of the target pool. Another kind of pool is left alone.

    draft_pool: the draft model's; None where there is none, as on all but the last stage of a pipeline.
    """
    if not isinstance(pool, TokenToKVPool):
        return
    settings = read_settings()
    here = place(scheduler.server_args)
    server.clean_version, server.is_empty = server.weight_version, lambda: False  # the cache is new
    context = ServerContext(
        agreed_size=agreed_size,
        ranks=here.ranks,
        launcher=here.launcher,
        bound=here.bound,
        world=world() if settings.share == "auto" else None,
        true_on_every_rank=true_on_every_rank,
        writer_streams=lambda: forward_streams(scheduler),
        weight_version=lambda: server.weight_version,
        is_clean=lambda: server.is_clean,
        stages=scheduler.server_args.pp_size,
        steps_in_flight=lambda req: steps_in_flight(scheduler, req),
        take_results=lambda: take_results(scheduler),
        host_rows=choices.buffers(scheduler),
        on_host_rows=lambda slots: choices.leave_out(scheduler, int(pool.page_size), slots),
    )
    kept = pool.kept_rows
    if kept is not None:
        settings = kept.without_reserve(settings)
    draft = None if draft_pool is None else DraftPool(draft_pool, draft_reach(pool, scheduler))
    host = pool.attach_host(settings, context, draft)
    if host is None:
        pool.kept_rows = None
    else:
        if kept is not None:
            kept.on_change = partial(host.counters.set, "kept_bytes")
        export(host, getattr(scheduler, "metrics_collector", None))


def draft_reach(pool: Any, scheduler: Any) -> int:
    """Returns the number of rows before the next token that the draft's first step reads.

    DSpark's attends to the whole window before its block; a step of EAGLE counts itself into the window.
    """
    window = int(pool.sliding_window)
    return window if scheduler.spec_algorithm.is_dspark() else window - 1


def host_of(allocator: Any) -> CopyService | None:
    """Returns the copy service of the allocator's pool, or None: then the engine's own behaviour follows."""
    pool = allocator.get_kvcache()
    return pool.host if isinstance(pool, TokenToKVPool) else None


def export(host: CopyService, collector: Any) -> None:
    """Gives the host's counters series beside those of the engine's ``collector``, with the same ranks.

    The engine has a collector where it runs with --enable-metrics. (It keeps the flag's resolved value
    elsewhere than in its server arguments.)
    """
    if collector is None or host.counters.series:
        return
    host.counters.export(ranks_of(collector))
    host.counters.set("arena_bytes", host.memory.arena.nbytes)
    host.counters.set("sharers", host.memory.ranks)


def ranks_of(collector: Any) -> dict[str, str]:
    """Returns the labels of this rank's series."""
    return {name: str(collector.labels[name]) for name in RANKS if name in collector.labels}


def forward_streams(scheduler: Any) -> tuple[torch.cuda.Stream, ...]:
    """Returns the stream on which a finished or retracted request's last forward may still run."""
    stream = getattr(scheduler, "forward_stream", None)
    return (stream,) if scheduler.enable_overlap and isinstance(stream, torch.cuda.Stream) else ()


def steps_in_flight(scheduler: Any, req: Any) -> int:
    """Counts the steps of ``req`` that were launched, and whose results the scheduler has not taken."""
    return sum(any(running is req for running in batch.reqs) for batch, _ in scheduler.result_queue)


def take_results(scheduler: Any) -> None:
    """Takes the queued results as a pause does: the scheduler's loop must not look for them afterwards."""
    if not scheduler.result_queue:
        return
    while scheduler.result_queue:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
    scheduler.last_batch = None


def before_attach_canary_buffers(*, pool: Any, **_: Any) -> None:
    """Runs BEFORE pool_patcher.api.attach_canary_buffers: our pool has the attacher of the engine's."""
    from sglang.srt.kv_canary.pool_patcher.adapters.dsv4 import attach_dsv4  # noqa: PLC0415
    from sglang.srt.kv_canary.pool_patcher.api import register_pool_attacher  # noqa: PLC0415

    if isinstance(pool, TokenToKVPool):
        register_pool_attacher(type(pool), attach_dsv4)
