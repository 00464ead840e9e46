"""Reserves host memory for a pool: counts other servers and sharing ranks, and agrees on the size with all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from sglang_dsv4.errors import ArenaNotShared, HostMemoryExhausted, LayoutRefused
from sglang_dsv4.hostmem.machine_lock import Place, machine_locked
from sglang_dsv4.hostmem.sharing import Sharers, World, find_sharers
from sglang_dsv4.hostmem.sizing import ArenaSize


class Closes(Protocol):
    """Owns host memory."""

    def close(self) -> None:
        """Gives the memory back."""


T = TypeVar("T", bound=Closes)


def reserve(
    choose: Callable[[int, int], ArenaSize], make: Callable[[ArenaSize, Sharers | None], T], place: Place,
    world: World | None,
) -> tuple[T | None, Exception | None]:  # fmt: skip
    """Makes the owner of the memory where every rank can; else (None, this rank's failure or None).

    choose: the size of an arena, for the RAM that so many arenas may take; raises LayoutRefused for a pool that is not
    covered. place, world: see ``ServerContext``. ArenaNotShared comes on every rank or on none.
    """
    try:
        sharers = None if world is None else find_sharers(world)
    except ArenaNotShared as error:
        return None, error
    owner, size = None, None
    failure: Exception | None = None
    arenas, together = place.ranks, 1
    if sharers is not None:  # the machine may have other replicas of the server, which share nothing with this one
        arenas, together = sharers.arenas * place.replicas, sharers.ranks
    with machine_locked(place, "arena") as ram:
        try:
            size = choose(ram.free, arenas)
        except (HostMemoryExhausted, LayoutRefused) as error:
            failure = error
        agreed = agreed_size(size, place.tell)
        if agreed is not None:
            try:
                owner = make(agreed, sharers)
            except (HostMemoryExhausted, ArenaNotShared, torch.OutOfMemoryError) as error:
                failure = error
            if not all(place.tell(owner is not None)) and owner is not None:
                owner.close()
                owner = None
            ram.pinned = 0 if owner is None else agreed.nbytes // together
    if sharers is not None:
        sharers.close()
    # Its frames hold the arena, and this one the error: the engine freezes the garbage collector after the warm-up, and
    # the memory would never go back.
    return owner, failure and failure.with_traceback(None)


def agreed_size(mine: ArenaSize | None, tell: Callable[[Any], list[Any]]) -> ArenaSize | None:
    """Returns the size of the arena for every rank of the server; None when any rank has none. tell: of a ``Place``."""
    found = tell(mine)
    return None if mine is None or None in found else mine.agreed(found)
