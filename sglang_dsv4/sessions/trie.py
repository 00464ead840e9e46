"""Finds the longest kept beginning of a prompt: a trie of exact pages, with points where a prompt may go on.

    namespace -> page -> page -> page (point) -> page (point)
                            \\-> page (point)

A page's key is its token ids themselves, so two prompts share a page only where they are equal. With drafts a row also
depends on the next token, so there a key has one token more. A page is kept while a page or a point is behind it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(eq=False, slots=True)
class Page:
    """Holds one page of tokens behind ``parent``, in the host unit ``unit``. A namespace's first is no page.

    There are a hundred thousand of them, and a collection of garbage looks at each container that they have.
    """

    parent: Page | None
    key: Hashable
    number: int  # of all pages
    unit: int = -1
    depth: int = 0  # of the first page 1
    children: int = 0
    point: Point | None = None
    checksum: int | None = None  # of its unit, with DSV4_VERIFY
    holds: int = 0  # retained and pinned points that need it, see ``EvictionOrder``

    def path(self) -> list[Page]:
        """Returns the pages from the first one to this."""
        found, page = [], self
        while page.parent is not None:
            found.append(page)
            page = page.parent
        return found[::-1]


def last_point(page: Page | None) -> Point | None:
    """Returns the last point with a window on the way to ``page``."""
    while page is not None:
        if page.point is not None and page.point.tail is not None:
            return page.point
        page = page.parent
    return None


@dataclass(eq=False, slots=True)
class Point:
    """Marks the end of ``page``: there, behind ``tokens`` tokens, a prompt may go on.

    tail: the host units of its window; None: the pages alone are kept, for the copy of a request, and no prompt can go
    on there. number: of all points, in the order in which they were made. order: the rank and priority of its eviction,
    see ``hints``. checksums: of the units. node: of the engine's prefix tree that ends here, if known.
    """

    page: Page
    tokens: int
    tail: list[int] | None
    number: int
    order: tuple[int, int] = (0, 0)
    checksums: list[int] | None = None
    node: Hashable = None


class Found(NamedTuple):
    """Remembers a look-up, so that the next one of the same prompt goes on from it."""

    came: int  # of the last point that had come in its namespace
    page: Page | None  # the last kept page of the prompt
    point: Point | None  # the last point with a window on the way to it
    limit: int  # tokens of the prompt that were looked up


class Trie:
    """Keeps the pages of all namespaces. It owns no memory: its user is told which pages and points went.

    page: tokens a page. pairs: whether a key has the next token, too (``ahead``: how many).
    """

    def __init__(self, page: int, pairs: bool) -> None:
        self._page, self.ahead = page, int(pairs)
        self._first: dict[Hashable, Page] = {}
        self._pages: dict[tuple[int, Hashable], Page] = {}  # by the number of the page before and their key
        self._numbers = itertools.count()
        self._came: dict[Hashable, int] = {}  # by namespace, the version with which its last point came
        self.used: Page | None = None  # a save goes on from it, so that it stays though nothing is behind it
        self.version = 0  # changes with each point that comes or goes

    def keys(self, tokens: Any, end: int, first: int = 0) -> Iterator[bytes]:
        """Yields the keys of the whole pages of ``tokens`` (an int array) from position ``first`` to ``end``.

        A page is cut when it is asked for: most prompts part from all others in their first one.
        """
        count = max(0, min(len(tokens) - self.ahead, end)) // self._page
        is_ready = isinstance(tokens, array) and tokens.typecode == "q"
        ids = memoryview(tokens if is_ready else array("q", tokens[: count * self._page + self.ahead])).cast("B")
        step, more = 8 * self._page, 8 * self.ahead
        for start in range(first * 8, count * step, step):
            yield ids[start : start + step + more].tobytes()

    def walk(self, namespace: Hashable, keys: Iterable[bytes], behind: Page | None = None) -> list[Page]:
        """Returns the kept pages of the longest beginning of ``keys``. behind: the page that they follow, if any."""
        found: list[Page] = []
        page = behind or self._first.get(namespace)
        if page is None:
            return found
        for key in keys:
            page = self._pages.get((page.number, key))
            if page is None:
                break
            found.append(page)
        return found

    def came(self, namespace: Hashable) -> int:
        """Returns a number that grows when a point with a window comes in ``namespace``."""
        return self._came.get(namespace, 0)

    def add(self, namespace: Hashable, behind: Page | None, keys: list[bytes], units: list[int]) -> list[Page]:
        """Adds pages of ``keys``, none of which is kept, in ``units``; returns them. behind: as for ``walk``."""
        page = behind or self._first.setdefault(namespace, Page(None, namespace, next(self._numbers)))
        added: list[Page] = []
        for key, unit in zip(keys, units, strict=True):
            page.children += 1
            new = self._pages[page.number, key] = Page(page, key, next(self._numbers), unit, page.depth + 1)
            added.append(new)
            page = new
        return added

    def put(self, namespace: Hashable, point: Point) -> None:
        """Puts ``point`` at the end of its page, which has none."""
        assert point.page.point is None
        point.page.point = point
        self.version += 1
        if point.tail is not None:
            self._came[namespace] = self.version

    def take(self, point: Point) -> list[Page]:
        """Takes a point away. Returns the pages that nothing needs any more; they are gone."""
        point.page.point = None
        self.version += 1
        return self.prune(point.page)

    def clear(self) -> list[Page]:
        """Takes every page and point away; returns the pages."""
        gone = list(self._pages.values())
        for page in gone:
            page.point = None
        self._pages.clear()
        self._first.clear()
        self._came.clear()
        self.version += 1
        return gone

    def has(self, page: Page) -> bool:
        """Returns whether ``page`` is still kept."""
        return page.parent is not None and self._pages.get((page.parent.number, page.key)) is page

    def is_used(self, page: Page) -> bool:
        """Returns whether a save goes on from ``page`` or from one behind it."""
        return self.used is not None and page in self.used.path()

    def freed_with(self, point: Point, going: set[Point], gone: dict[Page, int]) -> list[Page]:
        """Returns the pages that nothing would need any more if ``point`` went after those of ``going``.

        It joins ``going``; gone: the children that each page would have lost by then.
        """
        going.add(point)
        freed, page = [], point.page
        while page.parent is not None and page is not self.used and page.children == gone.get(page, 0):
            if page.point is not None and page.point not in going:
                break
            freed.append(page)
            page = page.parent
            gone[page] = gone.get(page, 0) + 1
        return freed

    def prune(self, page: Page) -> list[Page]:
        """Takes away ``page`` and those before it, as far as nothing needs them; returns them."""
        gone: list[Page] = []
        while not (page.children or page.point or page is self.used):
            parent = page.parent
            if parent is None:
                del self._first[page.key]
                self._came.pop(page.key, None)
                break
            del self._pages[parent.number, page.key]
            parent.children -= 1
            gone.append(page)
            page = parent
        return gone

    def pages(self) -> Iterable[Page]:
        """Returns every page, each behind those before it."""
        return self._pages.values()

    def below(self, first: Page) -> list[Page]:
        """Returns ``first`` and all behind it, each before those that it is behind. It looks at every page."""
        found = {first: None}
        for page in self._pages.values():
            if page.parent in found:
                found[page] = None
        return list(found)[::-1]
