"""DSV4_VERIFY: every load is followed by a re-read, compared with the saved copy byte for byte.

Two checks, because there are two places to go wrong: a checksum per host slot, taken at the save and again
before the load (blocks overwritten while the request was away), and a re-read of the device after the load by
plain slices, which share no kernel with the path under test.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_dsv4.cache.families import Family
from sglang_dsv4.cache.rows import Int64s, Segments, Spans, segments
from sglang_dsv4.errors import VerifyMismatch
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.transfer.device import DeviceSide

Bytes = npt.NDArray[np.uint8]


class Slot(NamedTuple):
    """One contiguous piece of a copy in the host arena, wherever the request lies on the device."""

    family: Family
    layer: int
    position: int
    host: int
    nbytes: int


class Run(NamedTuple):
    """One byte run of one layer: where it lies in the host arena and on the device."""

    spans: Spans
    layer_index: int
    span: int
    host: int
    device: int
    nbytes: int
    row_bytes: int


def _byte_runs(spans: Spans) -> Segments:
    """Whole pages as one run each (padding included), rows as one run a plane."""
    if not spans.family.whole_pages:
        return segments(spans)
    width = np.full(len(spans), spans.family.page_bytes, np.int64)
    return Segments(
        spans.family, spans.pages * spans.family.page_bytes, np.zeros(len(spans), np.int64), width,
        np.arange(len(spans), dtype=np.int64),
    )  # fmt: skip


def runs(copy: HostCopy, plan: tuple[Spans, ...]) -> Iterator[Run]:
    """Every byte run of ``copy``, layer by layer."""
    for spans in plan:
        family = spans.family
        if not family.layers or not len(spans):
            continue
        region = copy.memory.regions[family.group]
        pieces = _byte_runs(spans)
        blocks: Int64s = copy.blocks[family.group][spans.blocks[pieces.spans]]
        for index in range(len(family.layers)):
            base = region.start + region.packed.slot_offset(family, index)
            for k, span in enumerate(pieces.spans.tolist()):
                host = base + int(blocks[k]) * region.packed.block_stride + int(pieces.host[k])
                row_bytes = int(pieces.nbytes[k]) // int(spans.counts[span])
                yield Run(spans, index, span, host, int(pieces.device[k]), int(pieces.nbytes[k]), row_bytes)


def slots(copy: HostCopy, plan: tuple[Spans, ...]) -> Iterator[Slot]:
    """Every piece of ``copy`` in host memory: a whole page, or one plane of the rows of a family."""
    for spans in plan:
        family = spans.family
        if not family.layers or not len(spans):
            continue
        region = copy.memory.regions[family.group]
        pieces = [(0, family.page_bytes)]
        if not family.whole_pages:
            rows = int(spans.counts.sum())
            pieces = [(plane.offset, rows * plane.row_bytes) for plane in family.host_planes]
        for index, layer in enumerate(family.layers):
            base = region.start + region.packed.slot_offset(family, index)
            for number, block in enumerate(copy.blocks[family.group].tolist()):
                for offset, nbytes in pieces:
                    host = base + block * region.packed.block_stride + offset
                    yield Slot(family, layer, int(spans.positions[number]), host, nbytes)


def checksums(copy: HostCopy, plan: tuple[Spans, ...]) -> list[int]:
    """CRC-32 of every slot of ``copy``, in the order of ``slots``."""
    arena: Bytes = copy.memory.arena.region.numpy()
    return [zlib.crc32(arena[slot.host : slot.host + slot.nbytes].data) for slot in slots(copy, plan)]


def check_host(copy: HostCopy, plan: tuple[Spans, ...]) -> None:
    """Raise VerifyMismatch when the host bytes are not those that were saved."""
    for slot, saved, found in zip(slots(copy, plan), copy.checksums, checksums(copy, plan), strict=True):
        if saved != found:
            raise VerifyMismatch(
                f"host copy changed since the save: family {slot.family.name}, layer {slot.layer}, "
                f"from position {slot.position} (checksum of {slot.nbytes} bytes)"
            )


def check_device(side: DeviceSide, copy: HostCopy, plan: tuple[Spans, ...]) -> None:
    """Re-read every run from the device and raise VerifyMismatch at the first byte that differs."""
    arena = copy.memory.arena.region.numpy()
    for run in runs(copy, plan):
        buffer = side.buffers[run.spans.family.name][run.layer_index].view(-1)
        found = buffer[run.device : run.device + run.nbytes].cpu().numpy()
        saved = arena[run.host : run.host + run.nbytes]
        if not np.array_equal(found, saved):
            byte = int(np.flatnonzero(found != saved)[0])
            raise VerifyMismatch(
                f"loaded bytes differ: {_where(run, byte)}: saved {int(saved[byte])}, found {int(found[byte])}"
            )


def _where(run: Run, byte: int) -> str:
    """Family, layer, position and byte of ``byte`` inside ``run``."""
    family = run.spans.family
    row = _row_of(run, byte)
    position = run.spans.position_of(run.span, row)
    return f"family {family.name}, layer {family.layers[run.layer_index]}, position {position}, byte {byte}"


def _row_of(run: Run, byte: int) -> int:
    """Row of a byte: by its plane in a whole page, by division in a run of rows."""
    family = run.spans.family
    if not family.whole_pages:
        return byte // run.row_bytes
    for plane in family.planes:
        if plane.offset <= byte < plane.offset + family.rows * plane.row_bytes:
            return (byte - plane.offset) // plane.row_bytes
    return family.rows - 1  # padding
