"""Finds the ranks of a server that share a machine, an arena or requests, and lets them agree; most are collectives."""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import torch

from sglang_dsv4.hostmem.claims import launcher
from sglang_dsv4.hostmem.fences import why_unordered
from sglang_dsv4.hostmem.nodes import Nodes, bound_nodes
from sglang_dsv4.hostmem.sharing import World, machine
from sglang_dsv4.hostmem.sizing import ArenaSize


class Place(NamedTuple):
    """Describes one machine's ranks of the server: how many they are, and the first one's launcher.

    bound: the memory nodes to which they are bound, all of them; None where one is not, or they do not know each other.
    """

    ranks: int
    launcher: str
    bound: Nodes | None = None


def place(args: Any) -> Place:
    """Finds this rank's place; a collective.

    Ranks of one machine may have launchers of their own (two of ``--nnodes``).
    """
    if not _distributed():
        ranks = ranks_a_machine(args)
        return Place(ranks, launcher(), bound_nodes() if ranks == 1 else None)
    try:
        where = machine()
    except OSError:  # a sandbox
        where = platform.node()
    found = of_every_rank((where, launcher(), bound_nodes()))
    here = [(launched_by, bound) for at, launched_by, bound in found if at == where]
    bound = [nodes for _, nodes in here if nodes is not None]
    together = Nodes().union(*bound) if len(bound) == len(here) and _replicas(args) == 1 else None
    return Place(len(here) * _replicas(args), here[0][0], together)


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


def will_be_first(share: str) -> bool:
    """Returns whether this rank will be the first of an arena, if its ranks can share one. share: DSV4_SHARE."""
    if attention_ranks() == 1:
        return True
    from sglang.srt.distributed.parallel_state import get_attn_tp_group  # noqa: PLC0415

    return share == "auto" and world() is not None and get_attn_tp_group().rank_in_group == 0


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
