"""Finds the longest kept beginning of a prompt: a trie of exact pages, with points where a prompt may go on.

    namespace -> page -> page -> page (point) -> page (point)
                            \\-> page (point)

A page's key is its token ids themselves, so two prompts share a page only where they are equal. With drafts a row also
depends on the next token, so there a key has one token more. A page is kept while a page or a point is behind it.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Page:
    """Holds one page of tokens behind ``parent``, in paged host block ``block``. A namespace's first is no page.

    checksums: of its pieces, with DSV4_VERIFY. depth: of the first page 1. pins: pinned points that need it, see
    ``EvictionOrder``.
    """

    parent: Page | None
    key: Hashable
    block: int = -1
    children: dict[Hashable, Page] = field(default_factory=dict)
    point: Point | None = None
    checksums: dict[Any, int] = field(default_factory=dict)
    depth: int = 0
    pins: int = 0

    def path(self) -> list[Page]:
        """Returns the pages from the first one to this."""
        found, page = [], self
        while page.parent is not None:
            found.append(page)
            page = page.parent
        return found[::-1]

    def below(self) -> Iterator[Page]:
        """Yields this page and all behind it, the last ones first."""
        order = [self]
        for page in order:
            order.extend(page.children.values())
        return reversed(order)


@dataclass(eq=False, slots=True)
class Point:
    """Marks the end of ``page``: there, behind ``tokens`` tokens, a prompt may go on.

    window: its host block; None: the pages alone are kept, for the copy of a request, and no prompt can go on there.
    number: of all points, in the order in which they were made. order: the rank and priority of its eviction, see
    ``hints``. checksums: of the window. node: of the engine's prefix tree that ends here, if known.
    """

    page: Page
    tokens: int
    window: int | None
    number: int
    order: tuple[int, int] = (0, 0)
    checksums: dict[Any, int] = field(default_factory=dict)
    node: Hashable = None


class Trie:
    """Keeps the pages of all namespaces. It owns no memory: its user is told which pages and points went.

    page: tokens a page. pairs: whether a key has the next token, too (``ahead``: how many).
    """

    def __init__(self, page: int, pairs: bool) -> None:
        self._page, self.ahead = page, int(pairs)
        self._first: dict[Hashable, Page] = {}
        self.used: Page | None = None  # a save goes on from it, so that it stays though nothing is behind it
        self.version = 0  # changes with each point that comes or goes

    def keys(self, tokens: Any, end: int) -> list[bytes]:
        """Cuts ``tokens`` (an int array), up to position ``end``, into the keys of its whole pages."""
        count = max(0, min(len(tokens) - self.ahead, end)) // self._page
        is_ready = isinstance(tokens, array) and tokens.typecode == "q"
        ids = memoryview(tokens if is_ready else array("q", tokens[: count * self._page + self.ahead])).cast("B")
        step, more = 8 * self._page, 8 * self.ahead
        return [ids[start : start + step + more].tobytes() for start in range(0, count * step, step)]

    def walk(self, namespace: Hashable, keys: list[bytes], behind: Page | None = None) -> list[Page]:
        """Returns the kept pages of the longest beginning of ``keys``. behind: the page that they follow, if any."""
        found: list[Page] = []
        page = behind or self._first.get(namespace)
        for key in keys:
            page = page.children.get(key) if page is not None else None
            if page is None:
                break
            found.append(page)
        return found

    def longest(self, namespace: Hashable, keys: list[bytes], behind: Page | None = None) -> Point | None:
        """Returns the last point with a window on the way of ``keys``. behind: as for ``walk``."""
        points = (page.point for page in reversed(self.walk(namespace, keys, behind)))
        return next((point for point in points if point is not None and point.window is not None), None)

    def add(self, namespace: Hashable, behind: Page | None, keys: list[bytes], blocks: list[int]) -> list[Page]:
        """Adds pages of ``keys``, none of which is kept, in ``blocks``; returns them. behind: as for ``walk``."""
        page = behind or self._first.setdefault(namespace, Page(None, namespace))
        added: list[Page] = []
        for key, block in zip(keys, blocks, strict=True):
            new = page.children[key] = Page(page, key, block, depth=page.depth + 1)
            added.append(new)
            page = new
        return added

    def put(self, point: Point) -> None:
        """Puts ``point`` at the end of its page, which has none."""
        assert point.page.point is None
        point.page.point = point
        self.version += 1

    def take(self, point: Point) -> list[Page]:
        """Takes a point away. Returns the pages that nothing needs any more; they are gone."""
        point.page.point = None
        self.version += 1
        return self.prune(point.page)

    def is_used(self, page: Page) -> bool:
        """Returns whether a save goes on from ``page`` or from one behind it."""
        return self.used is not None and page in self.used.path()

    def freed_with(self, point: Point, going: set[Point], gone: dict[Page, int]) -> list[Page]:
        """Returns the pages that nothing would need any more if ``point`` went after those of ``going``.

        It joins ``going``; gone: the children that each page would have lost by then.
        """
        going.add(point)
        freed, page = [], point.page
        while page.parent is not None and page is not self.used and len(page.children) == gone.get(page, 0):
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
                break
            del parent.children[page.key]
            gone.append(page)
            page = parent
        return gone

    def pages(self) -> Iterator[Page]:
        """Yields every page."""
        for first in self._first.values():
            yield from (page for page in first.below() if page.parent is not None)
