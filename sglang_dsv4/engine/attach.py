"""A server that retracts must get its host memory at start: reserved once, pinned once, alike on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dsv4.engine.ranks import min_over_ranks, place, true_on_every_rank, world
from sglang_dsv4.engine.weights import weight_version
from sglang_dsv4.metrics import make_exporter
from sglang_dsv4.pools.copy_service import CopyService, ServerContext
from sglang_dsv4.pools.describe import DraftPool
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.settings import read_settings

RANKS = ("tp_rank", "pp_rank", "dp_rank")


def attach(pool: Any, scheduler: Any, draft_pool: Any = None) -> None:
    """Reserve and pin the host memory of the target pool. Another kind of pool is left alone.

    draft_pool: the draft model's; None where there is none, as on all but the last stage of a pipeline.
    """
    if not isinstance(pool, TokenToKVPool):
        return
    settings = read_settings()
    here = place(scheduler.server_args)
    context = ServerContext(
        min_over_ranks=min_over_ranks,
        ranks=here.ranks,
        launcher=here.launcher,
        world=world() if settings.share == "auto" else None,
        true_on_every_rank=true_on_every_rank,
        writer_streams=lambda: forward_streams(scheduler),
        weight_version=weight_version,
        stages=scheduler.server_args.pp_size,
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
            kept.on_change = host.counters.keeps
        export(host, getattr(scheduler, "metrics_collector", None))


def draft_reach(pool: Any, scheduler: Any) -> int:
    """Rows before the next token that the draft's first step reads.

    DSpark's attends to the whole window before its block; a step of EAGLE counts itself into the window.
    """
    window = int(pool.sliding_window)
    return window if scheduler.spec_algorithm.is_dspark() else window - 1


def host_of(allocator: Any) -> CopyService | None:
    """The copy service of the allocator's pool, or None: then the engine's own behaviour follows."""
    pool = allocator.get_kvcache()
    return pool.host if isinstance(pool, TokenToKVPool) else None


def export(host: CopyService, collector: Any) -> None:
    """Give the host's counters series beside those of the engine's ``collector``, with the same ranks.

    The engine has a collector where it runs with --enable-metrics. (0.5.23 keeps the flag's resolved value
    elsewhere than in its server arguments.)
    """
    if collector is None or host.counters.listener is not None:
        return
    host.counters.listener = make_exporter(ranks_of(collector), host.memory.arena.nbytes, host.memory.ranks)


def ranks_of(collector: Any) -> dict[str, str]:
    """The labels of this rank's series."""
    return {name: str(collector.labels[name]) for name in RANKS if name in collector.labels}


def forward_streams(scheduler: Any) -> tuple[torch.cuda.Stream, ...]:
    """The stream on which a finished or retracted request's last forward may still run."""
    stream = getattr(scheduler, "forward_stream", None)
    return (stream,) if scheduler.enable_overlap and isinstance(stream, torch.cuda.Stream) else ()


def backup_refusal(choice: str | None) -> str | None:
    """Why a decode server with that --disaggregation-decode-retraction-backup makes no copies.

    None: the engine has not chosen yet, and chooses cpu_tensor for DeepSeek-V4.
    """
    return None if choice in (None, "cpu_tensor") else f"retraction backup is {choice}"


def has_host_tier() -> bool:
    """Whether the engine itself moves cache between device and host, ordered behind the schedule stream alone."""
    from sglang.srt.runtime_context import get_disagg, get_memory  # noqa: PLC0415

    memory = get_memory()
    return bool(
        memory.enable_hierarchical_cache
        or memory.hicache_storage_backend
        or memory.enable_lmcache
        or memory.enable_flexkv
        or get_disagg().disaggregation_decode_enable_offload_kvcache
    )
