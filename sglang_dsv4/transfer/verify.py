"""Compares every load with its save, byte by byte, under DSV4_VERIFY: a lost byte only makes answers worse.

A checksum of each host block, taken at the save and again before the load, finds blocks overwritten while the request
was away. A re-read of the device after the load uses plain slices, which share no kernel with the copier.
Ranks that share an arena hold the same cache, by design and not by guarantee: a third check compares the other ranks'
shares with this rank's live rows, before its pages are freed.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sglang_dsv4.cache.family import Family, Group
from sglang_dsv4.cache.rows import Spans
from sglang_dsv4.errors import VerifyMismatch
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.transfer.buffers import DeviceBuffers
from sglang_dsv4.transfer.reference import Piece, pieces

Checksums = dict[tuple[Group, int], int]  # by group, and the page of a paged block


def checksums(copy: HostCopy) -> Checksums:
    """Computes the CRC-32 of every host block that ``copy`` saved; bytes that are not live stay as they are, too."""
    return {
        key: zlib.crc32(_bytes(copy, key[0], block).data)
        for key, block in _blocks(copy)
        if key[0] is not Group.PAGED or key[1] >= copy.first_page
    }


def check_host(copy: HostCopy) -> None:
    """Raises VerifyMismatch when the host bytes are not those that were saved."""
    page = copy.geometry.page_size
    for key, block in _blocks(copy):
        group, number = key
        found = _bytes(copy, group, block)
        if copy.checksums[key] != zlib.crc32(found.data):
            end = min((number + 1) * page, copy.tokens)
            where = f"tokens {number * page} to {end}" if group is Group.PAGED else f"the {group.value} block"
            raise VerifyMismatch(f"host copy changed since the save: {where} (checksum of {found.nbytes} bytes)")


def _blocks(copy: HostCopy) -> Iterator[tuple[tuple[Group, int], int]]:
    """Yields (key, host block) of each block of ``copy``."""
    for group, blocks in copy.blocks.items():
        first = copy.begins if group is Group.PAGED else 0
        yield from (((group, first + number), block) for number, block in enumerate(blocks))


def _bytes(copy: HostCopy, group: Group, block: int) -> npt.NDArray[np.uint8]:
    memory = copy.memory
    return memory.arena.region[memory.offset(group, block) : memory.offset(group, block + 1)].numpy()


def check_shares(buffers: DeviceBuffers, copy: HostCopy, spans_of: tuple[Spans, ...]) -> None:
    """Raises VerifyMismatch where another rank saved other bytes than live here; dead bytes may differ."""
    for piece in pieces(buffers, copy, spans_of):
        spans, block = piece.spans, int(piece.spans.blocks[piece.span])
        saver = next(rank for rank, share in enumerate(copy.shares) if share.has(spans.family.group, block))
        if saver != copy.rank:
            live = None
            if spans.family.whole_pages:
                left = copy.tokens - int(spans.positions[piece.span])
                live = _live_bytes(spans.family, min(spans.family.rows, -(-left // spans.family.ratio)))
            _compare(piece, f"rank {copy.rank} has other bytes than rank {saver} saved", live)


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
    for piece in pieces(buffers, copy, spans_of):
        _compare(piece, "loaded bytes differ")


def _compare(piece: Piece, trouble: str, live: npt.NDArray[np.bool_] | None = None) -> None:
    """Raises VerifyMismatch at the first byte that differs. live: mask of the bytes that count."""
    saved, found = piece.host, piece.device.cpu()
    differs = (saved != found).numpy() & (True if live is None else live)
    if not differs.any():
        return
    row, byte = np.argwhere(differs)[0].tolist()
    family = piece.spans.family
    where = family.row_at(byte) if family.whole_pages else row
    raise VerifyMismatch(
        f"{trouble}: family {family.name}, layer {family.layers[piece.layer]}, position "
        f"{piece.spans.position_of(piece.span, where)}, byte {byte} of the {'page' if family.whole_pages else 'row'}"
        f"{'' if len(family.planes) == 1 or family.whole_pages else f' in plane {piece.plane}'}: "
        f"saved {int(saved[row, byte])}, found {int(found[row, byte])}"
    )
