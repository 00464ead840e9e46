"""A request's pages in many buffers: few and awkward ones, and those of the Flash model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from triton_ops.cases import INT32_MIN


class PagesCase(NamedTuple):
    """shapes: (bytes of a page, pages) of each buffer. pages: of the request, in order. page: tokens a page."""

    shapes: tuple[tuple[int, int], ...]
    host_blocks: int
    pages: list[int]
    page: int = 4

    def slots(self, last: int = 1) -> list[int]:
        """The request's full slots, of which only the first of each page may be read: the others are hostile. Of the
        last page there are ``last``."""
        slots = [slot for page in self.pages for slot in (page * self.page, *[INT32_MIN] * (self.page - 1))]
        return slots[: len(slots) - self.page + last] if slots else []

    def __str__(self) -> str:
        """As a test's id and in a table."""
        return f"{len(self.shapes)} buffers, {len(self.pages)} pages"

    @property
    def offsets(self) -> list[int]:
        """Of each buffer's page in a host block; there are gaps."""
        offsets, end = [], 256
        for width, _ in self.shapes:
            offsets.append(end)
            end += width + 64
        return offsets

    @property
    def stride(self) -> int:
        """Bytes of a host block."""
        return -(-(self.offsets[-1] + self.shapes[-1][0] + 64) // 4096) * 4096


# c4 kv, indexer, c128 kv, and one whose pages are the most
PAGE_SHAPES = ((37_440, 5), (8_448, 6), (1_728, 7), (1_728, 9))
FLASH_PAGES = (37_440, 8_448) * 21 + (1_728,) * 20


def pages_cases() -> Iterator[PagesCase]:
    """Few pages of few buffers, out of order."""
    for pages in ([], [0], [4], [3, 0, 4, 1], [4, 3, 2, 1, 0]):
        yield PagesCase(PAGE_SHAPES, 6, pages)
    yield PagesCase(((37_440, 2),), 6, [1, 0])
    yield PagesCase(((1_728, 3),) * 7, 6, [1, 0])


def real_pages(count: int) -> PagesCase:
    """``count`` scattered pages of all layers of the Flash model."""
    pages = torch.randperm(count + 8, generator=torch.Generator().manual_seed(5)).tolist()
    return PagesCase(tuple((width, count + 8) for width in FLASH_PAGES), count + 2, pages[:count], 256)


REAL_PAGES = [real_pages(count) for count in (8, 64, 256)]  # 2K, 16K and 64K tokens
