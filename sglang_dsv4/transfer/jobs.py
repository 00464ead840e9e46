"""Spans of a copy -> the small arrays a path works from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_dsv4.cache.rows import Int64s, Segments, Spans, segments
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.transfer.device import DeviceSide
from triton_ops.copy_rows import CHUNK_BYTES


@dataclass(frozen=True)
class Jobs:
    """What one save or load moves.

    pages[i] of every buffer of the block group <-> host block blocks[i]; items: int64 [n, 4] as ``copy_rows``
    takes them, host offsets counted from the start of the arena.
    """

    pages: Int64s
    blocks: Int64s
    items: Int64s


def describe(side: DeviceSide, copy: HostCopy, plan: tuple[Spans, ...]) -> Jobs:
    """Jobs of ``copy`` at the place that ``plan`` describes. Vectorised over pages, rows and layers."""
    pages = blocks = np.empty(0, np.int64)
    items = []
    for spans in plan:
        family = spans.family
        if not family.layers or not len(spans):
            continue
        numbers = copy.blocks[family.group]
        if family.whole_pages:
            pages, blocks = spans.pages, numbers[spans.blocks]
        else:
            items.append(_items(side, copy, spans, int(numbers[0])))
    table = np.concatenate(items) if items else np.empty((0, 4), np.int64)
    return Jobs(pages, blocks, np.ascontiguousarray(table))


def _items(side: DeviceSide, copy: HostCopy, spans: Spans, block: int) -> Int64s:
    """Items of one family: its byte runs, cut to CHUNK_BYTES, for every layer."""
    family = spans.family
    region = copy.memory.regions[family.group]
    base = region.start + block * region.packed.block_stride + region.packed.slot_offset(family, 0)
    device, host, nbytes = _cut(segments(spans))
    layers = np.arange(len(family.layers), dtype=np.int64)
    shape = (len(layers), len(device))
    return np.stack(
        [
            np.broadcast_to(side.row_base[family.name] + layers[:, None], shape),
            np.broadcast_to(device, shape),
            base + layers[:, None] * family.host_bytes + host,
            np.broadcast_to(nbytes, shape),
        ],
        axis=-1,
    ).reshape(-1, 4)


def _cut(runs: Segments) -> tuple[Int64s, Int64s, Int64s]:
    """Byte runs cut to pieces of at most CHUNK_BYTES."""
    pieces = -(-runs.nbytes // CHUNK_BYTES)
    order = np.repeat(np.arange(len(pieces)), pieces)
    first = np.cumsum(pieces) - pieces
    start = (np.arange(len(order)) - first[order]) * CHUNK_BYTES
    return (
        runs.device[order] + start,
        runs.host[order] + start,
        np.minimum(CHUNK_BYTES, runs.nbytes[order] - start),
    )
