"""Counts the equal units of host memory that a request takes: one for each page, and those of its tail."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.packed import PackedPage, Tail, align

UNIT_ALIGNMENT = 4096


@dataclass(frozen=True)
class Units:
    """Holds the bytes of a unit, and the units of a tail.

    nbytes: of a unit; a page fills one. page_size: tokens of it. tails: units of a tail, by length: below two pages,
    and from there on by the remainder of one. Stages of a pipeline differ in both; they agree on the largest tails, for
    one must run out of units when the others do (see ``agreed``). host_rows: bytes of a page's rows that the engine
    itself keeps on the host, such as expert choices; their copies lie behind all units.
    """

    nbytes: int
    page_size: int
    tails: tuple[int, ...]
    host_rows: int = 0

    @classmethod
    def of(cls, geometry: Geometry, row_bytes: int = 0) -> Units:
        """Computes the units of a pool. A stage without paged families has units of a quarter of its longest tail.

        row_bytes: of a token's rows that the engine itself keeps on the host.
        """
        members = families(geometry)
        tails = [Tail.of(members, tokens).nbytes for tokens in range(2 * geometry.page_size)]
        nbytes = align(PackedPage.of(members).nbytes or max(1, -(-max(tails) // 4)), UNIT_ALIGNMENT)
        tails = [-(-tail // nbytes) for tail in tails]
        return cls(nbytes, geometry.page_size, tuple(tails), geometry.page_size * row_bytes)

    @property
    def cost(self) -> int:
        """Bytes of host memory that a unit takes, with its part behind all units."""
        return self.nbytes + self.host_rows

    def pages(self, tokens: int) -> int:
        """Counts the units of the pages of ``tokens`` tokens."""
        return -(-tokens // self.page_size)

    def tail(self, tokens: int) -> int:
        """Counts the units of the tail of ``tokens`` tokens."""
        return self.tails[self.alike(tokens)]

    def alike(self, tokens: int) -> int:
        """Returns the shortest length whose tail is laid out as that of ``tokens`` tokens: below two pages."""
        return tokens if tokens < self.page_size else self.page_size + tokens % self.page_size

    def count(self, tokens: int) -> int:
        """Counts the units of a request of ``tokens`` saved tokens."""
        return self.pages(tokens) + self.tail(tokens)

    @property
    def longest_tail(self) -> int:
        """Units of the longest tail."""
        return max(self.tails)

    @property
    def least(self) -> int:
        """Units without which not even every request of one page fits."""
        return 1 + self.longest_tail
