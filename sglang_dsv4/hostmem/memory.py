"""Allocates and releases host copies in one pool's arena, which has a region for each group.

A copy is made whole or not at all; one that is forgotten must not keep its blocks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.groups import KVCacheGroupSpec
from sglang_dsv4.errors import CopyConsumed, HostMemoryExhausted
from sglang_dsv4.hostmem.arena import Arena
from sglang_dsv4.hostmem.blocks import BlockPool, Blocks
from sglang_dsv4.hostmem.regions import GroupRegion
from sglang_dsv4.hostmem.sharing import Sharers
from sglang_dsv4.hostmem.split import Share, split
from sglang_dsv4.hostmem.turns import Turns
from sglang_dsv4.streams import Event

logger = logging.getLogger(__name__)

SETTING_OF = {
    Group.PAGED: "DSV4_HOST_GB",
    Group.WINDOW: "DSV4_HOST_COPIES (or DSV4_HOST_GB)",
    Group.REQUEST: "DSV4_HOST_COPIES (or DSV4_HOST_GB)",
}


class Tenant(Protocol):
    """Holds blocks beyond any request, and gives them up when a copy needs them."""

    def make_room(self, needs: dict[Group, int]) -> None:
        """Gives blocks back until so many of each group are available; none where all would not be enough."""

    def blocks(self) -> dict[Group, Blocks]:
        """Returns its blocks."""


class Detached(Protocol):
    """Holds a copy's part outside the arena, such as the rows that HiSparse has on the host already."""

    def release(self) -> None:
        """Gives the part back, unless it was adopted; called once, with the copy's blocks."""


@dataclass(eq=False)
class Lease:
    """Holds the blocks of the ``number``-th copy. Outlives its HostCopy: a dead handle can be reclaimed."""

    blocks: dict[Group, Blocks]
    number: int
    held: bool = True
    used_by: Event | None = None  # the last transfer that touches the blocks
    turn: int = 0  # of that transfer
    gathered: Event | None = None  # after it the save reads nothing of the request; the next save records it again
    detached: Detached | None = None  # the part of the copy outside the arena


@dataclass(eq=False)
class HostCopy:
    """Owns the host blocks of a saved request and describes their content. Made by ``HostMemory.allocate``.

    The engine's request owns it. ``release`` gives the blocks back; loading does so too.
    A handle that dies unreleased gives them back as well, but that is counted as a leak.
    first_page: the pages before it were saved before. begins: the first page of which it has a block: those before it
    have another holder. nbytes: of all its blocks.
    shares: the part that each of the ranks that share the arena saves; rank: this one's number among them.
    search: the answer of a save that did not wait, until it is asked for; then None.
    draft_begins: the request's entry of that table, on the device (see ``DeviceBuffers``).
    """

    tokens: int
    geometry: Geometry
    memory: HostMemory
    lease: Lease
    nbytes: int
    begins: int
    first_page: int
    shares: tuple[Share, ...]
    rank: int
    weight_version: Any = None
    checksums: Any = None
    search: Any = None
    draft_begins: Any = None

    @property
    def blocks(self) -> dict[Group, Blocks]:
        """Block numbers by group; only while held."""
        self.require_held()
        return self.lease.blocks

    def blocks_of(self, first_page: int, end: int | None = None) -> Blocks:
        """Returns the paged blocks of the pages from ``first_page`` to ``end`` - 1; None: to the last."""
        return self.blocks[Group.PAGED][first_page - self.begins : None if end is None else end - self.begins]

    @property
    def share(self) -> Share:
        """The part that this rank saves."""
        return self.shares[self.rank]

    @property
    def released(self) -> bool:
        """Returns whether the blocks were given back."""
        return not self.lease.held

    def require_held(self) -> None:
        """Raises CopyConsumed after a load or a release."""
        if self.released:
            raise CopyConsumed(f"this copy of {self.tokens} tokens was already loaded or released")

    def release(self) -> None:
        """Gives the blocks back, to be reused after the last transfer; safe to call twice."""
        self.memory.release(self.lease)

    def hand_over(self) -> None:
        """Gives the blocks, which nothing else holds, to the tenant of the memory; the copy is released then."""
        self.require_held()
        self.memory.release(self.lease, to_tenant=True)

    def __del__(self) -> None:
        if self.lease.held:
            self.memory.died(self.lease)


