"""The engine keeps a request's cache in seven kinds of buffers, and says nowhere in one place how their bytes lie.

Here is what it does not say: each family's bytes, and which of its rows a request needs. Nothing else knows a family
by its name; docs/extending.md tells how to add one.

Every device buffer is a sequence of *pages* of ``page_bytes``; a page holds ``rows`` rows, planar: one plane
after the other, each plane holding one piece of every row. A row is therefore NOT contiguous where a family
has two planes; a whole page is.

    kv page       | values 576 B x rows | scales 8 B x rows | padding to a multiple of 576 |
    indexer page  | values 128 B (fp4: 64 B) x rows | scales 4 B x rows |
    state ring    | rows x (2 or 4) * head_dim values |

    family             page is addressed by     rows a page            position p lives in
    swa_kv             SWA page                 256                    row  swa(p) % 256
    c4_kv, c4_indexer  full page                64                     row  (p % 256) // 4     if p % 4 == 3
    c128_kv            full page                2                      row  (p % 256) // 128   if p % 128 == 127
    c4_state           SWA page                 ring: 8, 16 with drafts    row  swa(p) % ring
    c4_indexer_state   SWA page                 as c4_state
    c128_state         request slot             ring: 128, 256 with drafts  row  p % ring
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from sglang_dsv4.errors import GeometryError

KV_VALUE_BYTES = 448 + 64 * 2  # 448 NoPE fp8 + 64 RoPE bf16
KV_SCALE_BYTES = 8  # 7 used
KV_PAGE_ALIGNMENT = 576
INDEX_SCALE_BYTES = 4
C4_OVERLAP = 2  # the ratio-4 compressor reads the previous block too
RATIOS = (0, 4, 128)
BUFFER_ALIGNMENT = 16  # of the rows of a ring, and of pages
ROW_ALIGNMENT = 8  # of the pieces of rows that move one by one


class Group(str, enum.Enum):
    """How a family grows, hence which host blocks hold it."""

    PAGED = "paged"  # with the tokens, page by page
    WINDOW = "window"  # bounded by the sliding window
    REQUEST = "request"  # fixed per request


class Address(str, enum.Enum):
    """What selects a device page of a family; each group has one."""

    FULL_PAGE = "full page"
    SWA_PAGE = "swa page"
    REQUEST_SLOT = "request slot"


ADDRESS_OF = {Group.PAGED: Address.FULL_PAGE, Group.WINDOW: Address.SWA_PAGE, Group.REQUEST: Address.REQUEST_SLOT}


@dataclass(frozen=True)
class Plane:
    """One piece of every row: ``row_bytes`` at ``offset + row * row_bytes`` inside the page."""

    offset: int
    row_bytes: int


@dataclass(frozen=True)
class Family:
    """One cache family of one pool.

    reference_name: what the reference implementation of the model calls it. layers: absolute model layers, in the order
    of the pool's buffers. ratio: tokens a row stands for; 1 unless the family is PAGED. rows: rows a device page.
    host_rows: rows a host slot has room for; of a PAGED family the rows of a page.
    first_live: (geometry, tokens) -> the first position whose row the next step needs; all positions after it live too.
    ring: its device buffers are lists of rows [pages * rows + 1, row bytes], the last row the engine's empty sentinel;
    otherwise lists of pages [pages, page bytes].
    """

    name: str
    reference_name: str
    group: Group
    layers: tuple[int, ...]
    ratio: int
    rows: int
    planes: tuple[Plane, ...]
    page_bytes: int
    host_rows: int
    first_live: FirstLive
    ring: bool = False

    def __post_init__(self) -> None:
        wrong = self._unfit() or (self._not_whole_pages() if self.whole_pages else self._not_rows())
        if wrong:
            raise GeometryError(f"family {self.name}: {wrong}")

    def _unfit(self) -> str | None:
        name, width = ("row", self.row_bytes) if self.ring else ("page", self.page_bytes)
        if width % BUFFER_ALIGNMENT:
            return f"a {name} of {width} bytes: kernels need a multiple of {BUFFER_ALIGNMENT}"
        if self.page_bytes < self.rows * self.row_bytes:
            return f"a page of {self.page_bytes} bytes does not hold {self.rows} rows of {self.row_bytes}"
        return None

    def _not_whole_pages(self) -> str | None:
        if self.ring or self.host_rows != self.rows:
            return "a PAGED family moves in whole pages: it is no ring, and a host slot has the rows of a page"
        return None

    def _not_rows(self) -> str | None:
        if self.ratio != 1:
            return f"a row of a {self.group.value} family stands for one token, not {self.ratio}"
        if any(plane.offset % ROW_ALIGNMENT or plane.row_bytes % ROW_ALIGNMENT for plane in self.planes):
            return f"its rows move one by one: planes and their rows must lie at multiples of {ROW_ALIGNMENT} bytes"
        if self.ring and self.page_bytes != self.rows * self.row_bytes:
            return f"a ring of {self.rows} rows of {self.row_bytes} bytes has no padding, got {self.page_bytes} bytes"
        if self.group is Group.REQUEST and (not self.ring or len(self.planes) != 1):
            return "a REQUEST family is a ring of one plane, whose rows are half values, half scores"
        return None

    @property
    def address(self) -> Address:
        """What selects a device page."""
        return ADDRESS_OF[self.group]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all planes."""
        return sum(plane.row_bytes for plane in self.planes)

    @property
    def whole_pages(self) -> bool:
        """Whether the family moves in whole pages (padding included)."""
        return self.group is Group.PAGED

    @property
    def host_planes(self) -> tuple[Plane, ...]:
        """Planes of a host slot: the device page itself, or the same planes over ``host_rows`` rows."""
        return self.planes if self.whole_pages else stacked(self.host_rows, *(p.row_bytes for p in self.planes))

    @property
    def host_bytes(self) -> int:
        """Bytes of one layer's share of a host block."""
        return self.page_bytes if self.whole_pages else self.host_rows * self.row_bytes

    @property
    def interleaved(self) -> bool:
        """Whether a host block holds row 0 of every layer, then row 1 of every layer, ...

        So it is for a REQUEST family: of its rows only the pending ones live, and so they are one run.
        """
        return self.group is Group.REQUEST

    @property
    def host_layer_stride(self) -> int:
        """Bytes from one layer's first row to the next layer's in a host block."""
        return self.row_bytes if self.interleaved else self.host_bytes

    def moved_bytes(self, g: Geometry, tokens: int) -> int:
        """Bytes of all layers that a save or a load of ``tokens`` tokens moves: whole pages, or live rows."""
        pages, rows = -(-tokens // g.page_size), tokens - self.first_live(g, tokens)
        return len(self.layers) * (pages * self.page_bytes if self.whole_pages else rows * self.row_bytes)

    def host_row_stride(self, plane: int) -> int:
        """Bytes from one row to the next in a plane of a host block."""
        width = self.planes[plane].row_bytes
        return width * len(self.layers) if self.interleaved else width


@dataclass(frozen=True)
class Geometry:
    """What a pool is built from; everything else follows.

    ratios: compression ratio of each layer of this pipeline stage; first_layer: its first model layer.
    c4_ring, c128_ring: rows of a state ring (8 and 128; 16 and 256 with speculation).
    index_value_bytes: 128 (fp8) or 64 (fp4). state_bytes: itemsize of (c4, c128) states.
    """

    ratios: tuple[int, ...]
    first_layer: int = 0
    page_size: int = 256
    window: int = 128
    c4_ring: int = 8
    c128_ring: int = 128
    index_value_bytes: int = 128
    head_dim: int = 512
    index_head_dim: int = 128
    c4_state_bytes: int = 4
    c128_state_bytes: int = 4

    def __post_init__(self) -> None:
        unknown = sorted(set(self.ratios) - set(RATIOS))
        if unknown:
            raise GeometryError(f"compression ratio {unknown[0]} is not covered (covered: {RATIOS})")
        for ratio in set(self.ratios) - {0}:
            if self.page_size < ratio or self.page_size % ratio:
                raise GeometryError(f"page_size {self.page_size} is no multiple of compression ratio {ratio}")
        if not 8 <= self.window <= self.page_size:
            raise GeometryError(f"window {self.window} must be between 8 and page_size {self.page_size}")
        if self.c4_ring < 8 or self.page_size % self.c4_ring:
            raise GeometryError(f"c4_ring {self.c4_ring} must divide page_size {self.page_size} and be >= 8")
        if self.c128_ring < 128 or self.c128_ring % 128:
            raise GeometryError(f"c128_ring {self.c128_ring} must be a multiple of 128")

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """Absolute layers of this stage with ``ratio``."""
        return tuple(self.first_layer + i for i, r in enumerate(self.ratios) if r == ratio)

    @property
    def all_layers(self) -> tuple[int, ...]:
        """Absolute layers of this stage."""
        return tuple(range(self.first_layer, self.first_layer + len(self.ratios)))


FirstLive = Callable[[Geometry, int], int]


def whole_history(g: Geometry, tokens: int) -> int:
    """Every position lives."""
    return 0


def window_start(g: Geometry, tokens: int) -> int:
    """First position whose SWA row the step at position ``tokens`` reads (its window includes itself)."""
    return max(0, tokens - (g.window - 1))


def c4_tail_start(g: Geometry, tokens: int) -> int:
    """First position of the live ratio-4 state tail: the open block and the one before it."""
    return max(0, tokens - (tokens % 4 + 4))


def c128_pending_start(g: Geometry, tokens: int) -> int:
    """First position of the open 128-token block; equals ``tokens`` when nothing is pending."""
    return 128 * (tokens // 128)


def stacked(rows: int, *row_bytes: int) -> tuple[Plane, ...]:
    """Planes laid one after the other over ``rows`` rows."""
    planes, offset = [], 0
    for width in row_bytes:
        planes.append(Plane(offset, width))
        offset += rows * width
    return tuple(planes)


def kv_page_bytes(rows: int) -> int:
    """Bytes of a kv page of ``rows`` rows, padded as the attention kernels need it."""
    return -(-rows * (KV_VALUE_BYTES + KV_SCALE_BYTES) // KV_PAGE_ALIGNMENT) * KV_PAGE_ALIGNMENT


def _paged_kv(name: str, layers: tuple[int, ...], ratio: int, g: Geometry) -> Family:
    rows = g.page_size // ratio
    planes = stacked(rows, KV_VALUE_BYTES, KV_SCALE_BYTES)
    return Family(name, "cmp", Group.PAGED, layers, ratio, rows, planes, kv_page_bytes(rows), rows, whole_history)


def _state(
    name: str, reference: str, group: Group, layers: tuple[int, ...], ring: int, row_bytes: int,
    host_rows: int, first_live: FirstLive,
) -> Family:  # fmt: skip
    planes, page_bytes = stacked(ring, row_bytes), ring * row_bytes
    return Family(name, reference, group, layers, 1, ring, planes, page_bytes, host_rows, first_live, ring=True)


def families(g: Geometry) -> tuple[Family, ...]:
    """The families of a pool of geometry ``g``, in a fixed order. A family may have no layer."""
    c4, c128 = g.layers_of(4), g.layers_of(128)
    index_rows = g.page_size // 4
    index_bytes = index_rows * (g.index_value_bytes + INDEX_SCALE_BYTES)
    return (
        _paged_kv("c4_kv", c4, 4, g),
        Family(
            "c4_indexer", "idx", Group.PAGED, c4, 4, index_rows,
            stacked(index_rows, g.index_value_bytes, INDEX_SCALE_BYTES), index_bytes, index_rows, whole_history,
        ),
        _paged_kv("c128_kv", c128, 128, g),
        Family(
            "swa_kv", "ori", Group.WINDOW, g.all_layers, 1, g.page_size,
            stacked(g.page_size, KV_VALUE_BYTES, KV_SCALE_BYTES), kv_page_bytes(g.page_size), g.window, window_start,
        ),
        _state(
            "c4_state", "csa_state", Group.WINDOW, c4, g.c4_ring,
            2 * C4_OVERLAP * g.head_dim * g.c4_state_bytes, 8, c4_tail_start,
        ),
        _state(
            "c4_indexer_state", "csa_inner_state", Group.WINDOW, c4, g.c4_ring,
            2 * C4_OVERLAP * g.index_head_dim * g.c4_state_bytes, 8, c4_tail_start,
        ),
        _state(
            "c128_state", "hca_state", Group.REQUEST, c128, g.c128_ring,
            2 * g.head_dim * g.c128_state_bytes, 128, c128_pending_start,
        ),
    )  # fmt: skip
