"""Finds the longest kept beginning of a prompt: a trie of exact pages, with points where a prompt may go on.

    namespace -> page -> page -> page (point) -> page (point)
                            \\-> page (point)

A page's key is its token ids themselves, so two prompts share a page only where they are equal. With drafts a row also
depends on the next token, so there a key has one token more. A page is kept while a page or a point is behind it.

A page is the number of its host unit. Its fields lie in arrays and dicts by that number: there are a hundred thousand
pages, and a collection of garbage would visit an object for each of them, but it does not look into those.
"""

from __future__ import annotations

import itertools
import struct
from array import array
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Page = int  # its host unit, which may be another page's when it is gone
Key = bytes | memoryview  # its tokens
Name = bytes  # of a page that may go meanwhile: its entry, of which no other page ever has this very object

_NUMBER = struct.Struct("<q")
_packed, _packed_bytes = _NUMBER.pack, _NUMBER.size
_GONE = -(1 << 62)  # the parent of a page that went: no way leads over it


@dataclass(eq=False, slots=True)
class Point:
    """Marks the end of ``page``: there, behind ``tokens`` tokens, a prompt may go on.

    tail: the host units of its window; None: the pages alone are kept, for the copy of a request, and no prompt can go
    on there. number: of all points, in the order in which they were made. order: the rank and priority of its eviction,
    see ``hints``. checksums: of the units. node: of the engine's prefix tree that ends here, if known. from_store: it
    was read from a store, and nobody has gone on from it. sent: to a store, in that epoch of its writer.
    """

    page: Page
    tokens: int
    tail: list[int] | None
    number: int
    order: tuple[int, int] = (0, 0)
    checksums: list[int] | None = None
    node: Hashable = None
    from_store: bool = False
    sent: int = 0


class Found(NamedTuple):
    """Remembers a look-up, so that the next one of the same prompt goes on from it."""

    came: int  # of the last point that had come in its namespace
    page: Name | None  # the last kept page of the prompt
    point: Point | None  # the last point with a window on the way to it
    limit: int  # tokens of the prompt that were looked up


@dataclass(slots=True)
class _Namespace:
    """Stands before its first pages, and goes with the last of them."""

    name: Hashable
    number: int  # below 0; no other ever has it
    pages: int = 0  # the first ones
    came: int = 0  # the version with which its last point came


