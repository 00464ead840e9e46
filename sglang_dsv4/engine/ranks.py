"""Ranks schedule in lockstep: a question about host memory must have the same answer on each, or the server hangs."""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import torch

from sglang_dsv4.cache.family import Group
from sglang_dsv4.hostmem.claims import launcher
from sglang_dsv4.hostmem.sharing import World, machine
from sglang_dsv4.pools.copy_service import Counts

_NO_SUCH_GROUP = 1 << 40  # a stage without a group never limits the others


class Place(NamedTuple):
    """What the server's ranks of one machine have in common: how many they are, and the first one's launcher."""

    ranks: int
    launcher: str


def place(args: Any) -> Place:
    """Where this rank is; a collective. Ranks of one machine may have launchers of their own (two of ``--nnodes``)."""
    if not _distributed():
        return Place(ranks_a_machine(args), launcher())
    from sglang.srt.distributed.parallel_state import get_world_group  # noqa: PLC0415

    try:
        mine = machine(), launcher()
    except OSError:  # a sandbox
        mine = platform.node(), launcher()
    found: list[Any] = [None] * get_world_group().world_size
    torch.distributed.all_gather_object(found, mine, group=get_world_group().cpu_group)
    here = [launched_by for where, launched_by in found if where == mine[0]]
    return Place(len(here) * _replicas(args), here[0])


def ranks_a_machine(args: Any) -> int:
    """Scheduler processes that share one machine's RAM."""
    return max(1, args.tp_size * args.pp_size * _replicas(args) // args.nnodes)


def _replicas(args: Any) -> int:
    """Worlds of ranks that a server has; one launcher starts them all."""
    return 1 if args.enable_dp_attention else int(args.dp_size)


def min_over_ranks(counts: Counts | None) -> Counts | None:
    """Smallest block counts over all ranks of the server; None when any rank has none."""
    if not _distributed():
        return counts
    from sglang.srt.distributed.parallel_state import get_world_group  # noqa: PLC0415

    return smallest_counts(counts, get_world_group().cpu_group)


def smallest_counts(counts: Counts | None, group: Any) -> Counts | None:
    """``min_over_ranks`` over an explicit CPU process group."""
    order = list(Group)
    mine = [0] * (len(order) + 1) if counts is None else [1, *(counts[g] or _NO_SUCH_GROUP for g in order)]
    values = torch.tensor(mine, dtype=torch.int64)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MIN, group=group)
    ok, *smallest = values.tolist()
    if not ok or counts is None:
        return None
    return {g: n if counts[g] else 0 for g, n in zip(order, smallest, strict=True)}


def true_on_every_rank(mine: bool) -> bool:
    """Whether ``mine`` is true on each rank that has a shard of this rank's requests: those that retract together.

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
    """This server's ranks, where those of an attention group hold the same cache; None where each has its own.

    With context parallel attention each holds a part of a request. Every rank of a server gets an answer, or none does.
    """
    if not _distributed():
        return None
    from sglang.srt.distributed.parallel_state import get_attn_tp_group, get_world_group  # noqa: PLC0415

    group, everybody = get_attn_tp_group(), get_world_group()
    if group.world_size == 1 or _parts_of_requests():
        return None

    def exchange(mine: Any) -> list[Any]:
        found: list[Any] = [None] * everybody.world_size
        torch.distributed.all_gather_object(found, mine, group=everybody.cpu_group)
        return found

    return World(exchange, everybody.rank_in_group, tuple(group.ranks))


def ranks_an_arena(args: Any) -> int:
    """Ranks of a machine that will share one arena, if they can."""
    if world() is None:
        return 1
    from sglang.srt.distributed.parallel_state import get_attn_tp_group  # noqa: PLC0415

    return min(int(get_attn_tp_group().world_size), ranks_a_machine(args))


def arenas_a_machine(args: Any, share: str) -> int:
    """Arenas of a machine whose ranks can open each other's memory. share: DSV4_SHARE."""
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    ranks = ranks_a_machine(args)
    apart = share == "off" or _parts_of_requests()
    return ranks if apart else max(1, ranks // get_parallel().attn_tp_size)


def _parts_of_requests() -> bool:
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    parallel = get_parallel()
    return bool(parallel.attn_cp_size > 1 or parallel.dcp_enabled)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
