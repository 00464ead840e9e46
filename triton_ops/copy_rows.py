"""copy_rows: runs of rows of many device buffers <-> host memory (or a staging image of it), in one launch.

A segment is a run of rows that lies at the same place in several layers:

    for l in range(layers), r in range(rows):
        host[host_offset + l * layer_stride + r * row_stride : + row_bytes]
          <->  buffer[first + l][device_offset + r * row_bytes : + row_bytes]

Or segments are a *template*, with two more fields: device_offset then counts from the page, of page_bytes bytes, whose
number is ``where[follows]``. A template stays on the device; only three numbers tell where the rows lie this time.

A segment with host offset EMPTY has no host side: a load resets its rows to empty state rows, zeros in the first
half (values) and -inf in the second (scores); a save skips it.
A layer of a segment that leaves its buffer or the host side is skipped: nothing is read or written for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops._launch import Launcher
from triton_ops.tables import BufferTable, host_words

HOST_OFFSET = 3
FIELDS = ("first", "layers", "device_offset", "host_offset", "layer_stride", "rows", "row_bytes", "row_stride")
TEMPLATE_FIELDS = (*FIELDS, "follows", "page_bytes")
EMPTY = -1
Where = tuple[int, int, int]
NOWHERE: Where = (-1, -1, -1)
NEGATIVE_INFINITY = {torch.float32: 0xFF800000FF800000, torch.bfloat16: 0xFF80FF80FF80FF80}
CHUNK_WORDS = 4096  # 32 KiB a program
TILE_WORDS = 512  # 16 bytes a thread and step: stores to host memory then leave as whole lines


def empty_score_word(dtype: torch.dtype) -> int:
    """Eight bytes of -inf of ``dtype``, as a signed 64-bit integer."""
    if dtype not in NEGATIVE_INFINITY:
        raise TypeError(f"state dtype {dtype} is not covered (covered: float32, bfloat16)")
    return NEGATIVE_INFINITY[dtype] - (1 << 64)


@triton.jit(do_not_specialize=["host_bytes", "most_layers", "where_0", "where_1", "where_2"])
def _copy_rows_kernel(
    anchor, offsets, sizes, host, host_bytes, segments, most_layers, where_0, where_1, where_2,
    SCORE: tl.constexpr, SAVE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, BUFFERS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0) % most_layers
    field = segments + (tl.program_id(0) // most_layers) * WIDTH
    buffer = tl.load(field) + layer
    layers = tl.load(field + 1)
    in_buffer = tl.load(field + 2)
    if WIDTH == 10:  # a template
        follows = tl.load(field + 8)
        page = tl.where(follows == 0, where_0, tl.where(follows == 1, where_1, where_2))
        in_buffer = tl.where(page < 0, -1, in_buffer + page * tl.load(field + 9))
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
    most_layers: int,
    most_bytes: int,
    save: bool,
    state_dtype: torch.dtype = torch.float32,
    stream: int | None = None,
    where: Where | None = None,
) -> None:
    """Copy every segment to (save) or from the host side; one launch.

    host: uint8 1-D; pinned where the buffers are on a GPU, or memory of that GPU. segments: int64 [n, 8] with the
    ``FIELDS``, readable by the device (pinned host memory will do); bytes and strides are multiples of 8.
    most_layers, most_bytes: no segment has more layers, nor more bytes in one layer. Segments must not overlap on
    the side that is written. state_dtype: of the rows of EMPTY segments. stream: a handle; None: the current stream.
    where: page numbers below 2**31, and ``segments`` is a template, [n, 10]; what follows a negative one is skipped.
    """
    width = check_segments(segments, where)
    score = empty_score_word(state_dtype)
    count = segments.shape[0]
    if not count or not most_bytes:
        return
    buffers = len(table.buffers)
    _copy_rows(
        (score, save, buffers, width, table.sizes.device.index),
        (count * most_layers, triton.cdiv(most_bytes, CHUNK_WORDS * 8), 1),
        table.anchor, table.offsets, table.sizes, host_words(host), host.numel(), segments, most_layers,
        *(where or NOWHERE), score, save, TILE_WORDS, CHUNK_WORDS, buffers, width, stream=stream,
    )  # fmt: skip


def check_segments(segments: torch.Tensor, where: Where | None = None) -> int:
    """The number of fields. Raises unless int64, contiguous, [n, 8], or [n, 10] with ``where``."""
    width = len(FIELDS if where is None else TEMPLATE_FIELDS)
    fits = segments.dim() == 2 and segments.shape[1] == width
    if segments.dtype != torch.int64 or not fits or not segments.is_contiguous():
        raise TypeError(f"segments must be a contiguous int64 tensor of shape [n, {width}]")
    return width


def copy_rows_torch(
    table: BufferTable,
    host: torch.Tensor,
    segments: torch.Tensor,
    most_layers: int,
    most_bytes: int,
    save: bool,
    state_dtype: torch.dtype = torch.float32,
    where: Where | None = None,
) -> None:
    """Reference of ``copy_rows`` on any device; ``host`` on the CPU. ``most_bytes`` is not needed here."""
    check_segments(segments, where)
    empty_score_word(state_dtype)  # refuses what the kernel refuses
    for fields in segments.tolist():
        segment = fields if where is None else _placed(fields, where)
        first, layers = segment[:2]
        for layer in range(max(0, -first), min(layers, most_layers, len(table.buffers) - first)):
            if segment[HOST_OFFSET] != EMPTY:
                _copy_layer(table, host, segment, layer, save)
            elif not save:
                _reset_layer(table, segment, layer, state_dtype)


def _placed(fields: list[int], where: Where) -> list[int]:
    *segment, follows, page_bytes = fields
    page = where[follows if follows in {0, 1} else 2]
    segment[2] = -1 if page < 0 else segment[2] + page * page_bytes
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
