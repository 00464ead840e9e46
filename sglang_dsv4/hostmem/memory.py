"""Allocates and releases host copies in one pool's arena of equal units.

A copy is made whole or not at all; one that is forgotten must not keep its units.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.family import Family
from sglang_dsv4.cache.packed import Tail, align
from sglang_dsv4.errors import CopyConsumed, HostMemoryExhausted
from sglang_dsv4.hostmem.arena import Arena
from sglang_dsv4.hostmem.pool import UnitNumbers, UnitPool
from sglang_dsv4.hostmem.populate import system_page
from sglang_dsv4.hostmem.sharing import Sharers
from sglang_dsv4.hostmem.sizing import ArenaSize
from sglang_dsv4.hostmem.split import split
from sglang_dsv4.hostmem.tickets import Tickets
from sglang_dsv4.streams import Event

logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 30  # most bytes registered at once, in whole units: some hosts refuse more than 96 GiB


class UnitCache(Protocol):
    """Holds units beyond any request, and gives them up when a copy needs them."""

    def make_room(self, units: int) -> None:
        """Gives units back until so many are available; none where all would not be enough."""

    def units(self) -> UnitNumbers:
        """Returns its units."""


class Detached(Protocol):
    """Holds a copy's part outside the arena, such as the rows that HiSparse has on the host already."""

    def release(self) -> None:
        """Gives the part back, unless it was adopted; called once, with the copy's units."""


@dataclass(eq=False)
class Lease:
    """Holds the units of the ``number``-th copy. Outlives its HostCopy: a dead handle can be reclaimed."""

    units: UnitNumbers
    number: int
    held: bool = True
    used_by: Event | None = None  # the last transfer that touches the units
    ticket: int = 0  # of that transfer
    gathered: Event | None = None  # after it the save reads nothing of the request; the next save records it again
    detached: Detached | None = None  # the part of the copy outside the arena


class Run(NamedTuple):
    """Names units of a copy that are neighbours in the arena: their bytes there, and those of the tail or its pages."""

    arena: int  # offset of the first byte
    start: int  # offset of the same byte behind the first of the units that were asked for
    nbytes: int


