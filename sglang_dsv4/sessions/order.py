"""Orders points for eviction: by rank and priority, then the one used longest ago first."""

from __future__ import annotations

import bisect
import heapq
import time
from collections import OrderedDict
from collections.abc import Iterator

from sglang_dsv4.hostmem.pool import UnitPool
from sglang_dsv4.sessions.hints import HELD, Hints, Rank
from sglang_dsv4.sessions.trie import Page, Point, Trie

PLAIN = Hints()
LAST_RESORT = Hints(rank=Rank.EXPIRED)
SUPERSEDED = Hints(priority=-1)  # a later point of its request is kept, too


class EvictionOrder:
    """Holds every point at its place. clock: seconds; ranks have clocks of their own."""

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self.clock = time.monotonic
        self._places: dict[tuple[int, int], OrderedDict[Point, None]] = {}
        self._sorted: list[tuple[int, int]] = []  # the places; clients name as many as they like
        self._ends: dict[int, tuple[float, Point]] = {}  # of those whose rank has an end, by their numbers
        self._due: list[tuple[float, int]] = []  # these ends, and some that no longer hold: a heap
        self.held_points = 0  # retained and pinned ones
        self.held_pages: dict[Page, int] = {}  # how many of those need it
        self.changes = 0  # points that came, went, or got another place

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def __iter__(self) -> Iterator[Point]:
        """Yields all points, the first to go first."""
        for place in self._sorted:
            yield from self._places[place]

    def place(self, point: Point, hints: Hints) -> None:
        """Puts a point, which may have a place already, where ``hints`` want it, behind those used before."""
        self.remove(point)
        point.order = order = (hints.rank, hints.priority)
        place = self._places.get(order)
        if place is None:
            place = self._places[order] = OrderedDict()
            bisect.insort(self._sorted, order)
        place[point] = None
        if hints.rank in HELD:
            self._hold(point, 1)
        if hints.ttl_seconds is not None:
            end = self.clock() + hints.ttl_seconds
            self._ends[point.number] = end, point
            heapq.heappush(self._due, (end, point.number))
            if len(self._due) > 2 * len(self._ends) + 64:
                self._due = [(end, number) for number, (end, _) in self._ends.items()]
                heapq.heapify(self._due)

    def used(self, point: Point) -> None:
        """Puts a point behind the others of its rank."""
        if point.order == (SUPERSEDED.rank, SUPERSEDED.priority):
            self.place(point, PLAIN)
        else:
            self._places[point.order].move_to_end(point)

    def remove(self, point: Point) -> None:
        """Forgets a point, if it has a place."""
        self.changes += 1
        place = self._places.get(point.order)
        if place is not None and point in place:
            del place[point]
            if point.order[0] in HELD:
                self._hold(point, -1)
            if not place:
                del self._places[point.order]
                del self._sorted[bisect.bisect_left(self._sorted, point.order)]
        self._ends.pop(point.number, None)

    def clear(self) -> None:
        """Forgets every point."""
        self._places.clear()
        self._sorted.clear()
        self._ends.clear()
        self._due.clear()
        self.held_points = 0
        self.held_pages.clear()

    @property
    def timed(self) -> bool:
        """Returns whether a point's rank has an end; the same on every rank."""
        return bool(self._ends)

    def ended(self) -> list[int]:
        """Returns the numbers of the points whose time is over on this rank's clock, until they are ``expire``d."""
        now, over = self.clock(), []
        while self._due and self._due[0][0] <= now:
            end, number = heapq.heappop(self._due)
            if number in self._ends and self._ends[number][0] == end:
                over.append((end, number))
        for one in over:
            heapq.heappush(self._due, one)
        return [number for _, number in over]

    def expire(self, numbers: list[int]) -> None:
        """Lets those points go first, in the order in which they got their places."""
        over = set(numbers)
        for point in [point for number, (_, point) in self._ends.items() if number in over] if over else ():
            self.place(point, LAST_RESORT)

    def held_with(self, last: Page | None, new: int, point: Point | None) -> tuple[int, int]:
        """Counts pages and windows of retained and pinned points, with one ``new`` pages behind ``last``.

        point: that one, if it has a place.
        """
        known = [] if last is None else self._trie.path(last)
        pages = len(self.held_pages) + sum(page not in self.held_pages for page in known) + new
        return pages, self.held_points + (point is None or point.order[0] not in HELD)

    def first_to_go(
        self, pool: UnitPool, missing: int, over: int, most: tuple[int, int] | None, for_point: bool
    ) -> list[Point] | None:
        """Returns the points that make room, the first to go first; None where all of them are not enough.

        missing: units of ``pool`` to be freed. over: of those that points hold, to be given up. most: the rank and
        priority beyond which none goes. for_point: the room is for one.
        """
        points, found = iter(self), list[Point]()
        gone = dict[Page, int]()
        while over > 0 or missing > 0:
            point = next(points, None)
            if point is None or (most is not None and point.order > most):
                return None
            waits = not for_point and pool.is_shared(point.page)  # its copy has these units
            if point.tail is None and (waits or self._trie.is_used(point.page)):
                continue  # without it there is no more room
            found.append(point)
            freed = self._trie.freed_with(point, gone) + (point.tail or [])
            missing -= sum(not pool.is_shared(unit) for unit in freed)
            over -= len(freed)
        return found

    def _hold(self, point: Point, by: int) -> None:
        self.held_points += by
        for page in self._trie.path(point.page):
            needed = self.held_pages[page] = self.held_pages.get(page, 0) + by
            if not needed:
                del self.held_pages[page]
