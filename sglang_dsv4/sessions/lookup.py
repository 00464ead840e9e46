"""Finds the last point of a prompt, from a page that is known to be on its way where there is one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from sglang_dsv4.sessions.trie import Found, Point, Trie


class LookUp:
    """Looks prompts up in a trie, and remembers where points stand in the engine's prefix tree. page: its tokens."""

    def __init__(self, trie: Trie, page: int) -> None:
        self._trie, self._page = trie, page
        self._at: dict[Hashable, Point] = {}  # by the node of the engine's prefix tree at whose end they stand

    def is_current(self, namespace: Hashable, found: Found, limit: int) -> bool:
        """Returns whether a look-up of ``limit`` tokens would find the same.

        No more tokens came, no point in its namespace, and its own did not go.
        """
        return (
            found.limit >= limit
            and found.came >= self._trie.came(namespace)
            and (found.point is None or self._trie.stands(found.point))
        )

    def longest(
        self, namespace: Hashable, tokens: Any, limit: int, node: Hashable = None, before: Found | None = None
    ) -> Found:
        """Finds the last point among the first ``limit`` of ``tokens``.

        node: of the engine's prefix tree, on the way of these tokens in this namespace. before: the last look-up of
        the same prompt. The pages before a point that stands at that node, or that were found before, are not cut and
        hashed: they were compared.
        """
        end, known = limit - self._trie.ahead, self._at.get(node)
        starts = [known.page] if known is not None else []
        if before is not None and (page := self._trie.named(before.page)) is not None:
            starts.append(page)
        depth = self._trie.depth
        start = max((page for page in starts if depth(page) * self._page <= end), key=depth, default=None)
        way = self._trie.walk(namespace, self._trie.keys(tokens, end, depth(start) * self._page), start)
        last = way[-1] if way else start
        return Found(self._trie.came(namespace), self._trie.name(last), self._trie.last_point(last), limit)

    def remember_node(self, point: Point, node: Hashable, end: int) -> None:
        """Remembers ``node`` of the prefix tree, which ends behind ``end`` tokens, if ``point`` stands there.

        point: with a window, of a request on whose way the node is. A node's tokens never change, and the engine names
        no other node so. None: no node.
        """
        if node is not None and point.tokens == end and node not in self._at and self._trie.stands(point):
            self._at.pop(point.node, None)
            self._at[node], point.node = point, node

    def forget(self, point: Point) -> None:
        """Forgets the node of a point that goes."""
        self._at.pop(point.node, None)

    def clear(self) -> None:
        """Forgets every node."""
        self._at.clear()

    def check_integrity(self, points: Iterable[Point]) -> None:
        """Raises AssertionError unless the nodes that are known are those of ``points``."""
        assert {point: point.node for point in points if point.node is not None} == {
            point: node for node, point in self._at.items() if point.tail is not None
        }
