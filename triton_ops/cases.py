"""What each op is tested with and measured with: one generator an op, so that what is fast is also what is right.

A case holds plain numbers, which a slow loop in a test can follow; tensors are made of it for a device. Each op has
small cases of awkward sizes, for the interpreter, and REAL ones, as large as a server's: those are compared on a GPU
by test/gpu and timed by benchmarks/ops. TRITON_OPS_WIDE=1 widens the small grids.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from triton_ops.copy_rows import EMPTY, FIELDS
from triton_ops.get_index_k_and_s import (
    get_index_k_and_s,
    get_index_k_and_s_torch,
    put_index_k_and_s,
    put_index_k_and_s_torch,
)
from triton_ops.get_k_and_s import get_k_and_s, get_k_and_s_torch, put_k_and_s, put_k_and_s_torch

WIDE = os.environ.get("TRITON_OPS_WIDE") == "1"
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def bad_indices(end: int, dtype: torch.dtype = torch.int64) -> list[int]:
    """Indices outside [0, end), among them those that a narrowing to 32 bits would bring back into range."""
    bad = [INT32_MIN, -1, end, end + 1, INT32_MAX]
    if dtype == torch.int64:
        bad += [INT64_MIN, INT64_MIN + 1, INT64_MAX, 2**31, 2**32, 2**32 + 1, -(2**32), 2**32 + end - 1]
    return bad


def noise(*shape: int, seed: int, device: Any = "cpu") -> torch.Tensor:
    """Random bytes, made on the device that they are for."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device=device)


# ------------------------------------------------------------- get_k_and_s, get_index_k_and_s and what puts them back