class Trie:
    """Keeps the pages of all namespaces. It owns no memory: its user is told which pages went.

    page: tokens a page. bigram: whether a key has the next token, too (``ahead``: how many).
    """

    def __init__(self, page: int, bigram: bool) -> None:
        self._page, self.ahead = page, int(bigram)
        self._numbers = itertools.count(1)
        self._namespaces: dict[Hashable, _Namespace] = {}
        self._numbered: dict[int, _Namespace] = {}
        self._pages: dict[bytes, Page] = {}  # by their entries: the parent's number and the key
        self._entries: dict[Page, bytes] = {}  # b"" where it is gone: a dict of the same keys need not grow
        self._parent = array("q")  # the page before; of a first page the number of its namespace
        self._depth = array("q")
        self._needs = array("q")  # how many need it: pages behind it, its point, a save that goes on from it
        self.point: dict[Page, Point] = {}  # of the pages that have one
        self._used: Page | None = None
        self.version = 0  # changes with each point that comes or goes

    def keys(self, tokens: Any, end: int, first: int = 0) -> Iterator[Key]:
        """Yields the keys of the whole pages of ``tokens`` (an int array) from position ``first`` to ``end``.

        A page is cut when it is asked for: most prompts part from all others in their first one. Keys are views of
        ``tokens``, which cannot grow while one is there.
        """
        count = max(0, min(len(tokens) - self.ahead, end)) // self._page
        is_ready = isinstance(tokens, array) and tokens.typecode == "q"
        ids = memoryview(tokens if is_ready else array("q", tokens[: count * self._page + self.ahead])).cast("B")
        step, more = 8 * self._page, 8 * self.ahead
        for start in range(first * 8, count * step, step):
            yield ids[start : start + step + more]

    def walk(self, namespace: Hashable, keys: Iterable[Key], behind: Page | None = None) -> list[Page]:
        """Returns the kept pages of the longest beginning of ``keys``. behind: the page that they follow, if any."""
        found: list[Page] = []
        if behind is None:
            if namespace not in self._namespaces:
                return found
            behind = self._namespaces[namespace].number
        for key in keys:
            page = self._pages.get(_packed(behind) + key)
            if page is None:
                break
            found.append(page)
            behind = page
        return found

    def came(self, namespace: Hashable) -> int:
        """Returns a number that grows when a point with a window comes in ``namespace``."""
        known = self._namespaces.get(namespace)
        return 0 if known is None else known.came

    def name(self, page: Page | None) -> Name | None:
        """Returns the name of ``page``, by which it is known while it may go."""
        return None if page is None else self._entries[page]

    def named(self, name: Name | None) -> Page | None:
        """Returns the page of that name; None where it is gone."""
        page = None if name is None else self._pages.get(name)
        return page if page is not None and self._entries[page] is name else None

    def key(self, page: Page) -> bytes:
        """Returns the key of ``page``: its tokens."""
        return self._entries[page][_packed_bytes:]

    def before(self, page: Page) -> Page | None:
        """Returns the page before; None before a first one."""
        parent = self._parent[page]
        return None if parent < 0 else parent

    def namespace(self, first: Page) -> Hashable:
        """Returns the name of the namespace whose first page is ``first``, or one of those."""
        return self._numbered[self._parent[first]].name

    def depth(self, page: Page | None) -> int:
        """Counts the pages up to ``page``; none before the first."""
        return 0 if page is None else self._depth[page]

    def path(self, page: Page) -> list[Page]:
        """Returns the pages from the first one to ``page``."""
        found = []
        while page >= 0:
            found.append(page)
            page = self._parent[page]
        return found[::-1]

    def last_point(self, page: Page | None) -> Point | None:
        """Returns the last point with a window on the way to ``page``."""
        while page is not None and page >= 0:
            point = self.point.get(page)
            if point is not None and point.tail is not None:
                return point
            page = self._parent[page]
        return None

    def add(self, namespace: Hashable, behind: Page | None, keys: Sequence[Key], pages: list[Page]) -> None:
        """Adds ``pages`` of ``keys``, none of which is kept. behind: as for ``walk``."""
        if not pages:
            return
        self._make_rows(max(pages) + 1)
        if behind is None:
            before = self._enter(namespace)
        else:
            before = behind
            self._needs[before] += 1
        depth = self.depth(behind)
        for key, page in zip(keys, pages, strict=True):
            entry, depth = _packed(before) + key, depth + 1
            self._pages[entry], self._entries[page] = page, entry
            self._parent[page], self._depth[page], self._needs[page] = before, depth, 1
            before = page
        self._needs[before] = 0

    def _make_rows(self, count: int) -> None:
        missing = bytes(8 * max(0, count - len(self._parent)))
        for column in (self._parent, self._depth, self._needs):
            column.frombytes(missing)

    def _enter(self, namespace: Hashable) -> int:
        """Returns the number of a namespace that gets one more first page."""
        known = self._namespaces.get(namespace)
        if known is None:
            known = self._namespaces[namespace] = _Namespace(namespace, -next(self._numbers))
            self._numbered[known.number] = known
        known.pages += 1
        return known.number

    def _leave(self, number: int) -> None:
        known = self._numbered[number]
        known.pages -= 1
        if not known.pages:
            del self._numbered[number], self._namespaces[known.name]

    def put(self, namespace: Hashable, point: Point) -> None:
        """Puts ``point`` at the end of its page, which has none."""
        assert point.page not in self.point
        self.point[point.page] = point
        self._needs[point.page] += 1
        self.version += 1
        if point.tail is not None:
            self._namespaces[namespace].came = self.version

    def stands(self, point: Point) -> bool:
        """Returns whether ``point`` was not taken away."""
        return self.point.get(point.page) is point

    def take(self, point: Point) -> list[Page]:
        """Takes a point away. Returns the pages that nothing needs any more; they are gone."""
        del self.point[point.page]
        self._needs[point.page] -= 1
        self.version += 1
        return self.prune(point.page)

    def clear(self) -> list[Page]:
        """Takes every page and point away; returns the pages."""
        gone = list(self._pages.values())
        for known in (self._namespaces, self._numbered, self._pages, self._entries, self.point):
            known.clear()
        for column in (self._parent, self._depth, self._needs):
            del column[:]
        self.version += 1
        return gone

    @property
    def used(self) -> Page | None:
        """Returns the page that a save goes on from, which stays though nothing is behind it."""
        return self._used

    @used.setter
    def used(self, page: Page | None) -> None:
        if self._used is not None:
            self._needs[self._used] -= 1
        if page is not None:
            self._needs[page] += 1
        self._used = page

    def is_used(self, page: Page) -> bool:
        """Returns whether a save goes on from ``page`` or from one behind it."""
        return self.used is not None and page in self.path(self.used)

    def freed_with(self, point: Point, gone: dict[Page, int]) -> list[Page]:
        """Returns the pages that nothing would need any more if ``point`` went, too.

        gone: by page, how many of those that need it went before ``point``. What goes with it is added.
        """
        freed, page = [], point.page
        lost = gone[page] = gone.get(page, 0) + 1
        while page >= 0 and self._needs[page] == lost:
            freed.append(page)
            page = self._parent[page]
            lost = gone[page] = gone.get(page, 0) + 1
        return freed

    def prune(self, page: Page) -> list[Page]:
        """Takes away ``page`` and those before it, as far as nothing needs them; returns them."""
        gone: list[Page] = []
        needs = self._needs[page]
        while not needs:
            before = self._parent[page]
            del self._pages[self._entries[page]]
            self._entries[page] = b""
            self._parent[page], self._depth[page] = _GONE, 0
            gone.append(page)
            if before < 0:
                self._leave(before)
                break
            needs = self._needs[before] = self._needs[before] - 1
            page = before
        return gone

    def pages(self) -> Collection[Page]:
        """Returns every page, each behind those before it."""
        return self._pages.values()

    def below(self, first: Page) -> list[Page]:
        """Returns ``first`` and all behind it, each before those that it is behind. It looks at every page."""
        found = {first: None}
        for page in self._pages.values():
            if self._parent[page] in found:
                found[page] = None
        return list(found)[::-1]

    def check_integrity(self) -> None:
        """Raises AssertionError unless all that is known is of the kept pages, and agrees."""
        pages = set(self._pages.values())
        assert self._pages == {entry: page for page, entry in self._entries.items() if entry}
        assert len(pages) == len(self._pages), "two pages in one unit"
        children = Counter(self._parent[page] for page in pages)
        for page, row in enumerate(zip(self._parent, self._depth, self._needs, strict=True)):
            if page not in pages:
                assert row[0] in {0, _GONE} and not any(row[1:]), "something of a page that is gone"
                continue
            parent, depth, needs = row
            assert needs, "a page that nothing needs"
            assert needs == children[page] + (page in self.point) + (page == self._used)
            assert self._entries[page].startswith(_packed(parent)) and (parent in pages or parent in self._numbered)
            assert depth == 1 + self.depth(parent if parent >= 0 else None)
        assert self.point.keys() <= pages
        assert all(point.page == page for page, point in self.point.items())
        assert self._numbered == {known.number: known for known in self._namespaces.values()}
        assert all(known.pages == children[number] for number, known in self._numbered.items())