@dataclass(eq=False)
class HostCopy:
    """Owns the host units of a saved request and describes their content. Made by ``HostMemory.allocate``.

    The engine's request owns it. ``release`` gives the units back; loading does so too.
    A handle that dies unreleased gives them back as well, but that is counted as a leak.
    """

    tokens: int
    geometry: Geometry
    memory: HostMemory
    lease: Lease
    begins: int  # the page of its first unit; the pages before it have another holder
    in_tail: int  # how many of its units, the last ones, are its tail
    shares: tuple[
        range, ...
    ]  # by rank of the arena, the part that it saves: indices of ``units``; before: saved before
    rank: int  # this rank's number among them
    weight_version: Any = None
    checksums: Any = None  # with DSV4_VERIFY, see ``transfer.verify``
    search: Any = None  # the answer of a save that did not wait, until it is asked for
    draft_begins: Any = None  # the request's entry of that table, on the device (see ``DeviceBuffers``)

    @property
    def units(self) -> UnitNumbers:
        """Unit numbers, of the pages and then of the tail; only while held."""
        self.require_held()
        return self.lease.units

    @property
    def tail_units(self) -> UnitNumbers:
        """Unit numbers of the tail."""
        return self.units[self.in_pages :]

    @property
    def in_pages(self) -> int:
        """How many of its units, the first ones, are pages."""
        return len(self.lease.units) - self.in_tail

    @property
    def first_page(self) -> int:
        """The pages before it were saved before."""
        return self.begins + self.shares[0].start

    @property
    def nbytes(self) -> int:
        """Bytes of all its units."""
        return len(self.lease.units) * self.memory.units.nbytes

    @property
    def saved_bytes(self) -> int:
        """Bytes of the units that this rank saves."""
        return len(self.share) * self.memory.units.nbytes

    def pages(self, first_page: int, end: int | None = None) -> UnitNumbers:
        """Returns the units of the pages from ``first_page`` to ``end`` - 1; None: to the last."""
        last = self.in_pages if end is None else end - self.begins
        return self.units[first_page - self.begins : last]

    @property
    def share(self) -> range:
        """The part that this rank saves, as indices of ``units``."""
        return self.shares[self.rank]

    @property
    def page_share(self) -> range:
        """The pages that this rank saves."""
        first, last = (self.begins + min(edge, self.in_pages) for edge in (self.share.start, self.share.stop))
        return range(first, last)

    @property
    def tail_share(self) -> range:
        """The part of ``tail_units`` that this rank saves, as indices."""
        first, last = (max(0, edge - self.in_pages) for edge in (self.share.start, self.share.stop))
        return range(first, last)

    def tail_runs(self, part: range | None = None) -> Iterator[Run]:
        """Yields the bytes of the tail in the units of ``part`` (None: in all), neighbours together."""
        units, size = self.tail_units, self.memory.units.nbytes
        part = range(self.in_tail) if part is None else part
        end = self.memory.tail(self.tokens).nbytes
        for first, last in self.memory.runs(units[part.start : part.stop]):
            start = (part.start + first) * size
            nbytes = min((part.start + last) * size, end) - start  # a stage's own tail may be shorter than agreed
            if nbytes > 0:
                yield Run(self.memory.offset(units[part.start + first]), start, nbytes)

    def saver(self, index: int) -> int:
        """Returns the rank that saves unit number ``index`` of its units."""
        return next(rank for rank, share in enumerate(self.shares) if index in share)

    @property
    def released(self) -> bool:
        """Returns whether the units were given back."""
        return not self.lease.held

    def require_held(self) -> None:
        """Raises CopyConsumed after a load or a release."""
        if self.released:
            raise CopyConsumed(f"this copy of {self.tokens} tokens was already loaded or released")

    def release(self) -> None:
        """Gives the units back, to be reused after the last transfer; safe to call twice."""
        self.memory.release(self.lease)

    def hand_over(self) -> None:
        """Gives the units, which nothing else holds, to the cache of the memory; the copy is released then."""
        self.require_held()
        self.memory.release(self.lease, to_cache=True)

    def __del__(self) -> None:
        if self.lease.held:
            self.memory.died(self.lease)


