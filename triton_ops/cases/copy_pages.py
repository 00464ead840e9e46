"""Generates pages of many buffers: few and awkward ones, and those of the Flash model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


class PagesCase(NamedTuple):
    """Holds buffers and a request's pages. shapes: (bytes of a page, pages) of each buffer.

    pages: of a request, in order; page: tokens of each.
    """

    shapes: tuple[tuple[int, int], ...]
    host_blocks: int
    pages: list[int]
    page: int = 256

    def __str__(self) -> str:
        """Names the case in test ids and tables."""
        return f"{len(self.shapes)} buffers, {len(self.pages)} pages"

    @property
    def firsts(self) -> list[int]:
        """The first slot of each page."""
        return [number * self.page for number in self.pages]

    @property
    def offsets(self) -> list[int]:
        """The offset of each buffer's page in a host block; there are gaps."""
        offsets, end = [], 256
        for width, _ in self.shapes:
            offsets.append(end)
            end += width + 64
        return offsets

    @property
    def stride(self) -> int:
        """Bytes of a host block."""
        return -(-(self.offsets[-1] + self.shapes[-1][0] + 64) // 4096) * 4096


def slots_of(
    firsts: list[int], page: int = 256, dtype: torch.dtype = torch.int64, skip: int = 0, last: int = 1
) -> torch.Tensor:
    """Makes full slots, ``last`` tokens in the last page; only the first slot of a page is its own.

    skip: entries between an aligned address and the first.
    """
    slots = torch.zeros(skip + len(firsts) * page, dtype=dtype)
    slots[skip::page] = torch.tensor(firsts, dtype=dtype)
    return slots[skip : len(slots) - page + last] if firsts else slots[skip:]


# c4 kv, indexer, c128 kv, and one whose pages are the most
PAGE_SHAPES = ((37_440, 5), (8_448, 6), (1_728, 7), (1_728, 9))
FLASH_PAGES = (37_440, 8_448) * 21 + (1_728,) * 20


def pages_cases() -> Iterator[PagesCase]:
    """Yields few pages of few buffers, out of order."""
    for page, pages in ((256, []), (256, [0]), (64, [4]), (1, [3, 0, 4, 1]), (256, [4, 3, 2, 1, 0])):
        yield PagesCase(PAGE_SHAPES, 6, pages, page)
    yield PagesCase(((37_440, 2),), 2, [1, 0])
    yield PagesCase(((1_728, 3),) * 7, 6, [1, 0], 64)


def real_pages(count: int) -> PagesCase:
    """Makes ``count`` scattered pages of all layers of the Flash model."""
    pages = torch.randperm(count + 8, generator=torch.Generator().manual_seed(5)).tolist()
    return PagesCase(tuple((width, count + 8) for width in FLASH_PAGES), count, pages[:count])


REAL_PAGES = [real_pages(count) for count in (8, 64, 256)]  # 2K, 16K and 64K tokens
