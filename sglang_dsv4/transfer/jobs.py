"""A copy and where its request lies -> the small arrays a path works from.

The rows of a copy (window and request group) are described against its *row image*: its window block followed by
its request block, as they lie in two places of the arena or one after the other in a staging buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from sglang_dsv4.cache.families import Address, Group, c128_pending_start, window_start
from sglang_dsv4.cache.packed import PackedBlock
from sglang_dsv4.cache.rows import Int64s, Place, Spans, plan, segments
from sglang_dsv4.hostmem.memory import HostCopy, HostMemory
from sglang_dsv4.transfer.buffers import DeviceBuffers
from triton_ops.copy_rows import EMPTY, FIELDS, HOST_OFFSET, NOWHERE, Where

DEVICE_OFFSET = FIELDS.index("device_offset")
RowImage = tuple[tuple[int, int, int], ...]
PhaseKey = tuple[int, bool]  # tokens, of which only the remainder counts from one period on; whether it is a save


@dataclass(frozen=True)
class Rows:
    """The rows of one save or load.

    table: int64 [n, 8], segments as ``copy_rows`` takes them, host offsets counted in the row image. most_layers,
    most_bytes: bounds over them.
    """

    table: Int64s
    most_layers: int
    most_bytes: int

    @classmethod
    def of(cls, segments: list[tuple[int, ...]]) -> Rows:
        """From tuples of the ``FIELDS``."""
        layers = max((s[1] for s in segments), default=0)
        nbytes = max((s[5] * s[6] for s in segments), default=0)
        return cls(np.array(segments, dtype=np.int64).reshape(-1, len(FIELDS)), layers, nbytes)


@dataclass(frozen=True)
class Jobs:
    """What one save or load moves.

    pages[i] of every buffer of the block group <-> host block blocks[i]; pages lie on the device. image: (offset in
    the arena, offset in the image, live bytes) of the window block and of the request block.
    """

    pages: torch.Tensor
    blocks: Int64s
    rows: Rows | PlacedRows
    image: RowImage

    def rows_in_arena(self) -> Int64s:
        """The segments with host offsets counted in the arena."""
        table = self.rows.table
        moved = table.copy()
        for arena, start, _ in reversed(self.image):
            here = (table[:, HOST_OFFSET] >= start) & (moved[:, HOST_OFFSET] == table[:, HOST_OFFSET])
            moved[here, HOST_OFFSET] += arena - start
        return moved


def image_bytes(memory: HostMemory) -> int:
    """Size of a row image."""
    return sum(memory.regions[group].packed.block_stride for group in (Group.WINDOW, Group.REQUEST))


def row_image(copy: HostCopy) -> RowImage:
    """``Jobs.image`` of a copy: the window block, and of the request block the pending rows, one run a family."""
    found, start = [], 0
    pending = copy.tokens - c128_pending_start(copy.tokens)
    for group in (Group.WINDOW, Group.REQUEST):
        packed = copy.memory.regions[group].packed
        runs = [(0, packed.payload_end)]
        if group is Group.REQUEST:
            runs = [(packed.slot_offset(f, 0), pending * f.host_row_stride(0)) for f in packed.families if f.layers]
        if copy.tokens and len(copy.blocks[group]):
            block = copy.memory.offset(group, int(copy.blocks[group][0]))
            found += [(block + first, start + first, live) for first, live in runs if live]
        start += packed.block_stride
    return tuple(found)


def plan_rows(side: DeviceBuffers, memory: HostMemory, plan: tuple[Spans, ...], cleared_slot: int | None) -> Rows:
    """Rows of a request that lies anywhere, from its spans; no loop over rows or layers.

    cleared_slot: a load resets what else this slot's state rings hold: they are its previous owner's rows, and with
    speculation they can be read.
    """
    rows: list[tuple[int, ...]] = []
    start = {Group.WINDOW: 0, Group.REQUEST: memory.regions[Group.WINDOW].packed.block_stride}
    for spans in plan:
        family = spans.family
        if family.whole_pages or not family.layers:
            continue
        base = start[family.group] + memory.regions[family.group].packed.slot_offset(family, 0)
        rows += _segments(side, spans, base)
        if family.address is Address.REQUEST_SLOT and cleared_slot is not None:
            rows += _resets(side, spans, cleared_slot)
    return Rows.of(rows)


def _segments(side: DeviceBuffers, spans: Spans, base: int) -> list[tuple[int, ...]]:
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


def _resets(side: DeviceBuffers, spans: Spans, slot: int) -> list[tuple[int, ...]]:
    """EMPTY segments over the rows of the ring that no span holds."""
    family, at = spans.family, 0
    found: list[tuple[int, ...]] = []
    held = sorted(zip(spans.rows.tolist(), spans.counts.tolist(), strict=True))
    for row, count in [*held, (family.rows, 0)]:
        if row > at:
            device = slot * family.page_bytes + at * family.row_bytes
            first, layers = side.row_base[family.name], len(family.layers)
            found.append((first, layers, device, EMPTY, 0, row - at, family.row_bytes, 0))
        at = row + count
    return found


def packed_rows(memory: HostMemory) -> tuple[PackedBlock, ...]:
    """The packed blocks that rows lie in: what their host offsets depend on."""
    return tuple(memory.regions[group].packed for group in (Group.WINDOW, Group.REQUEST))


class RowTemplates:
    """Rows of requests that lie page by page, without planning them one by one.

    Which rows live, and where on the host, depends on the token count alone, and from one period on only on its
    remainder. Each such *phase* is planned once, for a request in SWA pages 1, 2 and slot 0; for another request
    the device offsets are moved to its own pages and slot.
    """

    def __init__(self, side: DeviceBuffers, memory: HostMemory) -> None:
        self._side, self._memory = side, memory
        self._period = math.lcm(side.geometry.page_size, side.geometry.c128_ring)
        self._phases: dict[PhaseKey, Phase] = {}

    @classmethod
    def of(cls, side: DeviceBuffers, memory: HostMemory) -> RowTemplates:
        """Those of ``side``, the same for all that ask."""
        return side.once(("row phases", packed_rows(memory)), lambda: cls(side, memory))

    def rows(self, tokens: int, window_pages: tuple[int, ...], slot: int, save: bool) -> Rows | PlacedRows:
        """Rows to save, or to load (resets included), as ``plan_rows`` would give them."""
        key = (tokens if tokens < self._period else self._period + tokens % self._period, save)
        return PlacedRows(key, self._phase(key), (slot, *window_pages, *NOWHERE)[:3])  # type: ignore[arg-type]

    def phases(self) -> Iterator[tuple[PhaseKey, Phase]]:
        """Every phase there is; none is planned again after that."""
        for save in (True, False):
            for tokens in range(2 * self._period):
                yield (tokens, save), self._phase((tokens, save))

    def _phase(self, key: PhaseKey) -> Phase:
        phase = self._phases.get(key)
        if phase is None:
            phase = self._phases[key] = self._plan(*key)
        return phase

    def _plan(self, tokens: int, save: bool) -> Phase:
        side, page = self._side, self._side.geometry.page_size
        start = window_start(side.geometry, tokens)
        swa = np.arange(start, tokens, dtype=np.int64) + (1 - start // page) * page
        place = Place(tokens, np.zeros(-(-tokens // page), np.int64), swa, 0)
        spans = plan(side.geometry, side.families, place)
        rows = plan_rows(side, self._memory, spans, None if save else 0)
        family_at = {side.row_base[f.name]: f for f in side.families if f.layers and not f.whole_pages}
        page_bytes = np.array([family_at[first].page_bytes for first in rows.table[:, 0].tolist()], np.int64)
        follows = rows.table[:, DEVICE_OFFSET] // page_bytes
        rows.table[:, DEVICE_OFFSET] -= follows * page_bytes
        return Phase(rows, follows, page_bytes)


class Phase(NamedTuple):
    """``rows`` at page and slot 0. Segment i follows the slot (follows[i] = 0) or window page follows[i] - 1."""

    rows: Rows
    follows: Int64s
    page_bytes: Int64s

    def template(self) -> Int64s:
        """int64 [n, 10], as ``copy_rows`` takes it."""
        return np.column_stack((self.rows.table, self.follows, self.page_bytes))


@dataclass(frozen=True)
class PlacedRows:
    """The rows of ``phase`` of one request. where: its slot and its window pages, -1 for a page it has not.

    A Rows for those who want the segments; who has the template of ``key`` on the card needs ``where`` alone.
    """

    key: PhaseKey
    phase: Phase
    where: Where

    @property
    def table(self) -> Int64s:
        """As ``Rows.table``; a new one each time."""
        table = self.phase.rows.table.copy()
        table[:, DEVICE_OFFSET] += np.array(self.where)[self.phase.follows] * self.phase.page_bytes
        return table

    @property
    def most_layers(self) -> int:
        """As ``Rows.most_layers``."""
        return self.phase.rows.most_layers

    @property
    def most_bytes(self) -> int:
        """As ``Rows.most_bytes``."""
        return self.phase.rows.most_bytes