class Format(NamedTuple):
    """Rows of one page format and the ops on them. parts: (bytes, dtype), the last part in a plane of its own."""

    name: str
    get: Callable[..., tuple[torch.Tensor, ...]]
    get_torch: Callable[..., tuple[torch.Tensor, ...]]
    put: Callable[..., None]
    put_torch: Callable[..., None]
    parts: tuple[tuple[int, torch.dtype], ...]
    page_align: int
    more: tuple[int, ...] = ()  # arguments of the ops behind the page size

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page, padding included."""
        used = page_size * sum(width for width, _ in self.parts)
        return -(-used // self.page_align) * self.page_align

    def pages(self, page_size: int, count: int, device: Any = "cpu", seed: int = 0) -> torch.Tensor:
        """A buffer of ``count`` pages."""
        return noise(count, self.page_bytes(page_size), seed=seed, device=device)

    def rows(self, n: int, device: Any = "cpu", seed: int = 1) -> list[torch.Tensor]:
        """Rows of random bytes: NaN patterns are among them."""
        return [
            noise(n, width, seed=seed + number, device=device).view(dtype)
            for number, (width, dtype) in enumerate(self.parts)
        ]


KV_PARTS = ((448, torch.float8_e4m3fn), (128, torch.bfloat16), (8, torch.uint8))
KV = Format("kv", get_k_and_s, get_k_and_s_torch, put_k_and_s, put_k_and_s_torch, KV_PARTS, 576)
INDEX_OPS = get_index_k_and_s, get_index_k_and_s_torch, put_index_k_and_s, put_index_k_and_s_torch


def index_format(width: int) -> Format:
    """Indexer rows of ``width`` key bytes."""
    return Format(f"index{width}", *INDEX_OPS, ((width, torch.uint8), (4, torch.uint8)), 1, (width,))


FORMATS = KV, index_format(128), index_format(64)


class PlanarCase(NamedTuple):
    """``n`` rows of pages of ``page_size``; locations of ``dtype``."""

    format: Format
    page_size: int
    n: int
    dtype: torch.dtype

    def __str__(self) -> str:
        """As a test's id and in a table."""
        return f"{self.format.name} page {self.page_size} n {self.n} {str(self.dtype)[6:]}"

    @property
    def count(self) -> int:
        """Pages of the buffer."""
        return 3 + self.n // self.page_size

    def repeated(self, device: Any = "cpu", seed: int = 2) -> torch.Tensor:
        """Shuffled locations, some of them twice; the last row of the buffer is among them."""
        total = self.count * self.page_size
        loc = torch.randint(0, total, (self.n,), generator=torch.Generator().manual_seed(seed))
        loc[self.n // 2 : self.n // 2 + 1] = total - 1
        return loc.to(self.dtype).to(device)

    def distinct(self, device: Any = "cpu", seed: int = 3) -> torch.Tensor:
        """Shuffled locations, each once."""
        order = torch.randperm(self.count * self.page_size, generator=torch.Generator().manual_seed(seed))
        return order[: self.n].to(self.dtype).to(device)


def planar_cases() -> Iterator[PlanarCase]:
    """Sizes around a program's rows (16, 64 and 128) and a page's. A page of 2 rows is mostly padding; one of 1 row,
    or of rows of 36 bytes, is no multiple of 16."""
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


# ------------------------------------------------------------------------------------------------------- copy_pages


class PagesCase(NamedTuple):
    """shapes: (bytes of a page, pages) of each buffer. pages and blocks: what is copied, item by item."""

    shapes: tuple[tuple[int, int], ...]
    host_blocks: int
    pages: list[int]
    blocks: list[int]

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
    for pages, blocks in (
        ([], []), ([0], [0]), ([4], [5]), ([3, 0, 4, 1], [5, 2, 0, 3]), ([4, 3, 2, 1, 0], [0, 1, 2, 3, 4]),
    ):  # fmt: skip
        yield PagesCase(PAGE_SHAPES, 6, pages, blocks)
    yield PagesCase(((37_440, 2),), 6, [1, 0], [4, 2])
    yield PagesCase(((1_728, 3),) * 7, 6, [1, 0], [4, 2])


def real_pages(count: int) -> PagesCase:
    """``count`` scattered pages of all layers of the Flash model."""
    pages, blocks = (torch.randperm(count + 8, generator=torch.Generator().manual_seed(k)).tolist() for k in (5, 6))
    return PagesCase(tuple((width, count + 8) for width in FLASH_PAGES), count + 8, pages[:count], blocks[:count])


REAL_PAGES = [real_pages(count) for count in (8, 64, 256)]  # 2K, 16K and 64K tokens


# -------------------------------------------------------------------------------------------------------- copy_rows


class Seg(NamedTuple):
    """The fields of a segment, in the order of FIELDS."""

    first: int
    layers: int
    device_offset: int
    host_offset: int
    layer_stride: int
    rows: int
    row_bytes: int
    row_stride: int


assert Seg._fields == FIELDS


def run(buffer: int, there: int, here: int, nbytes: int) -> Seg:
    """One run of one buffer."""
    return Seg(buffer, 1, there, here, 0, 1, nbytes, nbytes)


def reset(first: int, layers: int, there: int, rows: int, row_bytes: int) -> Seg:
    """Rows without a host side, in several buffers."""
    return Seg(first, layers, there, EMPTY, 0, rows, row_bytes, 0)


class RowsCase(NamedTuple):
    """shapes: (bytes of a row or page, how many) of each buffer. Segments lie apart on both sides."""

    shapes: tuple[tuple[int, int], ...]
    host_bytes: int
    segments: list[Seg]

    def __str__(self) -> str:
        """In a table."""
        return f"{len(self.segments)} segments, {self.nbytes} bytes"

    @property
    def bounds(self) -> tuple[int, int]:
        """(most layers, most bytes in a layer), as copy_rows takes them."""
        return max(s.layers for s in self.segments), max(s.rows * s.row_bytes for s in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes that a load writes."""
        return sum(s.layers * s.rows * s.row_bytes for s in self.segments)


def real_rows(window: int = 127, pending: int = 100) -> RowsCase:
    """The rows of one request of the Flash model: its window, its c4 states, and of its c128 rings ``pending`` rows,
    with the rest reset. What lies at one place in all layers is one segment."""
    # (layers, bytes of a row or page, how many; rows copied: (first byte, rows, bytes of a row); rows reset likewise)
    kv, ring = 149_760, 128 * 4_096
    parts = (
        (43, kv, 4, ((kv + 100 * 576, window, 576), (kv + 256 * 576 + 100 * 8, window, 8)), ()),
        (21, 8_192, 65, ((8 * 8_192, 7, 8_192),), ()),
        (21, 2_048, 65, ((8 * 2_048, 7, 2_048),), ()),
        (20, 4_096, 641, ((2 * ring, pending, 4_096),), ((2 * ring + pending * 4_096, 128 - pending, 4_096),)),
    )
    shapes: list[tuple[int, int]] = []
    segments: list[Seg] = []
    end = 0
    for layers, width, count, copied, empty in parts:
        for there, rows, row_bytes in copied:
            nbytes = rows * row_bytes
            segments.append(Seg(len(shapes), layers, there, end, nbytes, rows, row_bytes, row_bytes))
            end += -(-layers * nbytes // 16) * 16
        segments += [reset(len(shapes), layers, *one) for one in empty]
        shapes += [(width, count)] * layers
    return RowsCase(tuple(shapes), end, segments)


REAL_ROWS = [real_rows(127, 1), real_rows(127, 100)]


# ----------------------------------------------------------------------------------------------------------- locate

FULL_PAGES, SWA_PAGES = 41, 33  # the dummy page 0 included


class Located(NamedTuple):
    """A request on scattered pages. mapping: full slot -> SWA slot, its last entry -1."""

    slots: list[int]
    mapping: list[int]
    start: int
    page: int = 256
    limits: tuple[int, int] = (FULL_PAGES, SWA_PAGES)

    def __str__(self) -> str:
        """In a table."""
        return f"{len(self.slots)} tokens"

    def with_slots(self, changes: dict[int, int]) -> Located:
        """changes: full slot by position."""
        slots = list(self.slots)
        for position, slot in changes.items():
            slots[position] = slot
        return self._replace(slots=slots)

    def with_swa(self, changes: dict[int, int]) -> Located:
        """changes: SWA slot by position."""
        mapping = list(self.mapping)
        for position, swa in changes.items():
            mapping[self.slots[position]] = swa
        return self._replace(mapping=mapping)

    def swa(self, position: int) -> int:
        """SWA slot of a position."""
        return self.mapping[self.slots[position]]


def located(tokens: int, seed: int = 0, page: int = 256, window: int = 127, full_pages: int = FULL_PAGES) -> Located:
    """Random pages on both sides; only the pages of the window are mapped."""
    generator = torch.Generator().manual_seed(seed)
    full = (torch.randperm(full_pages - 1, generator=generator) + 1).tolist()
    swa = (torch.randperm(SWA_PAGES - 1, generator=generator) + 1).tolist()
    slots = [full[p // page] * page + p % page for p in range(tokens)]
    start = max(0, tokens - window)
    mapping = [0] * (full_pages * page) + [-1]
    for position in range(start // page * page, -(-tokens // page) * page):
        number = position // page
        mapping[full[number] * page + position % page] = swa[number - start // page] * page + position % page
    return Located(slots, mapping, start, page, (full_pages, SWA_PAGES))


LOCATE_LENGTHS = (0, 1, 127, 128, 129, 255, 256, 257, 1024, 1025, *((130, 1000, 4097) if WIDE else ()))
REAL_LOCATED = (2_048, 65_536, 262_144)


# -------------------------------------------------------------------------------------------------------- prep_rows


def prep_tables(
    lengths: list[int], context: int, seed: int = 0, room: int = 0
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """(req_to_token, full_to_swa, each request's slot): whole pages, mapped near the end of a request only, the rest
    left over from other requests. Slot 0 is the engine's padding. room: tokens behind a length that have slots too.
    """
    rng = np.random.default_rng(seed)
    pages_each, requests = -(-context // 256), len(lengths)
    full = rng.permutation(requests * pages_each) + 1
    swa = rng.permutation(2 * requests * 4) + 1
    slots = (rng.permutation(requests) + 1).tolist()
    table = rng.integers(0, (requests * pages_each + 1) * 256, size=(requests + 2, context), dtype=np.int32)
    mapping = np.zeros((requests * pages_each + 1) * 256 + 1, np.int64)
    mapping[-1] = -1
    for number, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        end = min(length + room, context)
        own = full[number * pages_each : (number + 1) * pages_each]
        position = np.arange(end)
        table[slot, :end] = own[position // 256] * 256 + position % 256
        tail = np.arange(max(0, length - 128) // 256 * 256, -(-end // 256) * 256)
        chosen = swa[number * 4 + (tail // 256) % 4]
        mapping[own[np.minimum(tail // 256, pages_each - 1)] * 256 + tail % 256] = chosen * 256 + tail % 256
    return table, mapping, slots


PREP_LENGTHS = (1, 2, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513)
REAL_PREP = (1, 32, 128)  # requests
