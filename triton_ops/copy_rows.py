"""Copies runs of rows of many device buffers to or from host memory (or its staging image), in one launch.

A segment is a run of rows that lies at the same place in several layers. Between transfers only its page number
changes, so segments stay on the device and page numbers come beside them:

    page = page_numbers[follows]
    for l in range(layers), r in range(rows):
        host[host_offset + l * layer_stride + r * row_stride : + row_bytes]
          <->  buffer[first + l][page * page_bytes + device_offset + r * row_bytes : + row_bytes]

A segment with host offset EMPTY has no host side: a load resets its rows to empty state rows, zeros in the first
half (values) and -inf in the second (scores); a save skips it.
A segment whose page number or page bytes are negative, or 2**31 or more, and a layer that leaves its buffer or the host
side, is skipped: nothing is read or written for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops._launch import Launcher
from triton_ops.tables import BufferTable

FIELDS = (
    "first", "layers", "device_offset", "host_offset", "layer_stride", "rows", "row_bytes", "row_stride",
    "follows", "page_bytes",
)  # fmt: skip
HOST_OFFSET = FIELDS.index("host_offset")
EMPTY = -1
PAGE_NUMBERS = 3
NEGATIVE_INFINITY = {torch.float32: 0xFF800000FF800000, torch.bfloat16: 0xFF80FF80FF80FF80}
CHUNK_WORDS = 4096  # 32 KiB a program
TILE_WORDS = 512  # 16 bytes a thread and step: stores to host memory then leave as whole lines


def empty_score_word(dtype: torch.dtype) -> int:
    """Returns eight bytes of -inf of ``dtype``, as a signed 64-bit integer."""
    if dtype not in NEGATIVE_INFINITY:
        raise TypeError(f"state dtype {dtype} is not covered (covered: float32, bfloat16)")
    return NEGATIVE_INFINITY[dtype] - (1 << 64)


@triton.jit(do_not_specialize=["host_bytes", "most_layers"])
def _copy_rows_kernel(
    anchor, offsets, sizes, host, host_bytes, segments, most_layers, page_numbers,
    SCORE: tl.constexpr, SAVE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BUFFERS: tl.constexpr,
    WIDTH: tl.constexpr, PAGE_NUMBERS: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0) % most_layers
    field = segments + (tl.program_id(0) // most_layers) * WIDTH
    buffer = tl.load(field) + layer
    layers = tl.load(field + 1)
    in_page = tl.load(field + 2)
    follows = tl.load(field + 8)
    page_bytes = tl.load(field + 9)
    followed = (follows >= 0) & (follows < PAGE_NUMBERS)
    page = tl.load(page_numbers + tl.where(followed, follows, 0))
    # A page number that the largest buffer could not hold is as good as none; its product would overflow.
    placed = followed & (page >= 0) & (page < 2147483648) & (page_bytes >= 0) & (page_bytes < 2147483648)
    placed = placed & (in_page >= 0) & (in_page < 4611686018427387904)
    in_buffer = tl.where(placed, tl.where(placed, in_page, 0) + page * tl.where(placed, page_bytes, 0), -1)
    in_host = tl.load(field + 3)
    layer_stride = tl.load(field + 4)
    rows = tl.load(field + 5)
    row_bytes = tl.load(field + 6)
    row_stride = tl.load(field + 7)
    empty = in_host == -1  # EMPTY
    if not SAVE:
        in_host = tl.where(empty, 0, in_host)
        layer_stride = tl.where(empty, 0, layer_stride)
        row_stride = tl.where(empty, 0, row_stride)
    known = (layer < layers) & (buffer >= 0) & (buffer < BUFFERS)
    buffer = tl.where(known, buffer, 0)
    # Compared by division and difference, so that a hostile value cannot overflow into range.
    size = tl.load(sizes + buffer)
    inside = known & (rows > 0) & (row_bytes > 0) & (in_buffer >= 0) & (in_host >= 0)
    inside = inside & (layer_stride >= 0) & (layer_stride <= host_bytes)
    inside = inside & (row_stride >= 0) & (row_stride <= host_bytes // tl.where(rows > 0, rows, 1))
    inside = inside & (row_bytes <= size) & (rows <= size // tl.where(row_bytes > 0, row_bytes, 1))
    rows = tl.where(inside, rows, 0)
    row_bytes = tl.where(inside, row_bytes, 8)
    inside = inside & (in_buffer <= size - rows * row_bytes)
    reach = layer * tl.where(inside, layer_stride, 0) + (rows - 1) * tl.where(inside, row_stride, 0) + row_bytes
    inside = inside & (reach <= host_bytes) & (in_host <= host_bytes - reach)
    row_words = row_bytes // 8
    words = tl.where(inside, rows * row_words, 0)
    device = anchor + (tl.load(offsets + buffer) + tl.where(inside, in_buffer, 0)) // 8
    memory = host + tl.where(inside, in_host + layer * layer_stride, 0) // 8
    pitch = row_stride // 8
    start = tl.program_id(1).to(tl.int64) * CHUNK
    end = tl.minimum(start + CHUNK, words)
    for at in range(start, end, TILE):
        lane = at + tl.arange(0, TILE)
        there = device + lane
        here = memory + (lane // row_words) * pitch + lane % row_words
        if SAVE:
            tl.store(here, tl.load(there, mask=lane < end), mask=lane < end)
        else:
            value = tl.load(here, mask=(lane < end) & (empty == 0))
            reset = tl.where(lane % row_words < row_words // 2, 0, SCORE).to(tl.int64)
            tl.store(there, tl.where(empty, reset, value), mask=lane < end)


_copy_rows = Launcher(_copy_rows_kernel, num_warps=8)


def copy_rows(
    table: BufferTable,
    host: torch.Tensor,
    segments: torch.Tensor,
    page_numbers: torch.Tensor,
    most_layers: int,
    most_bytes: int,
    save: bool,
    state_dtype: torch.dtype = torch.float32,
    stream: int | None = None,
) -> None:
    """Copies every segment to (save) or from the host side; one launch.

    host: as ``host_words`` gives it; pinned where the buffers are on a GPU, or memory of that GPU. segments: int64
    [n, 10] with the ``FIELDS``; bytes and strides are multiples of 8. page_numbers: int64 [3], read when the kernel
    runs. Both are readable by the device (pinned host memory will do). most_layers, most_bytes: no segment has more
    layers, nor more bytes in one layer. Segments must not overlap on the side that is written. state_dtype: of the rows
    of EMPTY segments. stream: a handle; None: the current stream.
    """
    check_segments(segments, page_numbers)
    score = empty_score_word(state_dtype)
    count = segments.shape[0]
    if not count or not most_bytes:
        return
    buffers = len(table.buffers)
    _copy_rows(
        (score, save, buffers, table.fixed.device),
        (count * most_layers, -(-most_bytes // (CHUNK_WORDS * 8)), 1),
        host, host.numel() * 8, segments, most_layers, page_numbers, score, save, TILE_WORDS, CHUNK_WORDS, buffers,
        len(FIELDS), PAGE_NUMBERS, fixed=table.fixed, stream=stream,
    )  # fmt: skip


def check_segments(segments: torch.Tensor, page_numbers: torch.Tensor) -> None:
    """Raises unless both are int64 and contiguous, [n, 10] and [3]."""
    if segments.dtype != torch.int64 or segments.dim() != 2 or segments.shape[1] != len(FIELDS):
        raise TypeError(f"segments must be an int64 tensor of shape [n, {len(FIELDS)}]")
    if page_numbers.dtype != torch.int64 or page_numbers.dim() != 1 or page_numbers.shape[0] != PAGE_NUMBERS:
        raise TypeError(f"page_numbers must be an int64 tensor of shape [{PAGE_NUMBERS}]")
    if not (segments.is_contiguous() and page_numbers.is_contiguous()):
        raise TypeError("segments and page_numbers must be contiguous")


def copy_rows_torch(
    table: BufferTable,
    host: torch.Tensor,
    segments: torch.Tensor,
    page_numbers: torch.Tensor,
    most_layers: int,
    most_bytes: int,
    save: bool,
    state_dtype: torch.dtype = torch.float32,
) -> None:
    """Does as ``copy_rows`` in plain torch on any device; ``host`` on the CPU. ``most_bytes`` is unused."""
    check_segments(segments, page_numbers)
    empty_score_word(state_dtype)  # raises for a dtype without a pattern
    pages, host = page_numbers.tolist(), host.view(torch.uint8)
    for fields in segments.tolist():
        segment = _placed(fields, pages)
        first, layers = segment[:2]
        for layer in range(max(0, -first), min(layers, most_layers, len(table.buffers) - first)):
            if segment[HOST_OFFSET] != EMPTY:
                _copy_layer(table, host, segment, layer, save)
            elif not save:
                _reset_layer(table, segment, layer, state_dtype)


def _placed(fields: list[int], pages: list[int]) -> list[int]:
    """Returns the first eight fields, the device offset counted in the buffer; -1: nowhere."""
    *segment, follows, page_bytes = fields
    page = pages[follows] if 0 <= follows < PAGE_NUMBERS else -1
    placed = 0 <= page < 2**31 and 0 <= page_bytes < 2**31 and segment[2] >= 0
    segment[2] = segment[2] + page * page_bytes if placed else -1
    return segment


def _copy_layer(table: BufferTable, host: torch.Tensor, segment: list[int], layer: int, save: bool) -> None:
    first, _, device, memory, layer_stride, rows, row_bytes, row_stride = segment
    number, memory = first + layer, memory + layer * layer_stride
    if rows < 1 or row_bytes < 1:
        return
    if min(device, segment[3], layer_stride, row_stride) < 0 or layer_stride > host.numel():
        return
    if row_stride > host.numel() // rows:
        return
    buffer = table.buffers[number].view(-1)
    if device + rows * row_bytes > buffer.numel() or memory + (rows - 1) * row_stride + row_bytes > host.numel():
        return
    there = buffer[device : device + rows * row_bytes].view(rows, row_bytes)
    here = host.as_strided((rows, row_bytes), (row_stride, 1), host.storage_offset() + memory)
    (here if save else there).copy_(there if save else here)


def _reset_layer(table: BufferTable, segment: list[int], layer: int, dtype: torch.dtype) -> None:
    first, _, device, _, _, rows, row_bytes, _ = segment
    buffer = table.buffers[first + layer].view(-1)
    if rows < 1 or row_bytes < 1 or device < 0 or device + rows * row_bytes > buffer.numel():
        return
    state = buffer[device : device + rows * row_bytes].view(rows, row_bytes)
    state[:, : row_bytes // 2] = 0
    state[:, row_bytes // 2 :].view(dtype)[:] = float("-inf")
