"""Compares every load with its save, byte by byte, under DSV4_VERIFY: a lost byte only makes answers worse.

A checksum of each host unit, taken at the save and again before the load, finds units overwritten while the request
was away. A re-read of the device after the load uses plain slices, which share no kernel with the copier.
Ranks that share an arena hold the same cache, by design and not by guarantee: a third check compares the other ranks'
shares with this rank's live rows, before its pages are freed.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sglang_dsv4.cache.family import Family
from sglang_dsv4.cache.rows import Spans
from sglang_dsv4.errors import VerifyMismatch
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.transfer.buffers import DeviceBuffers
from sglang_dsv4.transfer.reference import Piece, pieces, tail_image

Checksums = dict[int, int]  # by the index of the unit among the copy's


def checksums(copy: HostCopy) -> Checksums:
    """Computes the CRC-32 of every host unit that ``copy`` saved; bytes that are not live stay as they are, too."""
    first = copy.shares[0].start
    return {first + number: _checksum(copy, unit) for number, unit in enumerate(copy.units[first:])}


def check_host(copy: HostCopy) -> None:
    """Raises VerifyMismatch when the host bytes are not those that were saved."""
    page = copy.geometry.page_size
    for index, unit in enumerate(copy.units):
        if copy.checksums[index] != _checksum(copy, unit):
            number = copy.begins + index
            where = f"tokens {number * page} to {min((number + 1) * page, copy.tokens)}"
            if index >= copy.in_pages:
                where = f"unit {index - copy.in_pages} of {copy.in_tail} of the tail"
            raise VerifyMismatch(
                f"host copy changed since the save: {where} (checksum of {copy.memory.units.nbytes} bytes)"
            )


def _checksum(copy: HostCopy, unit: int) -> int:
    return zlib.crc32(copy.memory.bytes_of(unit).numpy().data)


def check_shares(buffers: DeviceBuffers, copy: HostCopy, spans_of: tuple[Spans, ...]) -> None:
    """Raises VerifyMismatch where another rank saved other bytes than live here; dead bytes may differ."""
    if len(copy.shares) == 1:
        return
    for piece in pieces(buffers, copy, spans_of, tail_image(copy)):
        live = None
        if piece.number is not None:
            if piece.number in copy.share:
                continue
            spans = piece.spans
            left = copy.tokens - int(spans.positions[piece.span])
            live = _live_bytes(spans.family, min(spans.family.rows, -(-left // spans.family.ratio)))
        _compare(piece, functools.partial(_other_bytes, copy, piece), live)


def _other_bytes(copy: HostCopy, piece: Piece, byte: int) -> str:
    """Names the rank that saved a byte of ``piece``; a piece of the tail may lie in the units of two."""
    index = piece.number
    if index is None:
        index = copy.in_pages + (piece.at + byte) // copy.memory.units.nbytes
    return f"rank {copy.rank} has other bytes than rank {copy.saver(index)} saved"


@functools.cache
def _live_bytes(family: Family, rows: int) -> npt.NDArray[np.bool_]:
    """Masks the bytes of a whole page that hold its first ``rows`` rows."""
    live = np.zeros(family.page_bytes, dtype=bool)
    for number, plane in enumerate(family.planes):
        for row in range(rows):
            start = family.row_offset(number, row)
            live[start : start + plane.row_bytes] = True
    return live


def check_device(buffers: DeviceBuffers, copy: HostCopy, spans_of: tuple[Spans, ...]) -> None:
    """Re-read every piece from the device and raise VerifyMismatch at the first byte that differs."""
    for piece in pieces(buffers, copy, spans_of, tail_image(copy)):
        _compare(piece, lambda byte: "loaded bytes differ")


def _compare(piece: Piece, trouble: Callable[[int], str], live: npt.NDArray[np.bool_] | None = None) -> None:
    """Raises VerifyMismatch at the first byte that differs.

    trouble: names it, by its number in the piece. live: mask of the bytes that count.
    """
    saved, found = piece.host, piece.device.cpu()
    differs = (saved != found).numpy() & (True if live is None else live)
    if not differs.any():
        return
    row, byte = np.argwhere(differs)[0].tolist()
    family = piece.spans.family
    where = family.row_at(byte) if family.whole_pages else row
    raise VerifyMismatch(
        f"{trouble(row * saved.shape[1] + byte)}: family {family.name}, layer {family.layers[piece.layer]}, position "
        f"{piece.spans.position_of(piece.span, where)}, byte {byte} of the {'page' if family.whole_pages else 'row'}"
        f"{'' if len(family.planes) == 1 or family.whole_pages else f' in plane {piece.plane}'}: "
        f"saved {int(saved[row, byte])}, found {int(found[row, byte])}"
    )
