"""Finds the live rows of a request, each once, and their places on device and host.

A request becomes spans, per family, by pure functions over small arrays; there is no loop over tokens. A span is a run
of neighbouring rows in one tile of a device page, or a whole page; it lands in one page of the copy, or in
neighbouring rows of its tail:

    device page ``pages[i]``, rows ``rows[i] .. rows[i] + counts[i] - 1``
      <->  page number ``copy_pages[i]`` of the copy, or live rows ``live_rows[i] .. `` of its tail
      ==   positions ``positions[i]``, ``positions[i] + ratio``, ...

Live rows only, each once: saving a ring row for every token would scatter several values into one row on load.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_dsv4.cache.families import Geometry, window_start
from sglang_dsv4.cache.family import Family, Group
from sglang_dsv4.errors import GeometryError, IndexMismatch, WindowNotMapped

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """Names the place of a request's cache on the device.

    tokens: saved tokens n, positions 0..n-1. pages: full page of positions 0, 256, 512, ...
    swa: SWA slot of positions window_start(n)..n-1; none, for families of whole pages alone. request_slot: row of
    req_to_token.
    """

    tokens: int
    pages: Int64s
    swa: Int64s
    request_slot: int


@dataclass(frozen=True)
class Spans:
    """Holds all spans of one family (see the module); int64 arrays of one length."""

    family: Family
    pages: Int64s
    rows: Int64s
    counts: Int64s
    copy_pages: Int64s
    live_rows: Int64s
    positions: Int64s

    def __len__(self) -> int:
        return len(self.pages)

    def position_of(self, span: int, row: int) -> int:
        """Returns the token position of row number ``row`` of span number ``span``."""
        return int(self.positions[span]) + row * self.family.ratio


def _runs(pages: Int64s, rows: Int64s, tile: int) -> tuple[Int64s, Int64s]:
    """Returns (first index, length) of each run of neighbouring rows in one tile, of ``tile`` rows, of one page."""
    if len(pages) == 0:
        none = np.empty(0, np.int64)
        return none, none
    breaks = np.flatnonzero((pages[1:] != pages[:-1]) | (rows[1:] != rows[:-1] + 1) | (rows[1:] % tile == 0)) + 1
    edges = np.concatenate(([0], breaks, [len(pages)])).astype(np.int64)
    return edges[:-1], edges[1:] - edges[:-1]


def _whole_pages(family: Family, place: Place) -> Spans:
    count = len(place.pages)
    order = np.arange(count, dtype=np.int64)
    zeros = np.zeros(count, np.int64)
    first = order * family.rows * family.ratio + family.ratio - 1
    return Spans(family, place.pages, zeros, np.full(count, family.rows), order, zeros, first)


def _rows_from(family: Family, start: int, pages: Int64s, rows: Int64s) -> Spans:
    """Makes spans of consecutive positions from ``start``; live row k holds position start + k."""
    starts, counts = _runs(pages, rows, family.tile_rows)
    zeros = np.zeros(len(starts), np.int64)
    return Spans(family, pages[starts], rows[starts], counts, zeros, starts, start + starts)


def _window_rows(family: Family, place: Place, start: int, page_size: int) -> Spans:
    before = start - (place.tokens - len(place.swa))
    if before < 0:
        raise GeometryError(f"family {family.name}: position {start} of {place.tokens} lives before the window")
    swa = place.swa[before:]
    return _rows_from(family, start, swa // page_size, swa % family.rows)


def _request_rows(family: Family, place: Place, start: int) -> Spans:
    positions = np.arange(start, place.tokens, dtype=np.int64)
    slot = np.full(len(positions), place.request_slot, np.int64)
    return _rows_from(family, start, slot, positions % family.rows)


def find_spans(geometry: Geometry, families: tuple[Family, ...], place: Place) -> tuple[Spans, ...]:
    """Finds the spans of every family, in the order of ``families``.

    Raises IndexMismatch for a place that does not fit its token count, WindowNotMapped when a position that the
    next step reads has no SWA slot.
    """
    check_place(geometry, place, window=bool(len(place.swa)) or not all(family.whole_pages for family in families))
    spans = []
    for family in families:
        start = family.live_from(place.tokens)
        if family.group is Group.PAGED:
            spans.append(_whole_pages(family, place))
        elif family.group is Group.WINDOW:
            spans.append(_window_rows(family, place, start, geometry.page_size))
        else:
            spans.append(_request_rows(family, place, start))
    return tuple(spans)


def check_place(geometry: Geometry, place: Place, window: bool) -> None:
    """Raises unless ``place`` is one of ``place.tokens`` tokens in a pool of ``geometry``, with a window or without."""
    pages = -(-place.tokens // geometry.page_size)
    start = window_start(geometry, place.tokens) if window else place.tokens
    if len(place.pages) != pages or len(place.swa) != place.tokens - start:
        raise IndexMismatch(
            f"{place.tokens} tokens need {pages} pages and {place.tokens - start} SWA slots, "
            f"got {len(place.pages)} and {len(place.swa)}"
        )
    unmapped = np.flatnonzero(place.swa <= 0)  # slot 0 is the engine's dummy
    if len(unmapped):
        raise WindowNotMapped(
            f"position {start + int(unmapped[0])} of {place.tokens} is inside the window of "
            f"{geometry.window} but has no SWA slot"
        )
