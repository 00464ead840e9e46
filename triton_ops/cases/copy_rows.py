"""Generates segments of copy_rows: single runs, rows to reset, one request of the Flash model."""

from __future__ import annotations

from typing import NamedTuple

from triton_ops.copy_rows import EMPTY, FIELDS


class Seg(NamedTuple):
    """Holds the fields of a segment, in the order of FIELDS."""

    first: int
    layers: int
    device_offset: int
    host_offset: int
    layer_stride: int
    rows: int
    row_bytes: int
    row_stride: int
    follows: int = 0
    page_bytes: int = 0  # nothing moves with the page number


assert Seg._fields == FIELDS


def run(buffer: int, there: int, here: int, nbytes: int) -> Seg:
    """Makes one run of one buffer."""
    return Seg(buffer, 1, there, here, 0, 1, nbytes, nbytes)


def reset(first: int, layers: int, there: int, rows: int, row_bytes: int, *place: int) -> Seg:
    """Makes rows without a host side, in several buffers. place: the page number that they follow, bytes of a page."""
    return Seg(first, layers, there, EMPTY, 0, rows, row_bytes, 0, *place)


class RowsCase(NamedTuple):
    """Holds buffers and segments. shapes: (bytes of a row or page, their number) of each buffer.

    Segments lie apart on both sides.
    """

    shapes: tuple[tuple[int, int], ...]
    host_bytes: int
    segments: list[Seg]
    page_numbers: tuple[int, int, int]

    def __str__(self) -> str:
        """Names the case in tables."""
        return f"{len(self.segments)} segments, {self.nbytes} bytes"

    @property
    def bounds(self) -> tuple[int, int]:
        """(most layers, most bytes in a layer), as copy_rows takes them."""
        return max(s.layers for s in self.segments), max(s.rows * s.row_bytes for s in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes that a load writes, those of reset rows included."""
        return sum(s.layers * s.rows * s.row_bytes for s in self.segments)

    @property
    def saved(self) -> int:
        """Bytes that a save writes."""
        return sum(s.layers * s.rows * s.row_bytes for s in self.segments if s.host_offset != EMPTY)


def real_rows(window: int = 127, pending: int = 100) -> RowsCase:
    """Makes the rows of one request of the Flash model: window, c4 states, ``pending`` rows of its c128 rings.

    The rest of the rings is reset. Rows at one place in all layers are one segment.
    """
    # (layers, bytes of a row or page, their number; the page number that it follows, bytes of a page;
    #  rows copied: (first byte in the page, rows, bytes of a row); rows reset likewise)
    kv = 149_760
    parts = (
        (43, kv, 4, (1, kv), ((100 * 576, window, 576), (256 * 576 + 100 * 8, window, 8)), ()),
        (21, 8_192, 65, (1, 8 * 8_192), ((0, 7, 8_192),), ()),
        (21, 2_048, 65, (1, 8 * 2_048), ((0, 7, 2_048),), ()),
        (20, 4_096, 641, (0, 128 * 4_096), ((0, pending, 4_096),), ((pending * 4_096, 128 - pending, 4_096),)),
    )
    shapes: list[tuple[int, int]] = []
    segments: list[Seg] = []
    end = 0
    for layers, width, count, place, copied, empty in parts:
        for there, rows, row_bytes in copied:
            nbytes = rows * row_bytes
            segments.append(Seg(len(shapes), layers, there, end, nbytes, rows, row_bytes, row_bytes, *place))
            end += -(-layers * nbytes // 16) * 16
        segments += [reset(len(shapes), layers, *one, *place) for one in empty]
        shapes += [(width, count)] * layers
    return RowsCase(tuple(shapes), end, segments, (2, 3, -1))  # its slot; its window lies on one page


REAL_ROWS = [real_rows(127, 1), real_rows(127, 100)]
