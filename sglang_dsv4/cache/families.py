"""Derives the byte layout of every family from the compression ratios.

The engine has no single description of its buffers: here are each family's bytes and the rows that a request needs, by
the rules in ``COMPRESSIONS``. DeepSeek-V4 and V4.1 are two instances. No other module knows a family by its name;
docs/extending.md tells how to add a ratio.

    kv tile        | values x rows | scales x rows | padding |     bytes of a row: KV_ROWS
    indexer tile   | values x rows | scales x rows |               bytes of a row: INDEX_ROWS
    state ring     | rows of values and scores |

    family             page is addressed by   rows a page     position p lives in
    swa_kv             SWA page               256             row  swa(p) % 256
    cR_kv, cR_indexer  full page              256 // R        row  (p % 256) // R    if p % R == R - 1
    draft_swa_kv       the target's SWA page  256             row  swa(p) % 256
    c4_state           SWA page               its ring        row  swa(p) % ring; c4_indexer_state the same
    c2_state           request slot           its ring        row  p % ring; c128_state the same
    c128_online_state  request slot           1               that row, with the whole open block, if p is the last
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_dsv4.cache.family import Family, Group, stacked
from sglang_dsv4.errors import GeometryError


class KVRow(NamedTuple):
    """Describes a format of kv rows. planes: bytes of its pieces. padded_to: a page is padded to a multiple of it."""

    planes: tuple[int, ...]
    padded_to: int


KV_ROWS = {  # by the engine's names
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


MOST_DRAFT_TOKENS = 8  # with more, a forward in flight writes ring rows that are still live


class Compression(NamedTuple):
    """Describes the cache of layers of one ratio.

    indexed: has keys for an indexer too. shared: only the model's kv source layers have buffers, the layers after each
    read them. pending: states of tokens that are not compressed yet are found by the SWA slot (WINDOW) or by the
    request's slot (REQUEST); None where every token is a row at once. lag: tokens before the open block that the
    compressor reads again; a state is wider by as much.
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


class Draft(NamedTuple):
    """Describes the window of a draft model, which lies at the target's places.

    layers: of the draft model. reach: rows before the next token that its first step reads; the target's step reads
    window - 1. kv_row: name of its rows. tiles: of an SWA page.
    """

    layers: int
    reach: int
    kv_row: str = "v4"
    tiles: int = 1


@dataclass(frozen=True)
class Geometry:
    """Holds the parameters of a pool; everything else follows.

    ratios: compression ratio of each layer of this pipeline stage; first_layer: its first model layer.
    sources: absolute layers of this stage that have the buffers of shared ratios, in the pool's order.
    By ratio, with defaults for missing entries:
    rings: rows of a state ring (as many as can live; more with speculation). kv_rows: name of the kv row, 0 for the
    window's (v4). index_rows: name of the indexer row (fp8; fp4 of a shared ratio). state_bytes: itemsize of states
    (4). swa_tiles: tiles of an SWA page. index_page: most rows of an indexer tile. draft: the draft model's window;
    None where there is no draft, or where it is not copied.
    elsewhere: names of families that lie outside this pool.
    folded: ratios whose pending states are kept as one row a request, of maximum, sum and value (online compression).
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
    folded: tuple[int, ...] = ()

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
            ("rings", {ratio: 1 if ratio in self.folded else ratio + rule.lag for ratio, rule in pending.items()}),
            ("kv_rows", dict.fromkeys((0, *present), "v4")),
            ("index_rows", {ratio: "fp4" if rule.shared else "fp8" for ratio, rule in present.items() if rule.indexed}),
            ("state_bytes", dict.fromkeys(pending, 4)),
        ):
            given = getattr(self, name)
            object.__setattr__(self, name, {ratio: given.get(ratio, value) for ratio, value in defaults.items()})

    def _check_ring(self, ratio: int, rows: int) -> None:
        pending, least = COMPRESSIONS[ratio].pending, ratio + COMPRESSIONS[ratio].lag
        if ratio in self.folded:
            if pending is not Group.REQUEST or rows != 1:
                raise GeometryError(f"c{ratio} states are not folded into {rows} rows, covered: 1, by request slot")
            return
        if pending is Group.WINDOW and (rows < least or self.page_size % rows):
            raise GeometryError(f"c{ratio} ring {rows} must divide page_size {self.page_size} and be >= {least}")
        if pending is Group.REQUEST and (rows < least or rows % ratio):
            raise GeometryError(f"c{ratio} ring {rows} must be a multiple of {ratio}")

    def _ratio_of(self, layer: int) -> int:
        return self.ratios[layer - self.first_layer] if layer in self.all_layers else 0

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """Lists the absolute layers of this stage with ``ratio``."""
        return tuple(self.first_layer + i for i, r in enumerate(self.ratios) if r == ratio)

    def owners(self, ratio: int) -> tuple[int, ...]:
        """Lists the layers with ``ratio`` that have buffers, in the pool's order."""
        if ratio and COMPRESSIONS[ratio].shared:
            return tuple(layer for layer in self.sources if self._ratio_of(layer) == ratio)
        return self.layers_of(ratio)

    @property
    def all_layers(self) -> range:
        """Absolute layers of this stage."""
        return range(self.first_layer, self.first_layer + len(self.ratios))


