"""clear_rings and its torch twin against a byte-by-byte loop; all memory is compared, guards included."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
import torch
from builders import DEVICE, GUARD, INT64_MAX, INT64_MIN, Counted, Guarded, assert_bytes, needs_cuda

from triton_ops import clear_rings as module
from triton_ops.clear_rings import clear_rings, clear_rings_torch, empty_score_word
from triton_ops.tables import BufferTable

pytestmark = pytest.mark.cpu

OPS = pytest.mark.parametrize("op", [clear_rings, clear_rings_torch])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# minus infinity, little endian: sign and all exponent bits set, no mantissa
MINUS_INF = {torch.float32: b"\x00\x00\x80\xff", torch.bfloat16: b"\x80\xff"}


@dataclass
class World:
    buffers: list[Guarded]
    table: BufferTable
    rows: int
    row_bytes: int

    def read(self) -> list[bytearray]:
        return [buffer.read() for buffer in self.buffers]


def build(total_rows: tuple[int, ...], rows: int, row_bytes: int, device: str = DEVICE) -> World:
    """One state buffer for each of ``total_rows``, the sentinel row counted, filled with random bytes."""
    buffers = [Guarded(total * row_bytes, device) for total in total_rows]
    for number, buffer in enumerate(buffers):
        buffer.noise(number)
    return World(buffers, BufferTable.of([b.inner.view(-1, row_bytes) for b in buffers]), rows, row_bytes)


def empty_row(row_bytes: int, dtype: torch.dtype) -> bytes:
    half = row_bytes // 2
    return bytes(half) + MINUS_INF[dtype] * (half // len(MINUS_INF[dtype]))


def check(world: World, op, slot: int, dtype: torch.dtype) -> None:
    wanted = world.read()
    for memory in wanted:
        for row in range(slot * world.rows, (slot + 1) * world.rows):
            start = GUARD + row * world.row_bytes
            memory[start : start + world.row_bytes] = empty_row(world.row_bytes, dtype)
    op(world.table, slot, world.rows, world.row_bytes, dtype)
    for number, (want, have) in enumerate(zip(wanted, world.read(), strict=True)):
        assert_bytes(f"buffer {number}", want, have)


def test_the_pattern_is_plus_zero_and_minus_infinity():
    assert struct.unpack("<f", MINUS_INF[torch.float32])[0] == float("-inf")
    bfloat = torch.tensor(list(MINUS_INF[torch.bfloat16]), dtype=torch.uint8).view(torch.bfloat16)
    assert float(bfloat) == float("-inf")
    for dtype, piece in MINUS_INF.items():
        assert struct.pack("<q", empty_score_word(dtype)) == piece * (8 // len(piece))


@OPS
@DTYPES
@pytest.mark.parametrize("slot", [0, 1, 3])
def test_one_ring_of_every_layer_is_cleared_and_nothing_else(op, dtype, slot):
    check(build((4 * 16 + 1,) * 3, 16, 64), op, slot, dtype)


@OPS
@DTYPES
@pytest.mark.parametrize("ring", [128, 256])
def test_real_sizes(op, dtype, ring):
    row_bytes = 2 * 512 * dtype.itemsize
    check(build((2 * ring + 1,) * 2, ring, row_bytes), op, 1, dtype)


@OPS
def test_rows_whose_half_is_not_a_multiple_of_16_bytes(op):
    check(build((3 * 8 + 1,), 8, 16), op, 2, torch.float32)
    check(build((3 * 8 + 1,), 8, 48), op, 1, torch.bfloat16)


@OPS
def test_layers_of_different_lengths(op):
    check(build((33, 65, 40), 16, 32), op, 1, torch.float32)


def test_the_check_itself_can_fail():
    def negative_zero(table, slot, rows, row_bytes, dtype):
        clear_rings_torch(table, slot, rows, row_bytes, dtype)
        table.buffers[1][slot * rows, 3] = 0x80

    def too_far(table, slot, rows, row_bytes, dtype):
        clear_rings_torch(table, slot, rows, row_bytes, dtype)
        table.buffers[0][(slot + 1) * rows] = 0

    for broken in (negative_zero, too_far):
        with pytest.raises(AssertionError, match="wanted"):
            check(build((33, 33), 16, 32), broken, 0, torch.float32)


@OPS
@pytest.mark.parametrize("slot", [INT64_MIN, -(2**32), -1, 4, 5, 2**31, 2**32, INT64_MAX])
def test_a_slot_outside_is_refused(op, slot):
    world = build((4 * 16 + 1,) * 2, 16, 32)
    before = world.read()
    with pytest.raises(IndexError, match=f"request slot {slot} has no ring"):
        op(world.table, slot, 16, 32, torch.float32)
    assert world.read() == before


@OPS
def test_the_sentinel_row_is_refused(op):
    """The ring of slot 3 ends with the buffer, so its last row is the sentinel."""
    world = build((4 * 16,) * 2, 16, 32)
    before = world.read()
    with pytest.raises(IndexError, match="request slot 3"):
        op(world.table, 3, 16, 32, torch.float32)
    assert world.read() == before
    check(world, op, 2, torch.float32)


@OPS
def test_one_short_layer_refuses_all(op):
    world = build((65, 65, 64), 16, 32)
    before = world.read()
    with pytest.raises(IndexError, match="state buffer 2"):
        op(world.table, 3, 16, 32, torch.float32)
    assert world.read() == before


def test_other_dtypes_are_refused_by_name():
    world = build((33,), 16, 32)
    before = world.read()
    for dtype in (torch.float16, torch.float64, torch.float8_e4m3fn, torch.int32):
        with pytest.raises(TypeError, match=str(dtype)):
            clear_rings(world.table, 0, 16, 32, dtype)
    assert world.read() == before


def test_the_twin_refuses_the_same_dtypes():
    world = build((33,), 16, 32)
    with pytest.raises(TypeError, match="float16"):
        clear_rings_torch(world.table, 0, 16, 32, torch.float16)


@pytest.mark.parametrize(("rows", "row_bytes"), [(16, 24), (16, -32)])
def test_a_bad_ring_shape_is_refused(rows, row_bytes):
    world = build((33,), 16, 32)
    with pytest.raises(ValueError, match="row"):
        clear_rings(world.table, 0, rows, row_bytes, torch.float32)


@pytest.mark.parametrize("layers", [3, 30])
def test_one_launch_whatever_the_layers(monkeypatch, layers):
    counted = Counted(module._clear_rings_kernel)
    monkeypatch.setattr(module, "_clear_rings_kernel", counted)
    check(build((33,) * layers, 16, 32), clear_rings, 1, torch.bfloat16)
    assert len(counted.grids) == 1
    assert counted.grids[0][0] == layers


@needs_cuda
@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("slot", [0, 5])
def test_compiled_kernel(dtype, slot):
    row_bytes = 2 * 512 * dtype.itemsize
    check(build((6 * 128 + 1,) * 20, 128, row_bytes, "cuda"), clear_rings, slot, dtype)