class HostMemory:
    """Owns arena, block pools and accounting. Not thread-safe: the scheduler thread owns it."""

    def __init__(
        self,
        specs: dict[Group, KVCacheGroupSpec],
        counts: dict[Group, int],
        pin: bool,
        on_release: Callable[[int, int], None] = lambda copies, held_bytes: None,
        sharers: Sharers | None = None,
    ) -> None:
        """Reserves the arena; ranks that share it must make the same calls in the same order.

        on_release: called after each release with the copies still alive and their bytes. sharers: see ``Arena``.
        """
        self.regions: dict[Group, GroupRegion] = {}
        end = 0
        for group, spec in specs.items():
            self.regions[group] = GroupRegion.of(spec, end, counts[group])
            end += self.regions[group].nbytes
        cuts = [start for region in self.regions.values() for start in region.chunk_starts if start]
        self.arena = Arena(end, pin, cuts, sharers)
        self.rank, self.ranks = (0, 1) if sharers is None else (sharers.rank, sharers.ranks)
        self.pools = {group: BlockPool(group, region.blocks) for group, region in self.regions.items()}
        self.turns = Turns(self.arena.board)
        self._leases: dict[int, Lease] = {}
        self._handed_out = 0
        # Leases of handles that died. A handle can die inside any call here (garbage collection), so it only
        # queues its lease; the next call reclaims it.
        self._dead: deque[Lease] = deque()
        self._unreleased: list[int] = []  # numbers of those that held blocks
        self._leaks = 0
        self._on_release = on_release
        self.tenant: Tenant | None = None

    def region_tensor(self, group: Group) -> torch.Tensor:
        """Returns the group's bytes, 1-D uint8, a view."""
        region = self.regions[group]
        return self.arena.region[region.start : region.start + region.nbytes]

    def offset(self, group: Group, block: int) -> int:
        """Returns the byte at which block number ``block`` of ``group`` starts in the arena."""
        region = self.regions[group]
        return region.start + block * region.packed.block_stride

    def blocks_for(self, tokens: int) -> dict[Group, int]:
        """Counts the blocks that a copy of ``tokens`` needs, by group; none of a group without blocks and bytes."""
        return {
            group: region.spec.blocks_for(tokens) if region.blocks or region.packed.block_stride else 0
            for group, region in self.regions.items()
        }

    def allocate(
        self, tokens: int, geometry: Geometry, weight_version: Any = None, saved: dict[Group, Blocks] | None = None,
        groups: Collection[Group] = tuple(Group), begins: int = 0,
    ) -> HostCopy:  # fmt: skip
        """Takes blocks of ``groups`` for a HostCopy, or raises HostMemoryExhausted and takes none.

        saved: blocks of its first pages, and of other groups, that hold its bytes already; the copy holds them, too.
        begins: the first page that needs a block.
        May wait for transfers of the blocks' former owners. Call ``touched`` once its own are enqueued.
        """
        needs = {group: count if group in groups else 0 for group, count in self.blocks_for(tokens).items()}
        needs[Group.PAGED] = max(0, needs[Group.PAGED] - begins)  # a stage without paged families has none
        taken: dict[Group, Blocks] = {}
        last = 0
        for group, blocks in (saved or {}).items():  # held first: to make room must not free them
            self.pools[group].hold(blocks)
            taken[group] = blocks
            needs[group] -= len(blocks)
        try:
            self._require_room(needs, tokens)
            for group, count in needs.items():
                new = self.pools[group].take(count, self.turns.now)
                taken[group] = [*taken.get(group, ()), *new]
                last = max(last, self.pools[group].last_turn(new))
            self.turns.reach(last)
        except BaseException:  # no one else knows these blocks
            for group, blocks in taken.items():
                self.pools[group].give_back(blocks)
            raise
        copy = self._handed_out_copy(tokens, geometry, weight_version, taken, needs, begins)
        if saved:
            copy.lease.turn = max(self.pools[group].last_turn(blocks) for group, blocks in saved.items())
        return copy

    def _require_room(self, needs: dict[Group, int], tokens: int) -> None:
        short = self.short_of(needs)
        if short is not None or self._dead or self._unreleased:
            self._reclaim_dead(short is not None)
            short = self.short_of(needs)
        if short is not None and self.tenant is not None:
            self.tenant.make_room(needs)
            short = self.short_of(needs)
        if short is not None:
            self._refuse(short, needs[short], tokens)

    def _handed_out_copy(
        self, tokens: int, geometry: Geometry, weight_version: Any, blocks: dict[Group, Blocks], new: dict[Group, int],
        begins: int,
    ) -> HostCopy:  # fmt: skip
        self._handed_out += 1
        lease = Lease(blocks, self._handed_out)
        self._leases[lease.number] = lease
        nbytes = sum(len(numbers) * self.regions[group].packed.block_stride for group, numbers in blocks.items())
        payload = {group: region.packed.payload_end if new[group] else 0 for group, region in self.regions.items()}
        first = begins + len(blocks[Group.PAGED]) - new[Group.PAGED]
        shares = split(self.ranks, new[Group.PAGED], payload, first)
        return HostCopy(tokens, geometry, self, lease, nbytes, begins, first, shares, self.rank, weight_version)

    def saved_bytes(self, copy: HostCopy) -> int:
        """Counts the bytes of the blocks of ``copy`` that this rank saves."""
        share, blocks, regions = copy.share, copy.blocks, self.regions
        rows = sum(regions[group].packed.block_stride * len(blocks[group]) for group in share.groups)
        return (share.last - share.first) * regions[Group.PAGED].packed.block_stride + rows

    def touched(self, copy: HostCopy) -> None:
        """Marks the blocks of ``copy``, whose transfer was enqueued, as in use until ``used_by`` has passed."""
        lease = copy.lease
        lease.turn = self.turns.end(lease.used_by)
        for group, numbers in lease.blocks.items():
            self.pools[group].touch(numbers, lease.turn)

    def wait_for_shares(self, copy: HostCopy) -> None:
        """Waits until every rank's part of ``copy`` is on the host. A rank alone has its transfers in order."""
        if self.arena.board is not None:
            self.turns.reach(copy.lease.turn)

    def short_of(self, needs: dict[Group, int]) -> Group | None:
        """Returns a group of which fewer blocks are free than ``needs``; None where all are there."""
        for group, count in needs.items():
            if count > self.pools[group].available:
                return group
        return None

    def _refuse(self, group: Group, count: int, tokens: int) -> None:
        pool, stride = self.pools[group], self.regions[group].packed.block_stride
        short = (count - pool.available) * stride / 2**30
        raise HostMemoryExhausted(
            f"{tokens} tokens need {count} {group.value} blocks of {stride} bytes, {pool.available} of "
            f"{pool.total} are free: raise {SETTING_OF[group]} (short of {short:.3f} GiB)"
        )

    def release(self, lease: Lease, to_tenant: bool = False) -> None:
        """Gives a copy's blocks back, to be reused after its last transfer. A second call does nothing.

        to_tenant: the tenant gets them, instead.
        """
        if not lease.held:
            return
        lease.held = False
        del self._leases[lease.number]
        for group, numbers in lease.blocks.items():
            (self.pools[group].hand_over if to_tenant else self.pools[group].give_back)(numbers)
        if lease.detached is not None:
            lease.detached.release()
        if not to_tenant:  # the tenant's blocks are not counted, nor was this copy yet
            self._on_release(len(self._leases), self._held_bytes())

    def died(self, lease: Lease) -> None:
        """Notes that the handle of ``lease`` died without a release; may be called at any time, on any thread."""
        self._dead.append(lease)

    def _held_bytes(self) -> int:
        return sum(
            (pool.held - pool.idle) * self.regions[group].packed.block_stride for group, pool in self.pools.items()
        )

    def _reclaim_dead(self, short: bool = False) -> None:
        """Gives back the blocks of handles that died without a release, and counts them.

        A handle dies when its process collects garbage. So ranks that share reclaim those dead on all of them, and ask
        only when blocks are ``short``, which they are on every rank at once.
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
            logger.warning("a host copy died without release; its blocks are reclaimed (leak %d)", self._leaks)
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
        """Bytes of the blocks held by live copies, those that the tenant holds, too, among them."""
        self._reclaim_dead()
        return self._held_bytes()

    def check_integrity(self) -> None:
        """Raises AssertionError when a block is lost, doubled, or counted wrongly in any group."""
        self._reclaim_dead()
        for group, pool in self.pools.items():
            held = [block for lease in self._leases.values() for block in lease.blocks[group]]
            pool.check_integrity(held, () if self.tenant is None else self.tenant.blocks()[group])
        end = sum(region.nbytes for region in self.regions.values())
        if end != self.arena.nbytes:
            raise AssertionError(f"regions cover {end} bytes, the arena has {self.arena.nbytes}")
