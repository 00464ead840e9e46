"""Spans of a copy -> the small arrays a path works from.

The rows of a copy (window and request group) are described against its *row image*: its window block followed by
its request block, as they lie in two places of the arena or one after the other in a staging buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_dsv4.cache.families import Group, c128_pending_start
from sglang_dsv4.cache.rows import Int64s, Spans, segments
from sglang_dsv4.hostmem.memory import HostCopy, HostMemory
from sglang_dsv4.transfer.device import DeviceSide

RowImage = tuple[tuple[int, int, int], ...]
HOST_OFFSET = 3  # column of a segment, see triton_ops.copy_rows.FIELDS


@dataclass(frozen=True)
class Jobs:
    """What one save or load moves.

    pages[i] of every buffer of the block group <-> host block blocks[i]. rows: int64 [n, 8], segments as
    ``copy_rows`` takes them, host offsets counted in the row image. most_layers, most_bytes: bounds over them.
    image: (offset in the arena, offset in the image, live bytes) of the window block and of the request block.
    """

    pages: Int64s
    blocks: Int64s
    rows: Int64s
    most_layers: int
    most_bytes: int
    image: RowImage

    def rows_in_arena(self) -> Int64s:
        """``rows`` with host offsets counted in the arena."""
        moved = self.rows.copy()
        for arena, start, _ in reversed(self.image):
            here = (self.rows[:, HOST_OFFSET] >= start) & (moved[:, HOST_OFFSET] == self.rows[:, HOST_OFFSET])
            moved[here, HOST_OFFSET] += arena - start
        return moved


def image_bytes(memory: HostMemory) -> int:
    """Size of a row image."""
    return sum(memory.regions[group].packed.block_stride for group in (Group.WINDOW, Group.REQUEST))


def row_image(copy: HostCopy) -> RowImage:
    """``Jobs.image`` of a copy: the window block, and of the request block the pending rows, which are one run."""
    found, start = [], 0
    for group in (Group.WINDOW, Group.REQUEST):
        packed = copy.memory.regions[group].packed
        live = packed.payload_end
        if group is Group.REQUEST:
            pending = copy.tokens - c128_pending_start(copy.tokens)
            live = max((pending * f.host_row_stride(0) for f in packed.families if f.layers), default=0)
        if live and copy.tokens and len(copy.blocks[group]):
            found.append((copy.memory.offset(group, int(copy.blocks[group][0])), start, live))
        start += packed.block_stride
    return tuple(found)


def describe(side: DeviceSide, copy: HostCopy, plan: tuple[Spans, ...]) -> Jobs:
    """Jobs of ``copy`` at the place that ``plan`` describes: no loop over pages, rows or layers."""
    pages = blocks = np.empty(0, np.int64)
    rows: list[tuple[int, ...]] = []
    start = {Group.WINDOW: 0, Group.REQUEST: copy.memory.regions[Group.WINDOW].packed.block_stride}
    for spans in plan:
        family = spans.family
        if not family.layers or not len(spans):
            continue
        if family.whole_pages:
            pages, blocks = spans.pages, copy.blocks[family.group][spans.blocks]
            continue
        packed = copy.memory.regions[family.group].packed
        base = packed.slot_offset(family, 0)
        rows += _segments(side, spans, start[family.group] + base)
    table = np.array(rows, dtype=np.int64).reshape(-1, 8)
    image = row_image(copy)
    layers = max((row[1] for row in rows), default=0)
    return Jobs(pages, blocks, table, layers, max((row[5] * row[6] for row in rows), default=0), image)


def _segments(side: DeviceSide, spans: Spans, base: int) -> list[tuple[int, ...]]:
    """One tuple a span and plane, see ``triton_ops.copy_rows.FIELDS``."""
    family = spans.family
    runs = segments(spans)
    count = len(spans)
    return [
        (
            side.row_base[family.name], len(family.layers), device, base + host, family.host_layer_stride,
            rows, family.planes[number // count].row_bytes, family.host_row_stride(number // count),
        )
        for number, (device, host, rows) in enumerate(
            zip(runs.device.tolist(), runs.host.tolist(), runs.rows.tolist(), strict=True)
        )
    ]  # fmt: skip