class HostMemory:
    """Owns arena, unit pool and accounting. Not thread-safe: the scheduler thread owns it."""

    def __init__(
        self,
        families: Sequence[Family],
        size: ArenaSize,
        pin: bool,
        on_release: Callable[[int, int], None] = lambda copies, held_bytes: None,
        sharers: Sharers | None = None,
        keep_file: bool = False,
    ) -> None:
        """Reserves the arena; ranks that share it must make the same calls in the same order.

        families: of the pool. on_release: called after each release with the copies still alive and their bytes.
        sharers, keep_file: see ``Arena``. Raises HostMemoryExhausted, also where ``size`` is too small for a request.
        """
        self.units = size.required().units
        self.families = families
        self._tails = [Tail.of(families, tokens) for tokens in range(2 * self.units.page_size)]
        stride = self.units.nbytes
        # A page of the system cannot be registered twice: each part begins with one.
        whole = system_page() // math.gcd(system_page(), stride)  # units that end with a page
        self.chunk = max(whole, CHUNK_BYTES // stride // whole * whole)  # units that are registered together
        cuts = [unit * stride for unit in range(self.chunk, size.count, self.chunk)]
        behind = align(size.count * stride, system_page())
        end = behind + size.count * self.units.host_rows
        cuts += range(behind, end, CHUNK_BYTES)
        self.arena = Arena(align(end, system_page()), pin, cuts, sharers, keep_file)
        # Of each unit's page the rows that the engine keeps on the host: [units, bytes].
        self.host_rows = self.arena.region[behind:end].view(size.count, self.units.host_rows)
        self.rank, self.ranks = (0, 1) if sharers is None else (sharers.rank, sharers.ranks)
        self.pool = UnitPool(size.count)
        self.tickets = Tickets(self.arena.board)
        self._leases: dict[int, Lease] = {}
        self._handed_out = 0
        # Leases of handles that died. A handle can die inside any call here (garbage collection), so it only
        # queues its lease; the next call reclaims it.
        self._dead: deque[Lease] = deque()
        self._unreleased: list[int] = []  # numbers of those that held units
        self._leaks = 0
        self._on_release = on_release
        self.cache: UnitCache | None = None

    def offset(self, unit: int) -> int:
        """Returns the byte at which ``unit`` starts in the arena."""
        return unit * self.units.nbytes

    def bytes_of(self, unit: int) -> torch.Tensor:
        """Returns the bytes of ``unit``, 1-D uint8, a view."""
        return self.arena.region[self.offset(unit) : self.offset(unit + 1)]

    def tail(self, tokens: int) -> Tail:
        """Returns the layout of the tail of ``tokens`` tokens."""
        return self._tails[self.units.alike(tokens)]

    def runs(self, units: UnitNumbers) -> Iterator[tuple[int, int]]:
        """Yields (first, past last) index of each run of neighbours in ``units``; no copy may cross a chunk's end."""
        if not units:
            return
        chunk, pairs = self.chunk, enumerate(pairwise(units), 1)
        breaks = [at for at, (before, unit) in pairs if unit != before + 1 or unit % chunk == 0]
        yield from pairwise([0, *breaks, len(units)])

    def allocate(
        self, tokens: int, geometry: Geometry, weight_version: Any = None, saved: Sequence[int] = (), begins: int = 0,
        tail: bool = True,
    ) -> HostCopy:  # fmt: skip
        """Takes units for a HostCopy, or raises HostMemoryExhausted and takes none.

        saved: units of its first pages that hold their bytes already; the copy holds them, too. begins: the first page
        that needs a unit. tail: whether it has one.
        May wait for transfers of the units' former owners. Call ``touched`` once its own are enqueued.
        """
        in_tail = self.units.tail(tokens) if tail else 0
        in_pages = self.units.pages(tokens) - begins - len(saved)
        taken = [*saved]
        self.pool.hold(taken)  # first: to make room must not free them
        try:
            self._require_room(in_pages + in_tail, tokens)
            for count in (in_pages, in_tail):  # each a run where it can be
                taken += self.pool.take(count, self.tickets.now)
            self.tickets.reach(self.pool.last_ticket(taken[len(saved) :]))
        except BaseException:  # no one else knows these units
            self.pool.give_back(taken)
            raise
        shares = split(self.ranks, in_pages + in_tail, len(saved))
        copy = self._handed_out_copy(tokens, geometry, weight_version, taken, begins, in_tail, shares)
        if saved:
            copy.lease.ticket = self.pool.last_ticket([*saved])
        return copy

    def lend(
        self, tokens: int, geometry: Geometry, weight_version: Any, pages: Sequence[int], tail: Sequence[int]
    ) -> HostCopy:
        """Makes a HostCopy of units that another holder keeps: all pages of ``tokens`` tokens, and their tail."""
        units = [*pages, *tail]
        self.pool.hold(units)
        shares = split(self.ranks, 0, len(units))
        copy = self._handed_out_copy(tokens, geometry, weight_version, units, 0, len(tail), shares)
        copy.lease.ticket = self.pool.last_write(units)
        return copy

    def _require_room(self, count: int, tokens: int) -> None:
        if not self.has_room(count) or self._dead or self._unreleased:
            self._reclaim_dead(not self.has_room(count))
        if not self.has_room(count) and self.cache is not None:
            self.cache.make_room(count)
        if not self.has_room(count):
            short, size = count - self.pool.available, self.units.cost
            raise HostMemoryExhausted(
                f"{tokens} tokens need {count} units of {size} bytes, {self.pool.available} of {self.pool.total} are "
                f"free: raise DSV4_HOST_GB (short of {short * size / 2**30:.3f} GiB)"
            )

    def has_room(self, count: int) -> bool:
        """Returns whether ``count`` units are free."""
        return count <= self.pool.available

    def _handed_out_copy(
        self, tokens: int, geometry: Geometry, weight_version: Any, units: UnitNumbers, begins: int, in_tail: int,
        shares: tuple[range, ...],
    ) -> HostCopy:  # fmt: skip
        self._handed_out += 1
        lease = Lease(units, self._handed_out)
        self._leases[lease.number] = lease
        return HostCopy(tokens, geometry, self, lease, begins, in_tail, shares, self.rank, weight_version)

    def touched(self, copy: HostCopy) -> None:
        """Marks the units of ``copy``, whose transfer was enqueued, as in use until ``used_by`` has passed."""
        lease = copy.lease
        lease.ticket = self.tickets.issue(lease.used_by)
        self.pool.touch(lease.units, lease.ticket, copy.shares[0].start)

    def wait_for_shares(self, copy: HostCopy) -> None:
        """Waits until every rank's part of ``copy`` is on the host. A rank alone has its transfers in order."""
        if self.arena.board is not None:
            self.tickets.reach(copy.lease.ticket)

    def release(self, lease: Lease, to_cache: bool = False) -> None:
        """Gives a copy's units back, to be reused after its last transfer. A second call does nothing.

        to_cache: the cache gets them, instead.
        """
        if not lease.held:
            return
        lease.held = False
        del self._leases[lease.number]
        (self.pool.hand_over if to_cache else self.pool.give_back)(lease.units)
        if lease.detached is not None:
            lease.detached.release()
        if not to_cache:  # the cache's units are not counted, nor was this copy yet
            self._on_release(len(self._leases), self._held_bytes())

    def died(self, lease: Lease) -> None:
        """Notes that the handle of ``lease`` died without a release; may be called at any time, on any thread."""
        self._dead.append(lease)

    def _held_bytes(self) -> int:
        return (self.pool.held - self.pool.evictable) * self.units.cost

    def _reclaim_dead(self, short: bool = False) -> None:
        """Gives back the units of handles that died without a release, and counts them.

        A handle dies when its process collects garbage. So ranks that share reclaim those dead on all of them, and ask
        only when units are ``short``, which they are on every rank at once.
        """
        self._note_dead()
        reclaimed = sorted(self._unreleased)
        if self.arena.board is not None:
            reclaimed = self.arena.board.common(reclaimed) if short else []
        self._reclaim(reclaimed)

    def _note_dead(self) -> None:
        for _ in range(len(self._dead)):
            lease = self._dead.popleft()
            if lease.held:
                self._unreleased.append(lease.number)

    def _reclaim(self, numbers: list[int]) -> None:
        for number in numbers:
            self._unreleased.remove(number)
            self._leaks += 1
            logger.warning("a host copy died without release; its units are reclaimed (leak %d)", self._leaks)
            self.release(self._leases[number])

    def close(self) -> None:
        """Unpins the arena, with nothing being copied. Copies still alive become unusable.

        Dead handles are counted without asking the other ranks.
        """
        self._note_dead()
        self._reclaim(sorted(self._unreleased))
        for lease in list(self._leases.values()):
            self.release(lease)
        self.arena.close()

    @property
    def leaks(self) -> int:
        """Handles that died without a release so far."""
        self._reclaim_dead()
        return self._leaks

    @property
    def copies(self) -> int:
        """Copies alive."""
        self._reclaim_dead()
        return len(self._leases)

    @property
    def held_bytes(self) -> int:
        """Bytes of the units held by live copies, those that the cache holds, too, among them."""
        self._reclaim_dead()
        return self._held_bytes()

    def check_integrity(self) -> None:
        """Raises AssertionError when a unit is lost, doubled, or counted wrongly."""
        self._reclaim_dead()
        held = [unit for lease in self._leases.values() for unit in lease.units]
        self.pool.check_integrity(held, () if self.cache is None else self.cache.units())
