"""Plans the rows of every request length once, at start, as *templates* that stay on the card.

The live rows depend on the length alone, from one period on on its remainder. Planning them anew took most of a
retract's host time. A transfer names a template and three page numbers: the request's slot and the SWA pages of its
window's first and second page.

The rows of a copy are moved through its *row image*: its tail, put together from its units.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from sglang_dsv4.cache.families import window_start
from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.packed import Tail
from sglang_dsv4.cache.rows import Int64s, Place, Spans, find_spans
from sglang_dsv4.transfer.buffers import DeviceBuffers
from triton_ops.copy_rows import EMPTY, FIELDS

_LAYERS, _DEVICE_OFFSET, _ROWS, _ROW_BYTES = map(FIELDS.index, ("layers", "device_offset", "rows", "row_bytes"))
_SAMPLE_SLOT, _SAMPLE_PAGE = 0, 1  # place of a template's request while it is planned: slot 0, SWA pages 1 and 2


class RowTemplate(NamedTuple):
    """Holds the segments of one length. segments: int64 [n, 10] on the card, see ``copy_rows``.

    most_layers, most_bytes: bounds over them.
    """

    segments: torch.Tensor
    most_layers: int
    most_bytes: int


class RowTemplates:
    """Holds the template of every length, for saves and loads: about a thousand, half a megabyte on the card."""

    def __init__(self, buffers: DeviceBuffers) -> None:
        rings = (family.rows for family in buffers.row_families if family.group is Group.REQUEST)
        self._period = math.lcm(buffers.geometry.page_size, *rings)
        cases = [(save, tokens) for save in (True, False) for tokens in range(2 * self._period)]
        planned = [build_template(buffers, tokens, save) for save, tokens in cases]
        card = buffers.residents.constant("transfer.row_templates", torch.from_numpy(np.concatenate(planned)))
        self._templates: dict[tuple[bool, int], RowTemplate] = {}
        first = 0
        for case, table in zip(cases, planned, strict=True):
            self._templates[case] = RowTemplate(card[first : first + len(table)], *_bounds(table))
            first += len(table)

    def of(self, tokens: int, save: bool) -> RowTemplate:
        """Returns the template of ``tokens`` tokens; a load's also resets the rest of the slot's rings."""
        return self._templates[save, tokens if tokens < self._period else self._period + tokens % self._period]


def _bounds(table: Int64s) -> tuple[int, int]:
    if not len(table):
        return 0, 0
    return int(table[:, _LAYERS].max()), int((table[:, _ROWS] * table[:, _ROW_BYTES]).max())


def build_template(buffers: DeviceBuffers, tokens: int, save: bool) -> Int64s:
    """Builds the segments of ``tokens`` tokens: int64 [n, 10], host offsets counted in the row image.

    A load resets the other rows of the slot's state rings: they are the previous owner's, and with speculation they can
    be read.
    """
    page = buffers.geometry.page_size
    first = window_start(buffers.geometry, tokens)
    swa = np.arange(first, tokens, dtype=np.int64) + (_SAMPLE_PAGE - first // page) * page
    place = Place(tokens, np.zeros(-(-tokens // page), np.int64), swa, _SAMPLE_SLOT)
    tail, rows = Tail.of(buffers.families, tokens), list[tuple[int, ...]]()
    for spans in find_spans(buffers.geometry, buffers.families, place):
        family = spans.family
        if family.whole_pages or not family.layers:
            continue
        rows += _segments(buffers, tail, spans)
        if family.group is Group.REQUEST and not save:
            rows += _resets(buffers, spans)
    return np.array(rows, dtype=np.int64).reshape(-1, len(FIELDS))


def _segments(buffers: DeviceBuffers, tail: Tail, spans: Spans) -> list[tuple[int, ...]]:
    """Builds one segment a span and plane, in the order of FIELDS."""
    family = spans.family
    first, stride = buffers.first_row_buffer[family.name], tail.layer_bytes(family)
    columns = [column.tolist() for column in (spans.pages, spans.rows, spans.counts, spans.live_rows)]
    return [
        # The sample's page number is the one that the segment follows: 0 the slot, 1 and 2 the window's pages.
        (
            first, len(family.layers), family.row_offset(plane, row), tail.offset(family, 0, plane, live),
            stride, count, piece.row_bytes, piece.row_bytes, follows, family.page_bytes,
        )
        for plane, piece in enumerate(family.planes)
        for follows, row, count, live in zip(*columns, strict=True)
    ]  # fmt: skip


def _resets(buffers: DeviceBuffers, spans: Spans) -> list[tuple[int, ...]]:
    """Builds EMPTY segments over the rows of the slot's rings that no span holds."""
    family, first = spans.family, buffers.first_row_buffer[spans.family.name]
    return [
        (
            first, len(family.layers), row * family.row_bytes, EMPTY, 0, count, family.row_bytes, 0,
            _SAMPLE_SLOT, family.page_bytes,
        )
        for row, count in rows_without(spans)
    ]  # fmt: skip


def rows_without(spans: Spans) -> list[tuple[int, int]]:
    """Lists (first, count) of each run of a ring's rows that no span holds."""
    if spans.family.folded:  # at the end of a block its row is not read; the empty pattern of rings is not that of it
        return []
    found, at = [], 0
    for row, count in [*sorted(zip(spans.rows.tolist(), spans.counts.tolist(), strict=True)), (spans.family.rows, 0)]:
        if row > at:
            found.append((at, row - at))
        at = row + count
    return found
