"""Owns what is kept of requests that have ended: pages and points, the host units that they hold, their eviction.

A retract that finds no room takes the units of the points that are evicted first, never the other way.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from sglang_dsv4.hostmem.memory import HostCopy, HostMemory
from sglang_dsv4.hostmem.pool import UnitNumbers
from sglang_dsv4.metrics import SessionCounters
from sglang_dsv4.sessions.hints import HELD, Hints, Rank
from sglang_dsv4.sessions.lookup import LookUp
from sglang_dsv4.sessions.order import PLAIN, EvictionOrder
from sglang_dsv4.sessions.trie import Key, Page, Point, Trie

FEW, ENOUGH = 80, 20  # where less than an 80th of the room is free, points go until a 20th is,
AHEAD = 2048  # or so many units more are, which takes some milliseconds of a pass


class Kept:
    """Holds the pages and points of one rank. Their store alone adds to them; a copy that needs room takes it here.

    page, bigram: see ``Trie``. most_bytes: that they may hold; None: all that no retract holds.
    """

    def __init__(
        self, memory: HostMemory, page: int, bigram: bool, most_bytes: int | None, counters: SessionCounters
    ) -> None:  # fmt: skip
        self._memory, self._pool, self._cost, self._counters = memory, memory.pool, memory.units.cost, counters
        self._page = page
        self.in_tail = memory.units.tail(page)  # units of a point's window: alike at every page end
        total, bound = memory.pool.total, None if most_bytes is None else most_bytes // self._cost
        self.most = total if bound is None else min(total, bound)  # units that may be held here
        self.few = self.most // FEW
        self.enough = min(self.most // ENOUGH, self.few + AHEAD)
        self._tried_ahead: tuple[int, int, int] | None = None  # all that decided when room was last made ahead
        self.trie = Trie(page, bigram)
        self.order, self.lookup = EvictionOrder(self.trie), LookUp(self.trie, page)
        self.checksums: dict[Page, int] = {}  # with DSV4_VERIFY
        self.windows = self._pages = self._made = 0  # points with one; pages; points so far
        self.on_gone: Callable[[Iterable[Page]], None] = lambda pages: None  # called with each page that went
        memory.cache = self

    @property
    def held(self) -> int:
        """Counts the units held here."""
        return self._pages + self.windows * self.in_tail

    @property
    def held_bytes(self) -> int:
        """Counts their bytes."""
        return self.held * self._cost

    def units(self) -> UnitNumbers:
        """Returns every unit held here."""
        return [*self.trie.pages(), *self._tails()]

    def _tails(self) -> Iterator[int]:
        return itertools.chain.from_iterable(point.tail or () for point in self.order)

    # ------------------------------------------------------------------------------------------------------ come

    def add(self, namespace: Hashable, behind: Page | None, keys: Sequence[Key], copy: HostCopy) -> list[Page]:
        """Adds the pages of ``keys`` behind that page, in the units of ``copy``, which still holds them."""
        first = self.trie.depth(behind)
        pages = copy.pages(first, first + len(keys))
        self._pages += len(pages)
        self.trie.add(namespace, behind, keys, pages)
        return pages

    def put(self, namespace: Hashable, page: Page, tail: UnitNumbers | None, hints: Hints) -> Point:
        """Puts a point at the end of ``page``. tail: the units of its window, if it has one."""
        self._made += 1
        point = Point(page, self.trie.depth(page) * self._page, tail, self._made)
        self.trie.put(namespace, point)
        self.order.place(point, hints)
        self.windows += tail is not None
        return point

    def leaving_half(self, hints: Hints, last: Page | None, new: int, point: Point | None) -> Hints:
        """Returns ``hints`` of a point ``new`` pages behind ``last``, without a rank that leaves others too little.

        Retained and pinned points count together, and take at most half. point: that one, if it is kept already.
        """
        if hints.rank not in HELD:
            return hints
        pages, windows = self.order.held_with(last, new, point)
        if 2 * (pages + windows * self.in_tail) <= self.most:
            return hints
        self._counters.hinted(((HELD[hints.rank], "full"),))
        return dataclasses.replace(hints, rank=Rank.PLAIN, priority=0, ttl_seconds=None)

    # ------------------------------------------------------------------------------------------------------ go

    def expire(self) -> None:
        """Lets points whose time is over go first. Ranks agree on them: their clocks differ."""
        if self.order.timed:
            numbers, board = self.order.ended(), self._memory.arena.board
            self.order.expire(numbers if board is None else board.common(numbers))

    def make_room(self, units: int) -> None:
        """Evicts points until a copy finds ``units``, on each rank; see ``hostmem.memory.UnitCache``."""
        self.expire()
        self.find_room(units, "retract", for_point=False)

    def evict_ahead(self) -> None:
        """Lets plain points go before a save needs room, several sessions at once: so it finds neighbouring units.

        By counts alone, which are the same on all ranks.
        """
        now = self.order.changes, self._pool.available, self._pool.evictable
        if now != self._tried_ahead and not self._has_room(self.few, for_point=True):
            self.find_room(self.enough, "room", PLAIN)
            self._tried_ahead = now

    def _has_room(self, units: int, for_point: bool) -> bool:
        return self._memory.has_room(units) and (not for_point or self.held + units <= self.most)

    def find_room(self, units: int, reason: str, most: Hints | None = None, for_point: bool = True) -> bool:
        """Evicts points until ``units`` are free, and may be held here if they are ``for_point``.

        most: the hints beyond whose rank and priority none is evicted. Returns whether there is room; else none is.
        """
        if self._has_room(units, for_point):
            return True
        over = self.held + units - self.most if for_point else 0
        last = None if most is None else (most.rank, most.priority)
        points = self.order.first_to_go(self._pool, units - self._pool.available, over, last, for_point)
        for point in points or ():
            self.let_go(point, reason)
        return points is not None

    def let_go(self, point: Point, reason: str) -> None:
        """Gives up a point that is here, and the pages that nothing else needs."""
        self.order.remove(point)
        self.lookup.forget(point)
        if point.tail is not None:
            self.windows -= 1
            self._pool.forget(point.tail)
            self._counters.add("evicted", 1, reason)
        self._give_back(self.trie.take(point))

    def done_with(self, last: Page | None) -> None:
        """Lets the pages up to ``last`` go, in use until now, where nothing needs them any more."""
        self.trie.used = None
        if last is not None and (gone := self.trie.prune(last)):
            self._give_back(gone)

    def _give_back(self, pages: list[Page]) -> None:
        self._pages -= len(pages)
        self._pool.forget(pages)
        self.on_gone(pages)
        for page in pages if self.checksums else ():
            self.checksums.pop(page, None)

    def clear(self, reason: str) -> None:
        """Lets go of everything at once: a hundred thousand pages, one by one, hold the scheduler up."""
        if self.windows:
            self._counters.add("evicted", self.windows, reason)
        self._pool.forget([*self._tails()])
        gone = self.trie.clear()
        self._pool.forget(gone)
        self.on_gone(gone)
        self.checksums.clear()
        self.order.clear()
        self.lookup.clear()
        self.windows = self._pages = 0

    def check_integrity(self) -> None:
        """Raises AssertionError unless pages and points are those that the trie holds, each needed by one."""
        self.trie.check_integrity()
        pages, points = self.trie.pages(), set(self.order)
        assert sum(point.tail is not None for point in points) == self.windows
        assert all(len(point.tail) == self.in_tail for point in points if point.tail is not None)
        assert len(pages) == self._pages, (len(pages), self._pages)
        assert points == set(self.trie.point.values())
        assert self.checksums.keys() <= set(pages)
        held = (point for point in points if point.order[0] in HELD)
        assert self.order.held_pages == Counter(page for point in held for page in self.trie.path(point.page))
        self.lookup.check_integrity(points)
        assert self.trie.used is None
