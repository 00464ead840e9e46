"""Rows of the DeepSeek-V4 indexer pages (fp8 or fp4 keys, 4 scale bytes): read and write them.

Page of P rows: P x head_dim_bytes key bytes, P x 4 scale bytes, no padding. head_dim_bytes is 128
with fp8 keys (one fp32 scale) and 64 with fp4 keys (four UE8M0 scales, lowest group first).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from triton_ops._checks import check_positive
from triton_ops.planar_rows import (
    WORD_BYTES,
    Part,
    RowLayout,
    gather_rows,
    gather_rows_torch,
    scatter_rows,
    scatter_rows_torch,
)

SCALE_BYTES = 4

Rows = tuple[torch.Tensor, torch.Tensor]


@lru_cache
def _row(head_dim_bytes: int) -> RowLayout:
    check_positive("head_dim_bytes", head_dim_bytes)
    if head_dim_bytes % WORD_BYTES:
        raise ValueError(f"head_dim_bytes must be a multiple of {WORD_BYTES}, not {head_dim_bytes}")
    return RowLayout(
        head=Part("k", head_dim_bytes, torch.uint8),
        tail=None,
        scale=Part("scale", SCALE_BYTES, torch.uint8),
        page_align=1,
    )


def get_index_k_and_s(
    buf: torch.Tensor,
    loc: torch.Tensor,
    page_size: int,
    head_dim_bytes: int,
    *,
    out: Sequence[torch.Tensor] | None = None,
    check: bool = False,
) -> Rows:
    """Gather the rows at `loc`: bytes exactly as stored, one launch, no wait for the device.

    buf: uint8 [num_pages, page_size * (head_dim_bytes + 4)], contiguous, 4-byte aligned
    loc: int32 or int64 [n], contiguous, on buf's device; order and repeats are free
    head_dim_bytes: key bytes of a row: 128 (fp8) or 64 (fp4); any multiple of 4 works
    out: the two result tensors to fill, contiguous, 4-byte aligned, disjoint from buf
    check: raise IndexError naming the first bad location and its position (waits for the device)

    Returns (k uint8 [n, head_dim_bytes], scale uint8 [n, 4]). A location outside
    [0, num_pages * page_size) reads nothing and gives a row of zeros.
    """
    return gather_rows(buf, loc, page_size, _row(head_dim_bytes), out, check)


def get_index_k_and_s_torch(
    buf: torch.Tensor,
    loc: torch.Tensor,
    page_size: int,
    head_dim_bytes: int,
    *,
    out: Sequence[torch.Tensor] | None = None,
    check: bool = False,
) -> Rows:
    """`get_index_k_and_s` in plain torch: same arguments, same result."""
    return gather_rows_torch(buf, loc, page_size, _row(head_dim_bytes), out, check)


def put_index_k_and_s(
    buf: torch.Tensor,
    loc: torch.Tensor,
    k: torch.Tensor,
    scale: torch.Tensor,
    page_size: int,
    head_dim_bytes: int,
    *,
    check: bool = False,
) -> None:
    """Scatter rows to `loc`: the head_dim_bytes + 4 bytes of each row, and no other byte.

    buf, loc, head_dim_bytes, check: as in `get_index_k_and_s`; buf is written in place
    k: uint8 [n, head_dim_bytes]; scale: uint8 [n, 4]; each contiguous, 4-byte aligned, on buf's
    device, disjoint from buf

    A location outside [0, num_pages * page_size) is skipped. A location given twice must carry the
    same row twice: which of two different rows wins is not defined, nor that one wins whole.
    """
    scatter_rows(buf, loc, (k, scale), page_size, _row(head_dim_bytes), check)


def put_index_k_and_s_torch(
    buf: torch.Tensor,
    loc: torch.Tensor,
    k: torch.Tensor,
    scale: torch.Tensor,
    page_size: int,
    head_dim_bytes: int,
    *,
    check: bool = False,
) -> None:
    """`put_index_k_and_s` in plain torch: same arguments, same effect, but waits for the device."""
    scatter_rows_torch(buf, loc, (k, scale), page_size, _row(head_dim_bytes), check)
