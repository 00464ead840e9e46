"""Generates rows of planar pages: formats, and locations in shuffled, repeated and odd numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch

from triton_ops.cases import WIDE, noise
from triton_ops.planar_rows import (
    get_index_k_and_s,
    get_index_k_and_s_torch,
    get_k_and_s,
    get_k_and_s_torch,
    put_index_k_and_s,
    put_index_k_and_s_torch,
    put_k_and_s,
    put_k_and_s_torch,
)


class Format(NamedTuple):
    """Describes one page format and its ops. parts: (bytes, dtype), the last part in a plane of its own."""

    name: str
    get: Callable[..., tuple[torch.Tensor, ...]]
    get_torch: Callable[..., tuple[torch.Tensor, ...]]
    put: Callable[..., None]
    put_torch: Callable[..., None]
    parts: tuple[tuple[int, torch.dtype], ...]
    page_align: int
    more: tuple[int, ...] = ()  # arguments of the ops behind the page size

    def page_bytes(self, page_size: int) -> int:
        """Counts the bytes of a page, padding included."""
        used = page_size * sum(width for width, _ in self.parts)
        return -(-used // self.page_align) * self.page_align

    def pages(self, page_size: int, count: int, device: Any = "cpu") -> torch.Tensor:
        """Makes a buffer of ``count`` pages."""
        return noise(count, self.page_bytes(page_size), seed=0, device=device)

    def rows(self, n: int, device: Any = "cpu", seed: int = 1) -> list[torch.Tensor]:
        """Makes rows of random bytes: NaN patterns are among them."""
        return [
            noise(n, width, seed=seed + number, device=device).view(dtype)
            for number, (width, dtype) in enumerate(self.parts)
        ]


KV_PARTS = ((448, torch.float8_e4m3fn), (128, torch.bfloat16), (8, torch.uint8))
KV = Format("kv", get_k_and_s, get_k_and_s_torch, put_k_and_s, put_k_and_s_torch, KV_PARTS, 576)
INDEX_OPS = get_index_k_and_s, get_index_k_and_s_torch, put_index_k_and_s, put_index_k_and_s_torch


def index_format(width: int) -> Format:
    """Makes the format of indexer rows of ``width`` key bytes."""
    return Format(f"index{width}", *INDEX_OPS, ((width, torch.uint8), (4, torch.uint8)), 1, (width,))


FORMATS = KV, index_format(128), index_format(64)


class PlanarCase(NamedTuple):
    """Holds the sizes of a case: ``n`` rows of pages of ``page_size``; locations of ``dtype``."""

    format: Format
    page_size: int
    n: int
    dtype: torch.dtype

    def __str__(self) -> str:
        """Names the case in test ids and tables."""
        return f"{self.format.name} page {self.page_size} n {self.n} {str(self.dtype)[6:]}"

    @property
    def count(self) -> int:
        """Pages of the buffer."""
        return 3 + self.n // self.page_size

    def repeated(self, device: Any = "cpu") -> torch.Tensor:
        """Makes shuffled locations, some of them twice; the last row of the buffer is among them."""
        total = self.count * self.page_size
        loc = torch.randint(0, total, (self.n,), generator=torch.Generator().manual_seed(2))
        loc[self.n // 2 : self.n // 2 + 1] = total - 1
        return loc.to(self.dtype).to(device)

    def distinct(self, device: Any = "cpu") -> torch.Tensor:
        """Makes shuffled locations, each once."""
        order = torch.randperm(self.count * self.page_size, generator=torch.Generator().manual_seed(3))
        return order[: self.n].to(self.dtype).to(device)


def planar_cases() -> Iterator[PlanarCase]:
    """Yields sizes around a program's rows (16, 64 and 128) and a page's.

    A page of 2 rows is mostly padding; one of 1 row, or of rows of 36 bytes, is no multiple of 16.
    """
    grid = ((256, 0), (256, 1), (64, 65), (2, 127), (64, 255), (2, 256), (256, 257))
    if WIDE:
        grid = tuple(product((256, 64, 2), (0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1001, 4001)))
    for number, (fmt, (page_size, n)) in enumerate(product(FORMATS, grid)):
        yield PlanarCase(fmt, page_size, n, (torch.int32, torch.int64)[number % 2])
    yield PlanarCase(index_format(128), 1, 130, torch.int64)
    yield PlanarCase(index_format(36), 64, 130, torch.int64)


REAL_PLANAR = [
    PlanarCase(fmt, page_size, n, torch.int64)
    for fmt, page_size in ((KV, 256), (KV, 64), (KV, 2), (FORMATS[1], 64), (FORMATS[2], 64))
    for n in (2_048, 65_536)
]
