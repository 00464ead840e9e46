"""Guarded buffers for copy_rows, and a row-by-row loop that says what a call must leave in them."""

from __future__ import annotations

import torch
from guarded import DEVICE, GUARD, Contents, Memories

from triton_ops.cases.copy_rows import Seg
from triton_ops.tables import BufferTable

NO_HOST_SIDE = -1  # host offset of rows that a load resets
# minus infinity, little endian: sign and all exponent bits set, no mantissa
MINUS_INF = {torch.float32: b"\x00\x00\x80\xff", torch.bfloat16: b"\x80\xff"}
SANE = 1 << 20  # a hostile field is larger; it counts for no bound
NUMBERS = (2, 1, 4)  # page numbers, where a test names none


class World(Memories):
    def __init__(self, save: bool, shapes: tuple[tuple[int, int], ...], host_bytes: int, device: str = DEVICE) -> None:
        super().__init__(save, shapes, host_bytes, device)
        self.table = BufferTable.of(self.views)


def table_of(segments: list[Seg]) -> torch.Tensor:
    tensor = torch.tensor(segments, dtype=torch.int64).reshape(-1, len(Seg._fields))
    return tensor.pin_memory() if DEVICE == "cuda" else tensor


def page_numbers(numbers: tuple[int, int, int] = NUMBERS) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def bounds(segments: list[Seg]) -> tuple[int, int]:
    """(most_layers, most_bytes) over the segments that are not hostile."""
    layers = [s.layers for s in segments if 0 <= s.layers <= SANE]
    sizes = [s.rows * s.row_bytes for s in segments if min(s.rows, s.row_bytes) >= 0 and s.rows * s.row_bytes <= SANE]
    return max(layers, default=0), max(sizes, default=0)


def empty_row(row_bytes: int, dtype: torch.dtype) -> bytes:
    """Zeros in the first half, minus infinity in the second."""
    half = row_bytes // 2
    return bytes(half) + MINUS_INF[dtype] * (half // len(MINUS_INF[dtype]))


def host_start(s: Seg, layer: int, host_bytes: int) -> int | None:
    """First byte of a layer on the host side; None where that side cannot hold it."""
    if min(s.host_offset, s.layer_stride, s.row_stride) < 0:
        return None
    if s.layer_stride > host_bytes or s.rows * s.row_stride > host_bytes:
        return None  # no host side could hold such strides
    start = s.host_offset + layer * s.layer_stride
    return start if start + (s.rows - 1) * s.row_stride + s.row_bytes <= host_bytes else None


def device_start(s: Seg, numbers: tuple[int, int, int]) -> int | None:
    """First byte of a segment in its buffers; None where it has no page."""
    page = numbers[s.follows] if 0 <= s.follows < len(numbers) else -1
    if s.device_offset < 0 or not 0 <= page < 2**31 or not 0 <= s.page_bytes < 2**31:
        return None
    return s.device_offset + page * s.page_bytes


def expect(
    world: World, segments: list[Seg], save: bool, most_layers: int, dtype: torch.dtype, numbers: tuple[int, int, int]
) -> Contents:
    """What all memory must hold afterwards: one row at a time; Python's numbers do not overflow."""
    devices, host = world.read()
    sizes, host_bytes = [len(device) - 2 * GUARD for device in devices], len(host) - 2 * GUARD
    for s in segments:
        empty, device = s.host_offset == NO_HOST_SIDE, device_start(s, numbers)
        if min(s.rows, s.row_bytes) < 1 or device is None or (empty and save):
            continue
        for layer in range(min(s.layers, most_layers)):
            number, start = s.first + layer, None if empty else host_start(s, layer, host_bytes)
            if not 0 <= number < len(devices) or device + s.rows * s.row_bytes > sizes[number]:
                continue
            if start is None and not empty:
                continue
            for row in range(s.rows):
                there = GUARD + device + row * s.row_bytes
                if empty:
                    devices[number][there : there + s.row_bytes] = empty_row(s.row_bytes, dtype)
                    continue
                here = GUARD + start + row * s.row_stride
                if save:
                    host[here : here + s.row_bytes] = devices[number][there : there + s.row_bytes]
                else:
                    devices[number][there : there + s.row_bytes] = host[here : here + s.row_bytes]
    return devices, host


def check(
    world: World, op, segments: list[Seg], save: bool, most_layers: int | None = None, moves: bool | None = None,
    dtype: torch.dtype | None = None, numbers: tuple[int, int, int] = NUMBERS,
) -> None:  # fmt: skip
    """``moves``: whether any byte changes, where the caller knows it. ``dtype``: of the states, where it matters."""
    layers, nbytes = bounds(segments)
    layers = layers if most_layers is None else most_layers
    before = world.read()
    wanted = expect(world, segments, save, layers, dtype or torch.float32, numbers)
    assert moves is None or (wanted != before) == moves
    more = [dtype] if dtype else []
    op(world.table, world.memory, table_of(segments), page_numbers(numbers), layers, nbytes, save, *more)
    world.assert_holds(wanted)
