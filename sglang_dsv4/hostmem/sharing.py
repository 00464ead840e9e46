"""Lets the ranks of an attention-TP group on one machine share one arena.

Their cache is the same: a copy a rank would cost a node eight times the memory. One rank makes memory without a name,
the others open it through /proc: no file is left behind, however a process ends, and no size of /dev/shm limits it.

    exchange   each rank: its machine, its group, its process and open file, and a word written there
    (open)     the file of the first rank of its group and machine, and that word read
    exchange   errors: after one no rank shares, and all say why
    ...        then the arena is made in steps, each as ``together``: every rank has done it, or every rank knows
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dsv4.errors import ArenaNotShared
from sglang_dsv4.hostmem.fences import why_unordered

Exchange = Callable[[Any], list[Any]]

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
MEMORY_NAME = "sglang_dsv4"  # of each file, in /proc
_TROUBLES = (OSError, ValueError, OverflowError, MemoryError, RuntimeError)


class World(NamedTuple):
    """Describes the ranks of a server, as this one sees them.

    exchange: every rank's object, by rank; a collective. rank: this one's number in it. group: the same for ranks with
    the same requests and layers.
    """

    exchange: Exchange
    rank: int
    group: Hashable


class _Offer(NamedTuple):
    machine: str
    group: Hashable
    process: int
    file: int
    word: bytes


@dataclass
class Sharers:
    """Holds the ranks of this rank's group on its machine. rank: its number among them.

    local: of the server (a replica of it, with --dp-size) on this machine; arenas: of those. whole: whether the group
    has no rank elsewhere.
    """

    world: World
    rank: int
    ranks: int
    local: int
    arenas: int
    whole: bool
    _file: int

    def together(self, work: Callable[[], None]) -> None:
        """Does ``work`` on every rank of the server; raises ArenaNotShared on each when it failed on one."""
        trouble = None
        try:
            work()
        except _TROUBLES as error:
            trouble = str(error)
        _require_none(self.world.exchange(trouble))

    def resize(self, nbytes: int) -> None:
        """Makes the memory ``nbytes`` long and zero, once, before a rank maps it. The word in it has been read."""
        os.ftruncate(self._file, 0)
        os.ftruncate(self._file, nbytes)

    def map(self, nbytes: int) -> mmap.mmap:
        """Maps the memory into this process."""
        return mmap.mmap(self._file, nbytes)

    def duplicate(self) -> int:
        """Returns a file of the memory that outlives ``close``; its owner closes it."""
        return os.dup(self._file)

    def close(self) -> None:
        """Closes the file; mapped memory stays. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def find_sharers(world: World) -> Sharers | None:
    """Finds the ranks that share an arena with this one; None where no ranks of the server do. A collective.

    Raises ArenaNotShared, on every rank, where one of them cannot open the memory of another.
    """
    own, mine = _offer(world.group)
    try:
        found: list[_Offer | str] = world.exchange(mine)
        _require_none([offer if isinstance(offer, str) else None for offer in found])
        offers = [offer for offer in found if not isinstance(offer, str)]
        members = _members(offers, world.rank)
        if all(len(_members(offers, rank)) == 1 for rank in range(len(offers))):
            return None
        first, file, trouble = offers[members[0]], -1, None
        try:
            file = _open(first)
        except OSError as error:
            trouble = f"the memory of process {first.process} cannot be opened: {error}"
        try:
            _require_none(world.exchange(trouble))
        except BaseException:  # a collective that breaks off, too: the file has no owner then
            if file >= 0:
                os.close(file)
            raise
    finally:
        if own >= 0:
            os.close(own)
    here = [offer.group for offer in offers if offer.machine == offers[world.rank].machine]
    whole = sum(offer.group == world.group for offer in offers) == len(members)
    return Sharers(world, members.index(world.rank), len(members), len(here), len(set(here)), whole, file)


def machine() -> str:
    """Names this machine, alike in all containers. Raises OSError in some sandboxes."""
    return Path(_BOOT_ID).read_text().strip()


def _offer(group: Hashable) -> tuple[int, _Offer | str]:
    """Makes this rank's file and offer; without a file, -1 and the reason why this rank cannot share."""
    if (unordered := why_unordered()) is not None:
        return -1, unordered
    own, word = -1, secrets.token_bytes(16)
    try:
        own = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
        os.pwrite(own, word, 0)
        return own, _Offer(machine(), group, os.getpid(), own, word)
    except OSError as error:
        if own >= 0:
            os.close(own)
        return -1, f"memory without a name: {error}"


def _members(offers: list[_Offer], rank: int) -> list[int]:
    """Lists the ranks of ``rank``'s group on its machine, in order."""
    place = offers[rank][:2]
    return [number for number, offer in enumerate(offers) if offer[:2] == place]


def _open(offer: _Offer) -> int:
    """Opens the offered file. In a container another process may have that number: FileNotFoundError."""
    path, stranger = Path(f"/proc/{offer.process}/fd/{offer.file}"), f"process {offer.process} is another one here"
    if not str(path.readlink()).startswith(f"/memfd:{MEMORY_NAME}"):
        raise FileNotFoundError(stranger)
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.pread(file, len(offer.word), 0) != offer.word:
        os.close(file)
        raise FileNotFoundError(stranger)
    return file


def _require_none(troubles: list[str | None]) -> None:
    for rank, trouble in enumerate(troubles):
        if trouble is not None:
            raise ArenaNotShared(f"rank {rank}: {trouble}")
