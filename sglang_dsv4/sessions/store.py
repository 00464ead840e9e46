"""Keeps the cache of requests that have ended, and gives it to the next turn: host blocks, by the pages of a trie.

A *point* is a page end with the window before it on the host, and every page before it. There nothing of a request's
slot lives, so that a prompt that begins with these tokens can go on from it. Blocks have holders: the pages and points
here, and the copy of a transfer while it is made. A retract that finds no room takes the blocks of the points that are
evicted first, never the other way.

Ranks that share the arena keep the same points without asking each other: tokens, order and a vote at each save are the
same on all of them. What their clocks say is agreed on, once a pass.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.rows import Int64s
from sglang_dsv4.errors import HostCopyError, IndexMismatch, WindowNotMapped
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.metrics import SessionCounters
from sglang_dsv4.pools.copy_service import CopyService
from sglang_dsv4.sessions.hints import Hints, Rank
from sglang_dsv4.sessions.trie import Page, Point, Trie
from sglang_dsv4.transfer import verify

logger = logging.getLogger(__name__)

FEWEST_TOKENS = 1024  # of a point: health checks and short chats evict no agent

NO_HINTS, EXPIRED = Hints(), Hints(rank=Rank.EXPIRED)


class SessionStore:
    """Owns the points of one rank and the host blocks under them. The scheduler thread owns it.

    most_bytes: that it may hold; None: all that no retract holds. pairs: see ``Trie``.
    """

    def __init__(
        self, host: CopyService, swa_map: Callable[[], torch.Tensor], pairs: bool, most_bytes: int | None
    ) -> None:
        self._host, self._memory, self._swa_map = host, host.memory, swa_map
        self._page = host.buffers.geometry.page_size
        self._trie = Trie(self._page, pairs)
        self._stride = {group: region.packed.block_stride for group, region in self._memory.regions.items()}
        self._most_bytes = most_bytes
        # Points by the order of eviction; in each, the one used last at the end.
        self._order: dict[tuple[int, int], OrderedDict[Point, None]] = {}
        self._unchecked: list[tuple[Page, HostCopy]] = []  # first new page of a save whose search is not known
        self._timed: dict[Point, float] = {}  # the ends of their time, on this rank's clock
        self._made = 0
        self._clock = time.monotonic
        self._weights = host.context.weight_version()
        self._pages = 0
        self.counters = SessionCounters()
        self._memory.tenant = self

    # ------------------------------------------------------------------------------------------------- what is kept

    @property
    def points(self) -> int:
        """Counts the points."""
        return sum(map(len, self._order.values()))

    @property
    def held_bytes(self) -> int:
        """Counts the bytes of the blocks held here."""
        return self._bytes_of({Group.PAGED: self._pages, Group.WINDOW: self.points})

    @property
    def version(self) -> int:
        """Changes with each point that comes or goes: what was looked up before may be another then."""
        return self._trie.version

    def blocks(self) -> dict[Group, Int64s]:
        """Returns every block held here."""
        return {
            Group.PAGED: _numbers(page.block for page in self._trie.pages()),
            Group.WINDOW: _numbers(point.window for points in self._order.values() for point in points),
            Group.REQUEST: _numbers(()),
        }

    # ---------------------------------------------------------------------------------------------------- look up

    def longest(self, namespace: Hashable, tokens: Any, limit: int) -> Point | None:
        """Returns the last point among the first ``limit`` of ``tokens``."""
        return self._trie.longest(namespace, self._trie.keys(tokens, limit - self._trie.ahead))

    def last_end(self, tokens: int) -> int:
        """Returns the last page end of a request of which ``tokens`` tokens are computed and known."""
        return max(0, tokens - self._trie.ahead) // self._page * self._page

    # ------------------------------------------------------------------------------------------------------ keep

    def keep(self, namespace: Hashable, tokens: Any, slots: torch.Tensor, hints: Hints = NO_HINTS) -> Point | None:
        """Keeps the point at the end of ``slots``, the full slots of the first tokens, in whole pages.

        tokens: at least those, and with drafts one more. hints: of its request; they take the place of earlier ones.
        Only the pages and the window that are not here yet are copied. Nothing may write them until the copy is over
        (``pages_in_use``). Returns the point; None where there is no room, or the save failed, which is counted.
        """
        started = time.perf_counter()
        keys = self._trie.keys(tokens, len(slots))
        assert len(keys) * self._page == len(slots)
        self._expire()
        known = self._trie.walk(namespace, keys)
        if len(known) == len(keys) and known[-1].point is not None:
            self._place(known[-1].point, hints)
            return known[-1].point
        with self._using(known):
            copy = self._save(slots, known)
            if copy is None:
                return None
            for group, blocks in copy.blocks.items():
                self._memory.pools[group].hold(blocks[copy.first_page if group is Group.PAGED else 0 :])
            added = self._trie.add(namespace, keys, copy.blocks[Group.PAGED][copy.first_page :].tolist())
            self._pages += len(added)
            self._made += 1
            point = Point((added or known)[-1], len(slots), int(copy.blocks[Group.WINDOW][0]), self._made)
            if copy.checksums is not None:
                self._spread(copy.checksums, added, copy.first_page, point)
            self._trie.put(point)
            self._place(point, hints)
            if copy.search is not None:
                self._unchecked.append(((added or known)[0 if added else -1], copy))
            self._tell(copy, len(added), time.perf_counter() - started)
            copy.release()
        return point

    def _tell(self, copy: HostCopy, pages: int, seconds: float) -> None:
        self.counters.kept(self._memory.saved_bytes(copy), seconds)
        self.counters.holds(self.points, self.held_bytes)
        logger.info(
            "kept %d tokens, %d pages and %.1f MB of them new, in %.2f ms; %d points, %.2f GiB", copy.tokens, pages,
            copy.nbytes / 1e6, seconds * 1e3, self.points, self.held_bytes / 2**30,
        )  # fmt: skip

    @contextmanager
    def _using(self, pages: list[Page]) -> Iterator[None]:
        """Keeps ``pages``, though the points behind them may go."""
        for last in pages[-1:]:
            last.using += 1
        try:
            yield
        finally:
            for last in pages[-1:]:
                last.using -= 1
                self._give_back(self._trie.prune(last))

    def _spread(self, checksums: verify.Checksums, added: list[Page], first: int, point: Point) -> None:
        """Gives each new page the checksums of its pieces, and the point those of the window."""
        paged = {family.name for family in self._host.buffers.families if family.whole_pages}
        point.checksums = {place: value for place, value in checksums.items() if place[0] not in paged}
        for place, value in checksums.items():
            if place[0] in paged:
                page = added[place[3] - first]
                page.checksums = (page.checksums or {}) | {place: value}

    def _save(self, slots: torch.Tensor, known: list[Page]) -> HostCopy | None:
        needs = {Group.PAGED: len(slots) // self._page - len(known), Group.WINDOW: 1}
        if self._would_fit(needs, len(known)):
            self._evict_until(lambda: self._fits(needs), "room")
        if not self._fits(needs):
            return None
        try:
            return self._host.save_point(slots, self._swa_map(), _numbers(page.block for page in known))
        except HostCopyError as error:
            self._host.counters.fallback(type(error).__name__, f"a session's point at {len(slots)} tokens: {error}")
        return None

    def _fits(self, needs: dict[Group, int]) -> bool:
        if self._most_bytes is not None and self.held_bytes + self._bytes_of(needs) > self._most_bytes:
            return False
        return all(count <= self._memory.pools[group].available for group, count in needs.items())

    def _would_fit(self, needs: dict[Group, int], known: int) -> bool:
        """Returns whether ``needs`` fit once all is evicted but ``known`` pages; else nothing must go for them."""
        least = self._bytes_of(needs) + known * self._stride[Group.PAGED]
        if self._most_bytes is not None and least > self._most_bytes:
            return False
        mine = {Group.PAGED: self._pages - known, Group.WINDOW: self.points}
        return all(self._memory.pools[group].available + mine.get(group, 0) >= count for group, count in needs.items())

    def _bytes_of(self, blocks: dict[Group, int]) -> int:
        return sum(count * self._stride[group] for group, count in blocks.items())

    # ------------------------------------------------------------------------------------------------------ load

    def load(self, point: Point, slots: torch.Tensor, first_page: int) -> int:
        """Writes the pages from ``first_page`` on, and the window, to ``slots``; returns the bytes.

        Ordered before later work of the current stream. The point stays. Raises as ``CopyService.load``.
        """
        path = point.page.path()
        blocks = {Group.PAGED: _numbers(page.block for page in path), Group.WINDOW: _numbers((point.window,))}
        checksums = None
        if point.checksums is not None:
            checksums = dict(point.checksums)
            for page in path:
                checksums |= page.checksums or {}
        self._host.load_point(blocks, slots, self._swa_map(), first_page, checksums)
        self._used(point)
        self.counters.verified += checksums is not None
        return (len(path) - first_page) * self._stride[Group.PAGED] + self._stride[Group.WINDOW]

    def went_on(self, point: Point, tokens: int, first_page: int, nbytes: int) -> None:
        """Counts a request that has ``tokens`` tokens more of its prefix after a load from ``first_page`` on."""
        alone = (first_page + 1) * self._page == point.tokens
        self.counters.went_on("window" if alone else "pages", tokens, nbytes)

    def _used(self, point: Point) -> None:
        self._order[point.order].move_to_end(point)

    # ----------------------------------------------------------------------------------------------- order, limits

    def _place(self, point: Point, hints: Hints) -> None:
        """Puts a point, which may have a place already, where ``hints`` want it."""
        rank = hints.rank
        if rank is Rank.PINNED and not self._may_pin(point):
            rank = Rank.RETAINED
            self.counters.hinted((("kv.pin", "full"),))
        self._take_out(point)
        point.order = (rank, hints.priority)
        self._order.setdefault(point.order, OrderedDict())[point] = None
        self._timed.pop(point, None)
        if hints.ttl_seconds is not None:
            self._timed[point] = self._clock() + hints.ttl_seconds

    def _take_out(self, point: Point) -> None:
        """Takes a point out of the order, and its place if that is empty then: clients choose the priorities."""
        points = self._order.get(point.order, OrderedDict())
        points.pop(point, None)
        if not points:
            self._order.pop(point.order, None)

    def _may_pin(self, point: Point) -> bool:
        """Returns whether pins stay below half of the blocks with this one."""
        pinned = {point, *(p for order, points in self._order.items() if order[0] is Rank.PINNED for p in points)}
        pages = sum(p.tokens for p in pinned) // self._page
        pools = self._memory.pools
        return 2 * pages <= pools[Group.PAGED].total and 2 * len(pinned) <= pools[Group.WINDOW].total

    def _expire(self) -> None:
        """Lets points whose time is over go first. Ranks agree on those: their clocks differ."""
        if not self._timed:
            return
        now = self._clock()
        over = {point.number: point for point, end in self._timed.items() if end <= now}
        board = self._memory.arena.board
        for number in list(over) if board is None else board.common(list(over)):
            self._place(over[number], EXPIRED)

    # --------------------------------------------------------------------------------------------------- let go

    def make_room(self, needs: dict[Group, int]) -> None:
        """Evicts points until a copy finds ``needs``, as far as they go; see ``hostmem.memory.Tenant``."""
        pools, mine = self._memory.pools, {Group.PAGED: self._pages, Group.WINDOW: self.points}
        if all(pools[group].available + mine.get(group, 0) >= count for group, count in needs.items()):
            self._evict_until(lambda: all(pools[g].available >= count for g, count in needs.items()), "retract")

    def _evict_until(self, enough: Callable[[], bool], reason: str) -> None:
        while not enough() and (point := self._first_to_go()) is not None:
            self._let_go(point, reason)

    def _first_to_go(self) -> Point | None:
        return next(iter(self._order[min(self._order)])) if self._order else None

    def _let_go(self, point: Point, reason: str) -> None:
        self._take_out(point)
        self._timed.pop(point, None)
        self._give_back(self._trie.take(point))
        self._memory.pools[Group.WINDOW].give_back(_numbers((point.window,)))
        self.counters.let_go(reason)

    def _give_back(self, pages: list[Page]) -> None:
        self._pages -= len(pages)
        self.counters.holds(self.points, self.held_bytes)
        self._memory.pools[Group.PAGED].give_back(_numbers(page.block for page in pages))

    def settle(self) -> None:
        """Checks the saves since the last pass, and drops all points if the weights changed. Once a pass, on each rank.

        The pages of a save that found a request at fault are worthless, and so is all that was built on them.
        """
        unchecked, self._unchecked = self._unchecked, []
        for first, copy in unchecked:
            if not self._host.true_on_every_rank(self._is_right(copy)):
                for page in list(first.below()):
                    if page.point is not None:
                        self._let_go(page.point, "fault")
        if self._host.context.weight_version() != self._weights:
            self.clear("weights")

    def _is_right(self, copy: HostCopy) -> bool:
        try:
            self._host.check_search(copy)
        except (IndexMismatch, WindowNotMapped) as error:
            self._host.counters.fallback(type(error).__name__, f"a session's point at {copy.tokens} tokens: {error}")
            return False
        return True

    def clear(self, reason: str) -> None:
        """Lets go of everything."""
        self._weights = self._host.context.weight_version()
        self._evict_until(lambda: False, reason)

    def check_integrity(self) -> None:
        """Raises AssertionError unless pages and points are those that the trie holds, each needed by one."""
        pages = list(self._trie.pages())
        points = {point for group in self._order.values() for point in group}
        assert len(pages) == self._pages, (len(pages), self._pages)
        assert points == {page.point for page in pages if page.point is not None}
        assert all(page.children or page.point for page in pages), "a page that nothing needs"
        assert not any(page.using for page in pages)


def _numbers(blocks: Iterator[int] | tuple[int, ...]) -> Int64s:
    return np.fromiter(blocks, np.int64)
