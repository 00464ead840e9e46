"""Reserves host memory for a pool: counts other servers and sharing ranks, and agrees on the size with all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from sglang_dsv4.errors import ArenaNotShared, HostMemoryExhausted, LayoutRefused
from sglang_dsv4.hostmem.claims import Claim
from sglang_dsv4.hostmem.nodes import Nodes
from sglang_dsv4.hostmem.sharing import Sharers, World, find_sharers
from sglang_dsv4.hostmem.sizing import ArenaSize


class Closes(Protocol):
    """Owns host memory."""

    def close(self) -> None:
        """Gives the memory back."""


T = TypeVar("T", bound=Closes)


def reserve(
    choose: Callable[[int, int], ArenaSize], make: Callable[[ArenaSize, Sharers | None], T], ranks: int,
    launcher: str | None, world: World | None, agree: Callable[[ArenaSize | None], ArenaSize | None],
    bound: Nodes | None = None,
) -> tuple[T | None, Exception | None]:  # fmt: skip
    """Makes the owner of the memory where every rank can; else (None, this rank's failure or None).

    choose: the size of an arena, for the RAM that so many arenas may take; raises LayoutRefused for a pool that is not
    covered. ranks, launcher, world, agree, bound: see ``ServerContext``. ArenaNotShared comes on every rank or on
    none.
    """
    try:
        sharers = None if world is None else find_sharers(world)
    except ArenaNotShared as error:
        return None, error
    owner, size = None, None
    failure: Exception | None = None
    claim = Claim(ranks, launcher, bound)
    arenas, together = ranks, 1
    if sharers is not None:  # the machine may have other replicas of the server, which share nothing with this one
        arenas, together = sharers.arenas * max(1, ranks // sharers.local), sharers.ranks
    try:
        with claim.measuring() as ram:
            size = choose(ram, arenas)
            claim.ask(size.nbytes // together)
    except (HostMemoryExhausted, LayoutRefused) as error:
        failure = error
    agreed = agree(size)
    if agreed is not None and not isinstance(failure, LayoutRefused):
        try:
            with claim.pinning():
                owner = make(agreed, sharers)
        except (HostMemoryExhausted, ArenaNotShared, torch.OutOfMemoryError) as error:
            failure = error
        if agree(agreed if owner else None) is None and owner is not None:
            owner.close()
            owner = None
    if owner is None:
        claim.close()
    if sharers is not None:
        sharers.close()
    # Its frames hold the arena, and this one the error: the engine freezes the garbage collector after the warm-up, and
    # the memory would never go back.
    return owner, failure and failure.with_traceback(None)
