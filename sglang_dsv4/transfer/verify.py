"""DSV4_VERIFY: every load is followed by a re-read, compared with the saved copy byte for byte.

Two checks, because there are two places to go wrong: a checksum per piece of the host copy, taken at the save and
again before the load (blocks overwritten while the request was away), and a re-read of the device after the load by
plain slices, which share no kernel with the path under test.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from sglang_dsv4.cache.rows import Spans
from sglang_dsv4.errors import VerifyMismatch
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.transfer.buffers import DeviceBuffers


class Piece(NamedTuple):
    """One plane of one layer in one host block: ``host`` [rows, bytes], row 0 belonging to span ``span``.

    A whole page is a piece of one row.
    """

    spans: Spans
    layer: int
    plane: int
    span: int
    host: torch.Tensor


def pieces(copy: HostCopy, plan: tuple[Spans, ...]) -> Iterator[Piece]:
    """Every piece of ``copy`` in host memory, wherever the request lies on the device."""
    for spans in plan:
        family = spans.family
        if not family.layers or not len(spans):
            continue
        packed = copy.memory.regions[family.group].packed
        region = copy.memory.region_tensor(family.group)
        blocks = copy.blocks[family.group].tolist()
        for layer in range(len(family.layers)):
            if family.whole_pages:
                for span, block in enumerate(blocks):
                    start = block * packed.block_stride + packed.slot_offset(family, layer)
                    yield Piece(spans, layer, 0, span, region[start : start + family.page_bytes].view(1, -1))
            else:
                rows = int(spans.counts.sum())
                for plane in range(len(family.planes)):
                    yield Piece(spans, layer, plane, 0, packed.view(region, blocks[0], family, layer, plane)[:rows])


def checksums(copy: HostCopy, plan: tuple[Spans, ...]) -> list[int]:
    """CRC-32 of every piece of ``copy``, in the order of ``pieces``."""
    return [zlib.crc32(piece.host.contiguous().numpy().data) for piece in pieces(copy, plan)]


def check_host(copy: HostCopy, plan: tuple[Spans, ...]) -> None:
    """Raise VerifyMismatch when the host bytes are not those that were saved."""
    for piece, saved, found in zip(pieces(copy, plan), copy.checksums, checksums(copy, plan), strict=True):
        if saved != found:
            family = piece.spans.family
            raise VerifyMismatch(
                f"host copy changed since the save: family {family.name}, layer {family.layers[piece.layer]}, "
                f"from position {int(piece.spans.positions[piece.span])} (checksum of {piece.host.numel()} bytes)"
            )


def check_device(side: DeviceBuffers, copy: HostCopy, plan: tuple[Spans, ...]) -> None:
    """Re-read every row from the device and raise VerifyMismatch at the first byte that differs."""
    for piece in pieces(copy, plan):
        spans, family = piece.spans, piece.spans.family
        buffer = side.buffers[family.name][piece.layer].view(-1)
        if family.whole_pages:
            start = int(spans.pages[piece.span]) * family.page_bytes
            _compare(piece, piece.span, piece.host, buffer[start : start + family.page_bytes].view(1, -1))
            continue
        plane = family.planes[piece.plane]
        for span in range(len(spans)):
            start = int(spans.pages[span]) * family.page_bytes + plane.offset + int(spans.rows[span]) * plane.row_bytes
            count, first = int(spans.counts[span]), int(spans.host_rows[span])
            found = buffer[start : start + count * plane.row_bytes].view(count, plane.row_bytes)
            _compare(piece, span, piece.host[first : first + count], found)


def _compare(piece: Piece, span: int, saved: torch.Tensor, found: torch.Tensor) -> None:
    found = found.cpu()
    if torch.equal(saved, found):
        return
    row, byte = np.argwhere((saved != found).numpy())[0].tolist()
    family = piece.spans.family
    where = _row_in_page(piece, byte) if family.whole_pages else row
    raise VerifyMismatch(
        f"loaded bytes differ: family {family.name}, layer {family.layers[piece.layer]}, position "
        f"{piece.spans.position_of(span, where)}, byte {byte} of the {'page' if family.whole_pages else 'row'}"
        f"{'' if len(family.planes) == 1 or family.whole_pages else f' in plane {piece.plane}'}: "
        f"saved {int(saved[row, byte])}, found {int(found[row, byte])}"
    )


def _row_in_page(piece: Piece, byte: int) -> int:
    """Row of a byte of a whole page; padding counts as the last row."""
    family = piece.spans.family
    for plane in family.planes:
        if plane.offset <= byte < plane.offset + family.rows * plane.row_bytes:
            return (byte - plane.offset) // plane.row_bytes
    return family.rows - 1
