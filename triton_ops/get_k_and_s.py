"""Rows of the DeepSeek-V4 KV pages (448 fp8 NoPE, 64 bf16 RoPE, 8 scale bytes): read and write them.

Page of P rows: P x 576 value bytes, P x 8 scale bytes, padding to a multiple of 576 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triton_ops.planar_rows import (
    Part,
    RowLayout,
    gather_rows,
    gather_rows_torch,
    scatter_rows,
    scatter_rows_torch,
)

# Seven UE8M0 scales, one per 64 NoPE values, and a pad byte. The store kernel takes the seven and
# leaves the pad byte alone; a copy of a row must carry it, so here a scale is always 8 bytes.
ROW = RowLayout(
    head=Part("k_nope", 448, torch.float8_e4m3fn),
    tail=Part("k_rope", 64, torch.bfloat16),
    scale=Part("scale8", 8, torch.uint8),
    page_align=576,
)

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def get_k_and_s(
    buf: torch.Tensor,
    loc: torch.Tensor,
    page_size: int,
    *,
    out: Sequence[torch.Tensor] | None = None,
    check: bool = False,
) -> Rows:
    """Gather the rows at `loc`: bytes exactly as stored, one launch, no wait for the device.

    buf: uint8 [num_pages, page_bytes], contiguous, page_bytes = ceil(page_size * 584 / 576) * 576
    loc: int32 or int64 [n], contiguous, on buf's device; order and repeats are free
    out: the three result tensors to fill, contiguous, 4-byte aligned, disjoint from buf
    check: raise IndexError naming the first bad location and its position (waits for the device)

    Returns (k_nope float8_e4m3fn [n, 448], k_rope bfloat16 [n, 64], scale uint8 [n, 8]); the eighth
    scale byte is the pad byte. A location outside [0, num_pages * page_size) reads nothing and gives
    a row of zeros.
    """
    return gather_rows(buf, loc, page_size, ROW, out, check)


def get_k_and_s_torch(
    buf: torch.Tensor,
    loc: torch.Tensor,
    page_size: int,
    *,
    out: Sequence[torch.Tensor] | None = None,
    check: bool = False,
) -> Rows:
    """`get_k_and_s` in plain torch: same arguments, same result."""
    return gather_rows_torch(buf, loc, page_size, ROW, out, check)


def put_k_and_s(
    buf: torch.Tensor,
    loc: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    scale8: torch.Tensor,
    page_size: int,
    *,
    check: bool = False,
) -> None:
    """Scatter rows to `loc`: all 584 bytes of each row, pad byte included, and no other byte.

    buf, loc, check: as in `get_k_and_s`; buf is written in place
    k_nope: float8_e4m3fn [n, 448]; k_rope: bfloat16 [n, 64]; scale8: uint8 [n, 8]; each contiguous,
    4-byte aligned, on buf's device, disjoint from buf

    A location outside [0, num_pages * page_size) is skipped. A location given twice must carry the
    same row twice: which of two different rows wins is not defined, nor that one wins whole.
    """
    scatter_rows(buf, loc, (k_nope, k_rope, scale8), page_size, ROW, check)


def put_k_and_s_torch(
    buf: torch.Tensor,
    loc: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    scale8: torch.Tensor,
    page_size: int,
    *,
    check: bool = False,
) -> None:
    """`put_k_and_s` in plain torch: same arguments, same effect, but waits for the device."""
    scatter_rows_torch(buf, loc, (k_nope, k_rope, scale8), page_size, ROW, check)
