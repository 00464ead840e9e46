"""Spans of a copy -> the small arrays a path works from.

The rows of a copy (window and request group) are described against its *row image*: its window block followed by
its request block, as they lie in two places of the arena or one after the other in a staging buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_dsv4.cache.families import Group
from sglang_dsv4.cache.rows import Int64s, Spans, segments
from sglang_dsv4.hostmem.memory import HostCopy, HostMemory
from sglang_dsv4.transfer.device import DeviceSide

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
    image: tuple[tuple[int, int, int], ...]

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


def describe(side: DeviceSide, copy: HostCopy, plan: tuple[Spans, ...]) -> Jobs:
    """Jobs of ``copy`` at the place that ``plan`` describes: no loop over pages, rows or layers."""
    pages = blocks = np.empty(0, np.int64)
    rows: list[tuple[int, ...]] = []
    live = dict.fromkeys((Group.WINDOW, Group.REQUEST), 0)
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
        live[family.group] = max(live[family.group], base + _reach(spans))
    table = np.array(rows, dtype=np.int64).reshape(-1, 8)
    image = tuple(
        (copy.memory.offset(group, int(copy.blocks[group][0])), start[group], nbytes)
        for group, nbytes in live.items()
        if nbytes
    )
    layers = max((row[1] for row in rows), default=0)
    return Jobs(pages, blocks, table, layers, max((row[5] * row[6] for row in rows), default=0), image)


def _reach(spans: Spans) -> int:
    """Bytes from the family's offset to the end of its live rows: all of it, unless rows are interleaved."""
    family = spans.family
    if not family.interleaved:
        return len(family.layers) * family.host_bytes
    return int(spans.counts.sum()) * family.host_row_stride(0)


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
