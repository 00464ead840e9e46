"""read_place: the few numbers that say where a request lies, gathered in one launch.

out = | full slot of position 0, page, 2 * page, ... | full slots of positions start.. | SWA slots of the same |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 256


@triton.jit(do_not_specialize=["tokens", "mapped", "start", "pages"])
def _read_place_kernel(indices, swa_map, out, tokens, mapped, page, start, pages, TILE: tl.constexpr):
    lane = tl.program_id(0) * TILE + tl.arange(0, TILE)
    first = tl.load(indices + lane * page, mask=lane < pages, other=0)
    tl.store(out + lane, first.to(tl.int64), mask=lane < pages)
    tail = tokens - start
    full = tl.load(indices + start + lane, mask=lane < tail, other=0).to(tl.int64)
    tl.store(out + pages + lane, full, mask=lane < tail)
    # A slot out of range reads the mapping's last entry, -1; the caller sees the slot itself.
    known = (full >= 0) & (full < mapped)
    swa = tl.load(swa_map + tl.where(known, full, mapped - 1), mask=lane < tail, other=0)
    tl.store(out + pages + tail + lane, swa.to(tl.int64), mask=lane < tail)


def place_size(tokens: int, page: int, start: int) -> int:
    """Entries of ``out``."""
    return -(-tokens // page) + 2 * (tokens - start)


def read_place(indices: torch.Tensor, swa_map: torch.Tensor, page: int, start: int, out: torch.Tensor) -> None:
    """Write the place of the request at ``indices`` to ``out``; one launch.

    indices: 1-D int32 or int64, full slots of positions 0..n-1, contiguous. swa_map: 1-D int64, its last entry -1.
    out: int64 of at least ``place_size`` entries, writable by the device (pinned host memory will do).
    """
    check_place(indices, swa_map, start, out, page)
    tokens = len(indices)
    pages = -(-tokens // page)
    grid = (triton.cdiv(max(pages, tokens - start, 1), TILE),)
    _read_place_kernel[grid](indices, swa_map, out, tokens, len(swa_map), page, start, pages, TILE=TILE)


def check_place(indices: torch.Tensor, swa_map: torch.Tensor, start: int, out: torch.Tensor, page: int) -> None:
    """Raise on arguments that the kernel cannot take."""
    for name, tensor in (("indices", indices), ("swa_map", swa_map), ("out", out)):
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise TypeError(f"{name} must be 1-D and contiguous")
    if indices.dtype not in {torch.int32, torch.int64} or swa_map.dtype != torch.int64 or out.dtype != torch.int64:
        raise TypeError("indices must be int32 or int64, swa_map and out int64")
    if not 0 <= start <= len(indices) or len(out) < place_size(len(indices), page, start):
        raise ValueError(f"start {start} of {len(indices)} tokens does not fit an output of {len(out)} entries")


def read_place_torch(indices: torch.Tensor, swa_map: torch.Tensor, page: int, start: int, out: torch.Tensor) -> None:
    """Reference of ``read_place`` on any device."""
    check_place(indices, swa_map, start, out, page)
    tail = indices[start:].to(torch.int64)
    known = (tail >= 0) & (tail < len(swa_map))
    swa = swa_map[torch.where(known, tail, len(swa_map) - 1)]
    place = torch.cat((indices[::page].to(torch.int64), tail, swa))
    out[: len(place)] = place.to(out.device)
