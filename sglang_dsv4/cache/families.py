"""The engine keeps a request's cache in many kinds of buffers, and says nowhere in one place how their bytes lie.

Here is what it does not say: each family's bytes, and which of its rows a request needs. All of it follows from the
compression ratios of a model's layers, by the rules in ``COMPRESSIONS``; DeepSeek-V4 and V4.1 are two instances. No
other module knows a family by its name; docs/extending.md tells how to add a ratio.

Every device buffer is a sequence of *pages*. A page holds ``rows`` rows in ``tiles`` equal tiles, and a tile is planar:
one plane after the other, each plane holding one piece of every row. A row is therefore NOT contiguous where a family
has two planes; a whole page is.

    kv tile        | values x rows | scales x rows | padding |     bytes of a row: KV_ROWS
    indexer tile   | values x rows | scales x rows |               bytes of a row: INDEX_ROWS
    state ring     | rows of values and scores |

    family             page is addressed by   rows a page     position p lives in
    swa_kv             SWA page               256             row  swa(p) % 256
    cR_kv, cR_indexer  full page              256 // R        row  (p % 256) // R    if p % R == R - 1
    draft_swa_kv       the target's SWA page  256             row  swa(p) % 256
    c4_state           SWA page               its ring        row  swa(p) % ring; c4_indexer_state the same
    c2_state           request slot           its ring        row  p % ring; c128_state the same
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sglang_dsv4.errors import GeometryError

BUFFER_ALIGNMENT = 16  # of the rows of a ring, and of pages
ROW_ALIGNMENT = 8  # of the pieces of rows that move one by one
T = TypeVar("T", int, npt.NDArray[np.int64])


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


class KVRow(NamedTuple):
    """One way to store a kv row. planes: bytes of its pieces. padded_to: a page is padded to a multiple of it."""

    planes: tuple[int, ...]
    padded_to: int


KV_ROWS = {  # by the engine's names; 0.5.17 knows v4 alone and does not name it
    "v4": KVRow((448 + 2 * 64, 8), 576),  # 448 NoPE fp8 + 64 RoPE bf16; 8 scales, 7 used
    "v41": KVRow((512, 16), 512),
    "v41_fp4": KVRow((256, 32), 256),
    "v41_new": KVRow((512 + 16,), 528),  # scales behind each row
    "v41_fp4_new": KVRow((256 + 32,), 288),
}
INDEX_SCALE_BYTES = 4
INDEX_ROWS = {  # for each of an indexer's buffers, the bytes of a row's pieces
    "fp8": ((128, INDEX_SCALE_BYTES),),
    "fp4": ((64, INDEX_SCALE_BYTES),),
    "fp4_split": ((16, 16, 16, 16), (1, 1, 1, 1)),
}


class Compression(NamedTuple):
    """What the engine keeps for the layers of one ratio.

    indexed: keys for an indexer too. shared: only the model's kv source layers have buffers, the layers after each
    read them. pending: whether states of tokens that are not compressed yet are found by the SWA slot (WINDOW) or by
    the request's slot (REQUEST); None where every token is a row at once. lag: how many tokens before the open block
    the compressor reads again; then a state is as much wider.
    """

    indexed: bool
    shared: bool
    pending: Group | None
    lag: int = 0


KEPT_BY_HISPARSE = ("c4_kv",)  # families whose rows lie in its coordinator's host pool
COMPRESSIONS = {
    1: Compression(indexed=True, shared=True, pending=None),
    2: Compression(indexed=True, shared=True, pending=Group.REQUEST),
    4: Compression(indexed=True, shared=False, pending=Group.WINDOW, lag=4),
    128: Compression(indexed=False, shared=False, pending=Group.REQUEST),
}
RATIOS = (0, *COMPRESSIONS)


@dataclass(frozen=True)
class Plane:
    """One piece of every row: ``row_bytes`` at ``offset + row * row_bytes`` inside a tile."""

    offset: int
    row_bytes: int


@dataclass(frozen=True)
class Family:
    """One cache family of one pool.

    layers: absolute model layers that have a buffer of it, in the order of the pool's buffers; of a draft family the
    draft model's own layers, from 0. ratio: tokens a row
    stands for; 1 unless the family is PAGED. rows: rows a device page. planes: of one tile.
    host_rows: rows a host slot has room for; of a PAGED family the rows of a page.
    period, lag: of n tokens those of the open block of ``period`` tokens live, and the ``lag`` before it. None and 0
    for a PAGED family, whose whole history lives.
    tiles: equal parts of a page, each with all planes of its rows.
    ring: its device buffers are lists of rows [pages * rows + 1, row bytes], the last row the engine's empty sentinel;
    otherwise lists of tiles [pages * tiles, tile bytes], maybe with some tiles over.
    """

    name: str
    group: Group
    layers: tuple[int, ...]
    ratio: int
    rows: int
    planes: tuple[Plane, ...]
    page_bytes: int
    host_rows: int
    period: int | None
    lag: int
    tiles: int = 1
    ring: bool = False

    def __post_init__(self) -> None:
        wrong = self._unfit() or (self._not_whole_pages() if self.whole_pages else self._not_rows())
        if wrong:
            raise GeometryError(f"family {self.name}: {wrong}")

    def _unfit(self) -> str | None:
        name, width = ("row", self.row_bytes) if self.ring else ("page", self.page_bytes)
        if width % BUFFER_ALIGNMENT:
            return f"a {name} of {width} bytes: kernels need a multiple of {BUFFER_ALIGNMENT}"
        if self.rows % self.tiles or self.page_bytes % self.tiles:
            return f"{self.rows} rows in {self.page_bytes} bytes do not make {self.tiles} equal tiles"
        if self.page_bytes < self.rows * self.row_bytes:
            return f"a page of {self.page_bytes} bytes does not hold {self.rows} rows of {self.row_bytes}"
        return None

    def _not_whole_pages(self) -> str | None:
        if self.ring or self.host_rows != self.rows or self.period is not None:
            return (
                "a PAGED family moves in whole pages: it is no ring, a host slot has the rows of a page, "
                "and its whole history lives (period None)"
            )
        return None

    def _not_rows(self) -> str | None:
        if self.ratio != 1:
            return f"a row of a {self.group.value} family stands for one token, not {self.ratio}"
        if self.period is None or not 0 < self.period + self.lag <= self.host_rows:
            return f"of period {self.period} and lag {self.lag}, {self.host_rows} host rows do not hold what lives"
        if any(plane.offset % ROW_ALIGNMENT or plane.row_bytes % ROW_ALIGNMENT for plane in self.planes):
            return f"its rows move one by one: planes and their rows must lie at multiples of {ROW_ALIGNMENT} bytes"
        if self.ring and (self.tiles != 1 or self.page_bytes != self.rows * self.row_bytes):
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
    def tile_rows(self) -> int:
        """Rows of one tile."""
        return self.rows // self.tiles

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile, padding included."""
        return self.page_bytes // self.tiles

    @property
    def whole_pages(self) -> bool:
        """Whether the family moves in whole pages (padding included)."""
        return self.group is Group.PAGED

    @property
    def host_planes(self) -> tuple[Plane, ...]:
        """Planes of a host slot: those of a tile of the device page itself, or the same planes over ``host_rows``."""
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

    def row_offset(self, plane: int, row: T) -> T:
        """Bytes from the start of a device page to its ``row`` (one or an array) in a plane."""
        tile, inner = row // self.tile_rows, row % self.tile_rows
        piece = self.planes[plane]
        return tile * self.tile_bytes + piece.offset + inner * piece.row_bytes

    def row_at(self, byte: int) -> int:
        """The row that a byte of a device page belongs to; padding counts as a tile's last row."""
        tile, inside = divmod(byte, self.tile_bytes)
        for plane in self.planes:
            if plane.offset <= inside < plane.offset + self.tile_rows * plane.row_bytes:
                return tile * self.tile_rows + (inside - plane.offset) // plane.row_bytes
        return (tile + 1) * self.tile_rows - 1

    def live_from(self, tokens: int) -> int:
        """The first position whose row the step after ``tokens`` tokens needs; all positions after it live too."""
        return 0 if self.period is None else max(0, tokens - tokens % self.period - self.lag)

    def moved_bytes(self, g: Geometry, tokens: int) -> int:
        """Bytes of all layers that a save or a load of ``tokens`` tokens moves: whole pages, or live rows."""
        pages, rows = -(-tokens // g.page_size), tokens - self.live_from(tokens)
        return len(self.layers) * (pages * self.page_bytes if self.whole_pages else rows * self.row_bytes)

    def host_row_stride(self, plane: int) -> int:
        """Bytes from one row to the next in a plane of a host block."""
        width = self.planes[plane].row_bytes
        return width * len(self.layers) if self.interleaved else width


class Draft(NamedTuple):
    """The window that a draft model keeps beside the target's, at the target's places.

    layers: of the draft model. reach: rows before the next token that its first step reads; the target's step reads
    window - 1. kv_row: name of its rows. tiles: of an SWA page.
    """

    layers: int
    reach: int
    kv_row: str = "v4"
    tiles: int = 1


@dataclass(frozen=True)
class Geometry:
    """What a pool is built from; everything else follows.

    ratios: compression ratio of each layer of this pipeline stage; first_layer: its first model layer.
    sources: absolute layers of this stage that have the buffers of shared ratios, in the pool's order.
    By ratio, each of the stage's that has such a thing; what is not given is filled in:
    rings: rows of a state ring (as many as can live; more with speculation). kv_rows: name of the kv row, 0 for the
    window's (v4). index_rows: name of the indexer row (fp8; fp4 of a shared ratio). state_bytes: itemsize of states
    (4). swa_tiles: tiles of an SWA page. index_page: most rows of an indexer tile. draft: the draft model's window;
    None where there is no draft, or where it is not copied.
    elsewhere: names of families that are kept in another place and another way: this pool has none of them.
    """

    ratios: tuple[int, ...]
    first_layer: int = 0
    page_size: int = 256
    window: int = 128
    sources: tuple[int, ...] = ()
    rings: Mapping[int, int] = field(default_factory=dict)
    kv_rows: Mapping[int, str] = field(default_factory=dict)
    index_rows: Mapping[int, str] = field(default_factory=dict)
    state_bytes: Mapping[int, int] = field(default_factory=dict)
    swa_tiles: int = 1
    index_page: int = 64
    elsewhere: tuple[str, ...] = ()
    head_dim: int = 512
    index_head_dim: int = 128
    draft: Draft | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.ratios) - set(RATIOS))
        if unknown:
            raise GeometryError(f"compression ratio {unknown[0]} is not covered (covered: {RATIOS})")
        for ratio in set(self.ratios) - {0}:
            if self.page_size < ratio or self.page_size % ratio:
                raise GeometryError(f"page_size {self.page_size} is no multiple of compression ratio {ratio}")
        if not 8 <= self.window <= self.page_size:
            raise GeometryError(f"window {self.window} must be between 8 and page_size {self.page_size}")
        if self.draft and not 0 < self.draft.reach <= self.page_size:
            raise GeometryError(f"a draft that reads {self.draft.reach} rows back, covered: 1 to {self.page_size}")
        self._fill_in()
        for ratio, ring in self.rings.items():
            self._check_ring(ratio, ring)
        kv_rows = {*self.kv_rows.values(), *([self.draft.kv_row] if self.draft else ())}
        for names, known in ((kv_rows, tuple(KV_ROWS)), ({*self.index_rows.values()}, tuple(INDEX_ROWS))):
            if strange := names - set(known):
                raise GeometryError(f"rows {sorted(strange)[0]} are not covered (covered: {', '.join(known)})")
        for source in self.sources:
            if not COMPRESSIONS.get(self._ratio_of(source), COMPRESSIONS[4]).shared:
                raise GeometryError(f"kv source layer {source} has no shared ratio in this stage")

    def _fill_in(self) -> None:
        present = {ratio: rule for ratio, rule in COMPRESSIONS.items() if ratio in self.ratios}
        pending = {ratio: rule for ratio, rule in present.items() if rule.pending}
        for name, defaults in (
            ("rings", {ratio: ratio + rule.lag for ratio, rule in pending.items()}),
            ("kv_rows", dict.fromkeys((0, *present), "v4")),
            ("index_rows", {ratio: "fp4" if rule.shared else "fp8" for ratio, rule in present.items() if rule.indexed}),
            ("state_bytes", dict.fromkeys(pending, 4)),
        ):
            given = getattr(self, name)
            object.__setattr__(self, name, {ratio: given.get(ratio, value) for ratio, value in defaults.items()})

    def _check_ring(self, ratio: int, rows: int) -> None:
        pending, least = COMPRESSIONS[ratio].pending, ratio + COMPRESSIONS[ratio].lag
        if pending is Group.WINDOW and (rows < least or self.page_size % rows):
            raise GeometryError(f"c{ratio} ring {rows} must divide page_size {self.page_size} and be >= {least}")
        if pending is Group.REQUEST and (rows < least or rows % ratio):
            raise GeometryError(f"c{ratio} ring {rows} must be a multiple of {ratio}")

    def _ratio_of(self, layer: int) -> int:
        return self.ratios[layer - self.first_layer] if layer in self.all_layers else 0

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """Absolute layers of this stage with ``ratio``."""
        return tuple(self.first_layer + i for i, r in enumerate(self.ratios) if r == ratio)

    def owners(self, ratio: int) -> tuple[int, ...]:
        """Those of them that have buffers, in the pool's order."""
        if ratio and COMPRESSIONS[ratio].shared:
            return tuple(layer for layer in self.sources if self._ratio_of(layer) == ratio)
        return self.layers_of(ratio)

    @property
    def all_layers(self) -> range:
        """Absolute layers of this stage."""
        return range(self.first_layer, self.first_layer + len(self.ratios))


