"""clear_rings: reset one request slot's state ring in every layer, in one launch.

An empty state row is zeros in its first half (values) and -inf in its second (scores).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops.tables import ALIGNMENT, BufferTable

TILE_WORDS = 2048
NEGATIVE_INFINITY = {torch.float32: 0xFF800000FF800000, torch.bfloat16: 0xFF80FF80FF80FF80}


def empty_score_word(dtype: torch.dtype) -> int:
    """Eight bytes of -inf of ``dtype``, as a signed 64-bit integer."""
    if dtype not in NEGATIVE_INFINITY:
        raise TypeError(f"state dtype {dtype} is not covered (covered: float32, bfloat16)")
    return NEGATIVE_INFINITY[dtype] - (1 << 64)


@triton.jit(do_not_specialize=["ring_word", "score_word"])
def _clear_rings_kernel(anchor, offsets, ring_word, row_words, ring_words, score_word, TILE: tl.constexpr):
    layer = tl.program_id(0)
    lane = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word = tl.where(lane % row_words < row_words // 2, 0, score_word).to(tl.int64)
    ring = anchor + tl.load(offsets + layer) // 8 + ring_word
    tl.store(ring + lane, word, mask=lane < ring_words)


def clear_rings(table: BufferTable, slot: int, rows: int, row_bytes: int, dtype: torch.dtype) -> None:
    """Reset rows ``slot*rows .. slot*rows+rows-1`` of every buffer of ``table``.

    table: one state buffer a layer, all alike, rows of ``row_bytes`` (a multiple of 16). Raises IndexError when
    the ring would touch the last row, the engine's empty sentinel, or lie outside.
    """
    check_ring(table, slot, rows, row_bytes)
    words = rows * row_bytes // 8
    grid = (len(table.buffers), triton.cdiv(words, TILE_WORDS))
    _clear_rings_kernel[grid](
        table.anchor,
        table.offsets,
        slot * words,
        row_bytes // 8,
        words,
        empty_score_word(dtype),
        TILE=TILE_WORDS,
    )


def check_ring(table: BufferTable, slot: int, rows: int, row_bytes: int) -> None:
    """Raise IndexError unless the slot's ring lies before the sentinel of every buffer."""
    if rows < 1 or row_bytes < ALIGNMENT or row_bytes % ALIGNMENT:
        raise ValueError(f"a ring of {rows} rows of {row_bytes} bytes: rows must be multiples of {ALIGNMENT} bytes")
    end = (slot + 1) * rows * row_bytes
    for number, buffer in enumerate(table.buffers):
        if slot < 0 or end > buffer.numel() - row_bytes:
            raise IndexError(f"request slot {slot} has no ring of {rows} rows in state buffer {number}")


def clear_rings_torch(table: BufferTable, slot: int, rows: int, row_bytes: int, dtype: torch.dtype) -> None:
    """Reference of ``clear_rings`` on any device."""
    empty_score_word(dtype)  # refuses what the kernel refuses
    check_ring(table, slot, rows, row_bytes)
    for buffer in table.buffers:
        ring = buffer.view(-1)[slot * rows * row_bytes : (slot + 1) * rows * row_bytes].view(dtype).view(rows, -1)
        half = ring.shape[1] // 2
        ring[:, :half] = 0
        ring[:, half:] = float("-inf")
