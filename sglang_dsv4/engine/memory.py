"""Reserves and pins the host memory of a server at its start, once, with all ranks of it.

Ranks agree on the units, so that "is there room?" has one answer on each.
"""

from __future__ import annotations

import platform
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from sglang_dsv4.engine.state import server
from sglang_dsv4.hostmem.claims import launcher
from sglang_dsv4.hostmem.fences import why_unordered
from sglang_dsv4.hostmem.sharing import World, machine
from sglang_dsv4.hostmem.sizing import ArenaSize
from sglang_dsv4.pools.copy_service import CopyService, ServerContext
from sglang_dsv4.pools.describe import DraftPool
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.settings import OFF, read_settings

RANKS = ("tp_rank", "pp_rank", "dp_rank")


def reserve_host_memory(pool: Any, scheduler: Any, draft_pool: Any = None, keeps_sessions: bool = False) -> None:
    """Reserves and pins the host memory of the target pool. Another kind of pool is left alone.

    draft_pool: the draft model's; None where there is none, as on all but the last stage of a pipeline.
    """
    if not isinstance(pool, TokenToKVPool):
        return
    settings = read_settings()
    if not keeps_sessions:
        settings = replace(settings, sessions=OFF)
    here = place(scheduler.server_args)
    server.clean_version, server.emptied = server.weight_version, None  # the cache is new
    context = ServerContext(
        agreed_size=agreed_size,
        ranks=here.ranks,
        launcher=here.launcher,
        world=world() if settings.share == "auto" else None,
        true_on_every_rank=true_on_every_rank,
        writer_streams=lambda: forward_streams(scheduler),
        weight_version=lambda: server.weight_version,
        is_clean=lambda: server.is_clean,
        stages=scheduler.server_args.pp_size,
        steps_in_flight=lambda req: steps_in_flight(scheduler, req),
        take_results=lambda: take_results(scheduler),
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


class Place(NamedTuple):
    """Describes one machine's ranks of the server: how many they are, and the first one's launcher."""

    ranks: int
    launcher: str


def place(args: Any) -> Place:
    """Finds this rank's place; a collective.

    Ranks of one machine may have launchers of their own (two of ``--nnodes``).
    """
    if not _distributed():
        return Place(ranks_a_machine(args), launcher())
    try:
        mine = machine(), launcher()
    except OSError:  # a sandbox
        mine = platform.node(), launcher()
    here = [launched_by for where, launched_by in of_every_rank(mine) if where == mine[0]]
    return Place(len(here) * _replicas(args), here[0])


def ranks_a_machine(args: Any) -> int:
    """Counts the scheduler processes that share one machine's RAM."""
    return max(1, args.tp_size * args.pp_size * _replicas(args) // args.nnodes)


def _replicas(args: Any) -> int:
    """Counts the server's worlds of ranks; one launcher starts them all."""
    return 1 if args.enable_dp_attention else int(args.dp_size)


def agreed_size(mine: ArenaSize | None) -> ArenaSize | None:
    """Returns the size of the arena for every rank of the server; None when any rank has none."""
    found = of_every_rank(mine)
    return None if mine is None or None in found else mine.agreed(found)


def of_every_rank(mine: Any) -> list[Any]:
    """Returns what each rank of the server has given, in the order of ranks; a collective."""
    if not _distributed():
        return [mine]
    from sglang.srt.distributed.parallel_state import get_world_group  # noqa: PLC0415

    return gathered(mine, get_world_group().world_size, get_world_group().cpu_group)


def gathered(mine: Any, ranks: int, group: Any) -> list[Any]:
    """Returns what each of the ``ranks`` of a CPU process group has given."""
    found: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(found, mine, group=group)
    return found


def true_on_every_rank(mine: bool) -> bool:
    """Returns whether ``mine`` is true on each rank with a shard of this rank's requests: these ranks retract together.

    The group is the one over which the engine's decode queues agree on their transfers. Each pipeline stage has its
    own, and the stages agree on a retract by its request's id. Call it equally often on each of them.
    """
    if not _distributed():
        return mine
    from sglang.srt.distributed.parallel_state import get_attn_tp_group  # noqa: PLC0415

    group = get_attn_tp_group()
    if group.world_size == 1:
        return mine
    answers = torch.tensor([mine], dtype=torch.uint8)
    torch.distributed.all_reduce(answers, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(answers.item())


def world() -> World | None:
    """Returns this server's ranks, where those of an attention group hold the same cache; None where each has its own.

    With context parallel attention each holds a part of a request. Every rank of a server gets an answer, or none does.
    """
    if not _distributed():
        return None
    from sglang.srt.distributed.parallel_state import get_attn_tp_group, get_world_group  # noqa: PLC0415

    group, everybody = get_attn_tp_group(), get_world_group()
    if group.world_size == 1 or _parts_of_requests():
        return None

    return World(of_every_rank, everybody.rank_in_group, tuple(group.ranks))


def attention_ranks() -> int:
    """Counts the ranks that have the same requests, each with a shard of their work."""
    if not _distributed():
        return 1
    from sglang.srt.distributed.parallel_state import get_attn_tp_group  # noqa: PLC0415

    return int(get_attn_tp_group().world_size)


def ranks_an_arena(args: Any) -> int:
    """Counts the ranks of a machine that will share one arena, if they can."""
    if world() is None or why_unordered() is not None:
        return 1
    from sglang.srt.distributed.parallel_state import get_attn_tp_group  # noqa: PLC0415

    return min(int(get_attn_tp_group().world_size), ranks_a_machine(args))


def arenas_a_machine(args: Any, share: str) -> int:
    """Counts the arenas of a machine whose ranks can open each other's memory. share: DSV4_SHARE."""
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    ranks = ranks_a_machine(args)
    apart = share == "off" or _parts_of_requests() or why_unordered() is not None
    return ranks if apart else max(1, ranks // get_parallel().attn_tp_size)


def _parts_of_requests() -> bool:
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    parallel = get_parallel()
    return bool(parallel.attn_cp_size > 1 or parallel.dcp_enabled)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def before_attach_canary_buffers(*, pool: Any, **_: Any) -> None:
    """Runs BEFORE pool_patcher.api.attach_canary_buffers: our pool has the attacher of the engine's."""
    from sglang.srt.kv_canary.pool_patcher.adapters.dsv4 import attach_dsv4  # noqa: PLC0415
    from sglang.srt.kv_canary.pool_patcher.api import register_pool_attacher  # noqa: PLC0415

    if isinstance(pool, TokenToKVPool):
        register_pool_attacher(type(pool), attach_dsv4)