def window_start(g: Geometry, tokens: int) -> int:
    """First position whose SWA row the step at position ``tokens`` reads (its window includes itself), or its draft."""
    return max(0, tokens - max(g.window - 1, g.draft.reach if g.draft else 0))


def stacked(rows: int, *row_bytes: int) -> tuple[Plane, ...]:
    """Planes laid one after the other over ``rows`` rows."""
    planes, offset = [], 0
    for width in row_bytes:
        planes.append(Plane(offset, width))
        offset += rows * width
    return tuple(planes)


def kv_page_bytes(rows: int, row: str = "v4") -> int:
    """Bytes of ``rows`` kv rows in one page or tile, padded as the attention kernels need it."""
    planes, multiple = KV_ROWS[row]
    return -(-rows * sum(planes) // multiple) * multiple


def _paged(name: str, layers: tuple[int, ...], ratio: int, rows: int, widths: tuple[int, ...], tiles: int = 1,
           page_bytes: int | None = None) -> Family:  # fmt: skip
    size = rows * sum(widths) if page_bytes is None else page_bytes
    planes = stacked(rows // tiles, *widths)
    return Family(name, Group.PAGED, layers, ratio, rows, planes, size, rows, None, 0, tiles)


def _history(g: Geometry, ratio: int) -> list[Family]:
    """The compressed rows of ``ratio`` and their indexer keys."""
    layers, rows, row = g.owners(ratio), g.page_size // ratio, g.kv_rows[ratio]
    compression = COMPRESSIONS[ratio]
    found = [_paged(f"c{ratio}_kv", layers, ratio, rows, KV_ROWS[row].planes, page_bytes=kv_page_bytes(rows, row))]
    if compression.indexed:
        buffers = INDEX_ROWS[g.index_rows[ratio]]
        tiles = max(1, rows // g.index_page)
        for name, widths in zip(("indexer", "indexer_scales"), buffers, strict=False):
            found.append(_paged(f"c{ratio}_{name}", layers, ratio, rows, widths, tiles))
    return found


def _swa(g: Geometry, name: str, layers: tuple[int, ...], row: str, tiles: int, reach: int) -> Family:
    """Rows of the window: those of the ``reach`` tokens before the next."""
    rows = g.page_size // tiles
    return Family(
        name, Group.WINDOW, layers, 1, g.page_size, stacked(rows, *KV_ROWS[row].planes),
        tiles * kv_page_bytes(rows, row), 1 + reach, 1, reach, tiles,
    )  # fmt: skip


def _windows(g: Geometry) -> list[Family]:
    found = [_swa(g, "swa_kv", tuple(g.all_layers), g.kv_rows[0], g.swa_tiles, g.window - 1)]
    if g.draft:
        found.append(
            _swa(g, "draft_swa_kv", tuple(range(g.draft.layers)), g.draft.kv_row, g.draft.tiles, g.draft.reach)
        )
    return found


def _states(g: Geometry, ratio: int) -> list[Family]:
    """The states of tokens that are not compressed yet: of the attention, and of an indexer of its own."""
    compression, layers = COMPRESSIONS[ratio], g.owners(ratio)
    if compression.pending is None:
        return []
    ring = g.rings[ratio]
    live = ratio + compression.lag
    dims = {f"c{ratio}_state": g.head_dim}
    if compression.indexed and not compression.shared:
        dims[f"c{ratio}_indexer_state"] = g.index_head_dim
    found = []
    for name, dim in dims.items():
        width = 2 * (live // ratio) * dim * g.state_bytes[ratio]  # a value and a score
        planes = stacked(ring, width)
        found.append(Family(
            name, compression.pending, layers, 1, ring, planes, ring * width, live, ratio, compression.lag, ring=True,
        ))  # fmt: skip
    return found


def families(g: Geometry) -> tuple[Family, ...]:
    """The families of a pool of geometry ``g`` that have a layer in its stage, in a fixed order."""
    present = [ratio for ratio in COMPRESSIONS if g.owners(ratio)]
    history = [family for ratio in present for family in _history(g, ratio)]
    members = (*history, *_windows(g), *(family for ratio in present for family in _states(g, ratio)))
    return tuple(family for family in members if family.name not in g.elsewhere)