def window_start(g: Geometry, tokens: int) -> int:
    """Returns the first position whose SWA row the step at ``tokens``, or its draft, reads.

    A window includes the step's own position.
    """
    return max(0, tokens - max(g.window - 1, g.draft.reach if g.draft else 0))


def kv_page_bytes(rows: int, row: str = "v4") -> int:
    """Counts the bytes of ``rows`` kv rows in one page or tile, padded for the attention kernels."""
    planes, multiple = KV_ROWS[row]
    return -(-rows * sum(planes) // multiple) * multiple


def _paged(name: str, layers: tuple[int, ...], ratio: int, rows: int, widths: tuple[int, ...], tiles: int = 1,
           page_bytes: int | None = None) -> Family:  # fmt: skip
    size = rows * sum(widths) if page_bytes is None else page_bytes
    planes = stacked(rows // tiles, *widths)
    return Family(
        name=name, group=Group.PAGED, layers=layers, ratio=ratio, rows=rows, planes=planes, page_bytes=size,
        tiles=tiles,
    )  # fmt: skip


def _history(g: Geometry, ratio: int) -> list[Family]:
    """Describes the compressed rows of ``ratio`` and their indexer keys."""
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
    """Describes the rows of the window: those of the ``reach`` tokens before the next."""
    rows = g.page_size // tiles
    return Family(
        name=name, group=Group.WINDOW, layers=layers, ratio=1, rows=g.page_size,
        planes=stacked(rows, *KV_ROWS[row].planes), page_bytes=tiles * kv_page_bytes(rows, row),
        period=1, lag=reach, tiles=tiles,
    )  # fmt: skip


def _windows(g: Geometry) -> list[Family]:
    found = [_swa(g, "swa_kv", tuple(g.all_layers), g.kv_rows[0], g.swa_tiles, g.window - 1)]
    if g.draft:
        found.append(
            _swa(g, "draft_swa_kv", tuple(range(g.draft.layers)), g.draft.kv_row, g.draft.tiles, g.draft.reach)
        )
    return found


def _states(g: Geometry, ratio: int) -> list[Family]:
    """Describes the states of tokens that are not compressed yet: of the attention, and of an own indexer."""
    compression, layers = COMPRESSIONS[ratio], g.owners(ratio)
    if compression.pending is None:
        return []
    ring, folded = g.rings[ratio], ratio in g.folded
    live = ratio + compression.lag
    dims = {f"c{ratio}_online_state" if folded else f"c{ratio}_state": g.head_dim}
    if compression.indexed and not compression.shared:
        dims[f"c{ratio}_indexer_state"] = g.index_head_dim
    found = []
    for name, dim in dims.items():
        width = (3 if folded else 2 * (live // ratio)) * dim * g.state_bytes[ratio]  # a value and a score
        planes = stacked(ring, width)
        found.append(Family(
            name=name, group=compression.pending, layers=layers, ratio=1, rows=ring, planes=planes,
            page_bytes=ring * width, period=ratio, lag=compression.lag, ring=True, folded=folded,
        ))  # fmt: skip
    return found


def families(g: Geometry) -> tuple[Family, ...]:
    """Lists the families of a pool of geometry ``g`` that have a layer in its stage, in a fixed order."""
    return tuple(family for family in _written(g) if family.layers and family.name not in g.elsewhere)


def _written(g: Geometry) -> tuple[Family, ...]:
    """Lists every family for the ratios of ``g``; windows also without layers."""
    present = [ratio for ratio in COMPRESSIONS if g.owners(ratio)]
    history = [family for ratio in present for family in _history(g, ratio)]
    return (*history, *_windows(g), *(family for ratio in present for family in _states(g, ratio)))
