"""Describes one kind of cache row: bytes, page shape, live range. No mover of rows needs to know the model.

Every device buffer is a sequence of *pages*. A page holds ``rows`` rows in ``tiles`` equal tiles, and a tile is planar:
one plane after the other, each plane holding one piece of every row. A row is therefore NOT contiguous where a family
has two planes; a whole page is.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sglang_dsv4.errors import GeometryError

BUFFER_ALIGNMENT = 16  # of the rows of a ring, and of pages
ROW_ALIGNMENT = 8  # of the pieces of rows that move one by one
T = TypeVar("T", int, npt.NDArray[np.int64])


class Group(str, enum.Enum):
    """Says how a family grows, and so where host memory holds it: in a unit a page, or in the tail."""

    PAGED = "paged"  # with the tokens, page by page
    WINDOW = "window"  # bounded by the sliding window
    REQUEST = "request"  # fixed per request


class Address(str, enum.Enum):
    """Names the id that selects a device page of a family; each group has one."""

    FULL_PAGE = "full page"
    SWA_PAGE = "swa page"
    REQUEST_SLOT = "request slot"


ADDRESS_OF = {Group.PAGED: Address.FULL_PAGE, Group.WINDOW: Address.SWA_PAGE, Group.REQUEST: Address.REQUEST_SLOT}


@dataclass(frozen=True)
class Plane:
    """Describes one piece of every row: ``row_bytes`` at ``offset + row * row_bytes`` inside a tile."""

    offset: int
    row_bytes: int


def stacked(rows: int, *row_bytes: int) -> tuple[Plane, ...]:
    """Lays planes one after the other over ``rows`` rows."""
    planes, offset = [], 0
    for width in row_bytes:
        planes.append(Plane(offset, width))
        offset += rows * width
    return tuple(planes)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Describes one cache family of one pool.

    layers: absolute model layers that have a buffer of it, in the order of the pool's buffers; of a draft family the
    draft model's own layers, from 0. ratio: tokens a row stands for; 1 unless the family is PAGED. rows: rows a device
    page. planes: of one tile.
    period, lag: of n tokens those of the open block of ``period`` tokens live, and the ``lag`` before it. None and 0
    for a PAGED family, whose whole history lives.
    tiles: equal parts of a page, each with all planes of its rows.
    ring: its device buffers are lists of rows [pages * rows + 1, row bytes], the last row the engine's empty sentinel;
    otherwise lists of tiles [pages * tiles, tile bytes], maybe with some tiles over.
    folded: a REQUEST family whose one row holds the open block's tokens together; it lives while the block is open.
    """

    name: str
    group: Group
    layers: tuple[int, ...]
    ratio: int
    rows: int
    planes: tuple[Plane, ...]
    page_bytes: int
    period: int | None = None
    lag: int = 0
    tiles: int = 1
    ring: bool = False
    folded: bool = False

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
        if self.ring or self.period is not None:
            return "a PAGED family moves in whole pages: it is no ring, and its whole history lives (period None)"
        return None

    def _not_rows(self) -> str | None:
        if self.ratio != 1:
            return f"a row of a {self.group.value} family stands for one token, not {self.ratio}"
        if self.folded and (self.group is not Group.REQUEST or (self.rows, self.lag) != (1, 0)):
            return f"folded into {self.rows} rows with lag {self.lag}: it has one row"
        if not self.period or self.period < 0 or self.lag < 0:
            return f"of period {self.period} and lag {self.lag}: no number of rows lives"
        if self.ring and not self.folded and self.period + self.lag > self.rows:
            return f"of period {self.period} and lag {self.lag}: a ring of {self.rows} rows does not hold what lives"
        if any(plane.offset % ROW_ALIGNMENT or plane.row_bytes % ROW_ALIGNMENT for plane in self.planes):
            return f"its rows move one by one: planes and their rows must lie at multiples of {ROW_ALIGNMENT} bytes"
        if self.ring and (self.tiles != 1 or self.page_bytes != self.rows * self.row_bytes):
            return f"a ring of {self.rows} rows of {self.row_bytes} bytes has no padding, got {self.page_bytes} bytes"
        if self.group is Group.REQUEST and (not self.ring or len(self.planes) != 1):
            return "a REQUEST family is a ring of one plane, whose rows are half values, half scores unless folded"
        return None

    @property
    def address(self) -> Address:
        """The id that selects a device page."""
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
        """Returns whether the family moves in whole pages (padding included)."""
        return self.group is Group.PAGED

    def row_offset(self, plane: int, row: T) -> T:
        """Returns the bytes from the start of a device page to its ``row`` (one or an array) in a plane."""
        tile, inner = row // self.tile_rows, row % self.tile_rows
        piece = self.planes[plane]
        return tile * self.tile_bytes + piece.offset + inner * piece.row_bytes

    def row_at(self, byte: int) -> int:
        """Returns the row of a byte of a device page; padding counts as a tile's last row."""
        tile, inside = divmod(byte, self.tile_bytes)
        for plane in self.planes:
            if plane.offset <= inside < plane.offset + self.tile_rows * plane.row_bytes:
                return tile * self.tile_rows + (inside - plane.offset) // plane.row_bytes
        return (tile + 1) * self.tile_rows - 1

    def live_from(self, tokens: int) -> int:
        """Returns the first live position after ``tokens`` tokens: the next step needs its row and all later ones."""
        if self.period is None:
            return 0
        open_tokens = tokens % self.period
        return max(0, tokens - (min(1, open_tokens) if self.folded else open_tokens) - self.lag)

    def live_rows(self, tokens: int) -> int:
        """Counts the live rows after ``tokens`` tokens, in one layer."""
        return tokens - self.live_from(tokens)

    def moved_bytes(self, page_size: int, tokens: int) -> int:
        """Counts the bytes of all layers that a save or a load moves: whole pages, or live rows."""
        pages, rows = -(-tokens // page_size), self.live_rows(tokens)
        return len(self.layers) * (pages * self.page_bytes if self.whole_pages else rows * self.row_bytes)
