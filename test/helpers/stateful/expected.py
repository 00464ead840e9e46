"""Lists the points and pages that a store of sessions should hold, and evicts them one by one, slowly."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import oracle

from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.sessions.hints import HELD, Hints, Rank
from stateful.pool import PAGE

Rows = dict[oracle.RowKey, bytes]
Prompt = tuple[str, tuple[int, ...]]  # a namespace, a token a page, and the token behind them

done: Counter[str] = Counter()  # what the machine did; "steps" counts the rules it ran


@dataclass(eq=False)
class Saved:
    """Holds the bytes of a page, as its first save read them."""

    rows: Rows


@dataclass(eq=False)
class Kept:
    """Models a point."""

    prompt: Prompt
    way: list[Any]  # the keys of its pages
    window: Rows | None  # None: the pages alone
    rank: Rank = Rank.PLAIN
    priority: int = 0
    ends: float | None = None
    placed: int = 0  # when its hints were taken
    used: int = 0

    @property
    def order(self) -> tuple[int, int]:
        return self.rank, self.priority


@dataclass(eq=False)
class Away:
    """Models a retracted request: its pages, some of which points have, too, and its other rows, in ``tail`` units."""

    copy: HostCopy
    prompt: Prompt
    pages: list[Saved]
    rest: Rows
    tail: int
    tokens: int


class Expected:
    """Holds the points, the pages under them, and the retracted requests.

    total: units, of ``unit`` bytes each; the window before a page end takes ``tail`` of them. most: bytes that points
    may hold. bigram: a page's key has the token behind it, too.
    """

    few = enough = 0

    def __init__(self, total: int, unit: int, tail: int, most: int | None, bigram: bool) -> None:
        self.total, self.unit, self.tail, self.bigram = total, unit, tail, bigram
        self.most = total * unit if most is None else min(most, total * unit)
        self.points: list[Kept] = []
        self.pages: dict[Any, Saved] = {}
        self.away: list[Away] = []
        self.faults: list[Saved | Kept] = []  # the first page, or the point alone, of a wrong save, not settled
        self.now, self._turn = 0.0, 0
        self.is_clean = True  # no weights changed since the last flush

    # ------------------------------------------------------------------------------------------------ look up

    def way(self, prompt: Prompt) -> list[Any]:
        """Returns the keys of the pages of ``prompt``."""
        namespace, values = prompt
        return [(namespace, values[: end + self.bigram]) for end in range(1, len(values))]

    def find(self, way: list[Any]) -> Kept | None:
        """Returns the point at the end of ``way``."""
        return next((point for point in self.points if point.way == way), None)

    def longest(self, way: list[Any]) -> Kept | None:
        """Returns the last point with a window on ``way``."""
        found = (self.find(way[:end]) for end in range(len(way), 0, -1))
        return next((point for point in found if point is not None and point.window is not None), None)

    def known(self, way: list[Any]) -> list[Any]:
        """Returns the keys of ``way`` whose pages are here."""
        return [key for key in way if key in self.pages]

    def order(self) -> list[Kept]:
        """Returns all points, the first to go first."""
        return sorted(self.points, key=lambda point: (*point.order, point.used))

    @property
    def windows(self) -> int:
        """Counts the points with a window."""
        return sum(point.window is not None for point in self.points)

    @property
    def away_pages(self) -> set[Saved]:
        """Returns the pages of retracted requests."""
        return {page for away in self.away for page in away.pages}

    def nbytes(self) -> int:
        """Counts the bytes of the units under the points."""
        return (len(self.pages) + self.windows * self.tail) * self.unit

    def away_bytes(self) -> int:
        """Counts the bytes of the units under the retracted requests."""
        return (len(self.away_pages) + sum(away.tail for away in self.away)) * self.unit

    def free(self) -> int:
        """Counts the units that nobody holds."""
        pages = {*self.pages.values(), *self.away_pages}
        return self.total - len(pages) - self.windows * self.tail - sum(away.tail for away in self.away)

    # ------------------------------------------------------------------------------------------------- what comes

    def keep(
        self, prompt: Prompt, rows: Rows, hints: Hints, right: bool, refused: bool, window: bool, behind: Kept | None
    ) -> bool:
        """Keeps the last page end of ``prompt``, with ``rows``. Returns whether there is a point then.

        right: else it goes when the save is settled. refused: at once. window: else the pages alone. behind: the point
        that the request left before.
        """
        self.expire()
        if not self.is_clean:
            done["kept when not clean"] += 1
            return False
        way = self.way(prompt)
        kept = self.find(way)
        hints = self._allowed(hints, way, kept)
        if kept is not None and (kept.window is not None or not window):
            if hints.rank is Rank.PLAIN and kept.order > (Rank.PLAIN, 0):
                kept.used = self._next()
                done["hints left"] += 1
            else:
                self._place(kept, hints)
            done["kept already"] += 1
            return True
        known = self.known(way)
        needs = len(way) - len(known) + self.tail * window
        if not self.find_room(needs, known, (hints.rank, hints.priority)) or refused:
            self.prune()
            return False
        for number, key in enumerate(way):
            self.pages.setdefault(key, Saved(page_of(rows, number)))
        if (before := self.find(way)) is not None:  # the pages alone
            self.points.remove(before)
            done["superseded pages"] += 1
        kept = Kept(prompt, way, rest_of(rows) if window else None)
        self.points.append(kept)
        self._place(kept, hints)
        if behind in self.points and behind.window is None:
            self.points.remove(behind)
            done["partial given up"] += 1
        if not right:
            self.faults.append(self.pages[way[len(known)]] if len(known) < len(way) else kept)
        return True

    def adopt(self, prompt: Prompt, pages: list[Saved], count: int) -> None:
        """Keeps the first ``count`` of a retracted request's ``pages``, the first to go."""
        if not self.is_clean:
            return
        way = self.way(prompt)[:count]
        new = [key for key in way if key not in self.pages]
        if new and self.nbytes() + len(new) * self.unit <= self.most:
            self.pages |= {key: page for key, page in zip(way, pages, strict=False) if key in new}
            kept = Kept(prompt, way, None, Rank.EXPIRED)
            self.points.append(kept)
            kept.placed = kept.used = self._next()
            done["adopted"] += 1

    def loaded(self, point: Kept) -> None:
        """Notes that a prompt went on from ``point``."""
        point.used = self._next()
        if point.order == (Rank.PLAIN, -1):
            point.priority, point.placed = 0, point.used

    def supersede(self, point: Kept) -> None:
        """Lets ``point`` go before others."""
        if point.order == (Rank.PLAIN, 0):
            point.priority, point.ends = -1, None
            point.placed = point.used = self._next()
            done["superseded"] += 1

    def expire(self) -> None:
        """Lets points whose time is over go first."""
        for point in sorted(self.points, key=lambda point: point.placed):
            if point.ends is not None and point.ends <= self.now:
                point.rank, point.priority, point.ends = Rank.EXPIRED, 0, None
                point.used = point.placed = self._next()
                done["expired"] += 1

    def _next(self) -> int:
        self._turn += 1
        return self._turn

    def _place(self, point: Kept, hints: Hints) -> None:
        point.rank, point.priority = hints.rank, hints.priority
        point.ends = None if hints.ttl_seconds is None else self.now + hints.ttl_seconds
        point.placed = point.used = self._next()

    def _allowed(self, hints: Hints, way: list[Any], kept: Kept | None) -> Hints:
        if hints.rank not in HELD:
            return hints
        held = [other for other in self.points if other.rank in HELD and other is not kept]
        pages = len({*way, *(key for other in held for key in other.way)})
        if 2 * (pages + (len(held) + 1) * self.tail) * self.unit <= self.most:
            return hints
        done["too many held"] += 1
        return replace(hints, rank=Rank.PLAIN, priority=0, ttl_seconds=None)

    # -------------------------------------------------------------------------------------------------- what goes

    def find_room(self, needs: int, used: list[Any] | None = None, last: Any = None) -> bool:
        """Evicts as the store should. used: keys of pages that stay.

        last: the order of the point that needs the room, beyond which none goes; None: a retract needs it.
        """
        before, count = (list(self.points), dict(self.pages)), 0
        for first in self.order():
            if self.has_room(needs, last) or (last is not None and first.order > last):
                break
            waits = last is None and self.pages[first.way[-1]] in self.away_pages
            if first.window is None and (waits or first.way[-1] in (used or ())):
                continue  # to evict it frees nothing
            self.points.remove(first)
            self.prune(used)
            count += 1
        if not self.has_room(needs, last):
            self.points, self.pages = before
            done["no room, and none evicted"] += 1
            return False
        done["evicted"] += count
        return True

    def evict_ahead(self) -> None:
        """Makes room for ``enough`` where there is none for ``few``, by points that nobody holds."""
        before = len(self.points)
        if not self.has_room(self.few, last := (Rank.PLAIN, 0)):
            self.find_room(self.enough, None, last)
        done["evicted ahead"] += before - len(self.points)

    def has_room(self, needs: int, last: Any) -> bool:
        """Returns whether ``needs`` units are free, and may be held by points where one of that order needs them."""
        return self.free() >= needs and (last is None or self.nbytes() + needs * self.unit <= self.most)

    def prune(self, used: list[Any] | None = None) -> None:
        """Lets pages go that no point needs. used: keys of pages that stay."""
        needed = {key for point in self.points for key in point.way} | set(used or ())
        self.pages = {key: page for key, page in self.pages.items() if key in needed}

    def settle(self) -> None:
        """Lets wrong saves go, and all that was built on their pages."""
        for fault in self.faults:
            self.points = [
                point for point in self.points if fault not in (point, *(self.pages.get(key) for key in point.way))
            ]
            done["found wrong"] += 1
            self.prune()
        self.faults = []

    def clear(self) -> None:
        """Lets all points go."""
        self.points, self.pages = [], {}


def tokens_of(prompt: Prompt) -> array[int]:
    """Returns the tokens of ``prompt``: those of its pages, and the one behind them."""
    return array("q", [value for value in prompt[1] for _ in range(PAGE)])[: (len(prompt[1]) - 1) * PAGE + 1]


def is_page(where: oracle.RowKey) -> bool:
    """Returns whether a row is of a page, not of a window or a slot."""
    return oracle.grows(where[0])


def page_of(rows: Rows, number: int) -> Rows:
    """Returns the rows of one page."""
    return {where: value for where, value in rows.items() if is_page(where) and where[2] // PAGE == number}


def rest_of(rows: Rows) -> Rows:
    """Returns the rows of no page."""
    return {where: value for where, value in rows.items() if not is_page(where)}
