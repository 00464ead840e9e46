"""Segments of copy_rows without a host side: rows of state that a load resets and a save leaves alone."""

from __future__ import annotations

import struct
from itertools import combinations, product

import pytest
import torch
from builders import INT64_MAX, INT64_MIN, count_launches, needs_cuda
from segments import MINUS_INF, NO_HOST_SIDE, Seg, build, check, reset, run, table_of

from triton_ops import copy_rows as module
from triton_ops.copy_rows import CHUNK_WORDS, EMPTY, FIELDS, copy_rows, copy_rows_torch, empty_score_word

OPS = pytest.mark.parametrize("op", [copy_rows, copy_rows_torch])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LAYERS, ROWS, WIDTH = 3, 65, 64  # rings of 16 rows of four slots, and the sentinel row
SHAPES = ((WIDTH, ROWS),) * LAYERS
NBYTES = ROWS * WIDTH
HOST_BYTES = 4_096


def ring(slot: int, first: int = 0, rows: int = 16) -> Seg:
    """Rows of a slot's ring in every layer."""
    return reset(0, LAYERS, (16 * slot + first) * WIDTH, rows, WIDTH)


def test_the_pattern_is_plus_zero_and_minus_infinity():
    assert EMPTY == NO_HOST_SIDE
    assert struct.unpack("<f", MINUS_INF[torch.float32])[0] == float("-inf")
    bfloat = torch.tensor(list(MINUS_INF[torch.bfloat16]), dtype=torch.uint8).view(torch.bfloat16)
    assert float(bfloat) == float("-inf")
    for dtype, piece in MINUS_INF.items():
        assert struct.pack("<q", empty_score_word(dtype)) == piece * (8 // len(piece))


@OPS
@DTYPES
@pytest.mark.parametrize(
    "segments",
    [
        [ring(0)],
        [ring(1)],
        [ring(3)],
        [ring(2, first=5, rows=3)],
        [ring(0, rows=7), ring(0, first=9, rows=7), ring(3, first=15, rows=1)],
        [reset(1, 1, 0, ROWS, WIDTH)],
        [reset(2, 1, 64, 4, 16), reset(2, 1, 128, 2, 1_008), reset(0, 1, 24, 5, 48)],
    ],
    ids=["slot 0", "slot 1", "last slot", "some rows", "all but two rows", "a whole buffer", "other widths"],
)
def test_the_rows_of_every_layer_are_reset_and_nothing_else(op, dtype, segments):
    check(build(False, SHAPES, HOST_BYTES), op, segments, False, moves=True, dtype=dtype)


@OPS
@pytest.mark.parametrize(("dtype", "ring_rows"), [(torch.float32, 128), (torch.bfloat16, 256)])
def test_real_sizes(op, dtype, ring_rows):
    """A ring is longer than what one program does."""
    width = 2 * 512 * dtype.itemsize
    assert ring_rows * width > 8 * CHUNK_WORDS
    world = build(False, ((width, 2 * ring_rows + 1),) * 2, 4_096)
    check(world, op, [reset(0, 2, ring_rows * width, ring_rows, width)], False, moves=True, dtype=dtype)


@OPS
def test_float32_where_no_dtype_is_named(op):
    check(build(False, SHAPES, HOST_BYTES), op, [ring(1)], False, moves=True)


@OPS
def test_a_save_skips_them(op):
    segments = [ring(1), reset(0, 1, 0, ROWS, WIDTH), reset(2, 1, NBYTES - 16, 1, 16)]
    check(build(True, SHAPES, HOST_BYTES), op, segments, True, moves=False)
    hostile = [s._replace(**{field: value}) for s in segments for field in FIELDS for value in (-1, INT64_MIN)]
    check(build(True, SHAPES, HOST_BYTES), op, hostile, True, most_layers=LAYERS, moves=False)


@OPS
@DTYPES
@pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
def test_among_ordinary_segments(op, dtype, save):
    """Live rows between rows that are reset, as a load of a ring has them."""
    segments = [
        ring(1, rows=4),
        Seg(0, LAYERS, 20 * WIDTH, 64, 200, 3, WIDTH, WIDTH),
        ring(1, first=7, rows=9),
        run(0, 40 * WIDTH, 2_048, 5 * WIDTH),
        reset(1, 2, 48 * WIDTH, 16, WIDTH),
        Seg(1, 2, 8, 3_000, 24, 1, 24, 24),
    ]
    check(build(save, SHAPES, HOST_BYTES), op, segments, save, moves=True, dtype=dtype)


@OPS
@pytest.mark.parametrize("field", ["layer_stride", "row_stride"])
@pytest.mark.parametrize("value", [INT64_MIN, -8, -1, 4, 2 * HOST_BYTES, 2**62, INT64_MAX])
def test_strides_of_a_missing_host_side_are_ignored(op, field, value):
    check(build(False, SHAPES, HOST_BYTES), op, [ring(2)._replace(**{field: value})], False, moves=True)


@OPS
def test_a_host_side_that_could_not_hold_the_rows(op):
    check(build(False, SHAPES, WIDTH), op, [ring(1), reset(0, 1, 0, 16, WIDTH)], False, moves=True)


@OPS
@pytest.mark.parametrize("host_offset", [-2, -8, -(2**32) - 1, INT64_MIN, INT64_MAX])
def test_no_other_host_offset_means_it(op, host_offset):
    segments = [ring(1)._replace(host_offset=host_offset, row_stride=WIDTH, layer_stride=WIDTH)]
    check(build(False, SHAPES, 1 << 14), op, segments, False, moves=False)


def test_the_check_itself_can_fail():
    def negative_zero(table, *rest):
        copy_rows_torch(table, *rest)
        table.buffers[1][16, 3] = 0x80

    def too_far(table, *rest):
        copy_rows_torch(table, *rest)
        table.buffers[0][32] = 0

    def other_dtype(table, host, segments, layers, nbytes, save, dtype):
        copy_rows_torch(table, host, segments, layers, nbytes, save, torch.bfloat16)

    def on_the_host(table, host, *rest):
        copy_rows_torch(table, host, *rest)
        host[0] ^= 1

    for broken in (negative_zero, too_far, other_dtype, on_the_host):
        with pytest.raises(AssertionError, match="wanted"):
            check(build(False, SHAPES, HOST_BYTES), broken, [ring(1)], False, dtype=torch.float32)


# ---------------------------------------------------------------------------------------------- hostile

HOSTILE = {
    "first": [INT64_MIN, -(2**32), -LAYERS, LAYERS, LAYERS + 1, 2**31, 2**32, INT64_MAX],
    "layers": [INT64_MIN, -(2**32), -1, 0],
    "device_offset": [INT64_MIN, -(2**32), -16, NBYTES - 16 * WIDTH + 8, NBYTES, 2**32, INT64_MAX - 7, INT64_MAX],
    "rows": [INT64_MIN, -(2**32), -1, 0, ROWS + 1, 2**32, 2**58, 2**58 + 16, 2**64 // WIDTH + 1, INT64_MAX],
    "row_bytes": [INT64_MIN, -(2**32), -WIDTH, 0, NBYTES, 2**32, 2**60, 2**60 + WIDTH, 2**63 - 16, INT64_MAX],
}


@OPS
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in HOSTILE.items() for value in values])
def test_a_hostile_field_skips_the_segment(op, field, value):
    segments = [ring(1)._replace(**{field: value})]
    check(build(False, SHAPES, HOST_BYTES), op, segments, False, most_layers=LAYERS, moves=False)


@OPS
def test_two_hostile_fields_skip_the_segment(op):
    """Products and sums of extremes: none becomes small."""
    segments = [
        ring(1)._replace(**{one: a, other: b})
        for one, other in combinations(HOSTILE, 2)
        for a, b in product((INT64_MIN, -1, 2**60, INT64_MAX - 7), repeat=2)
    ]
    segments = [s for s in segments if s.layers <= LAYERS]  # more are cut to those that the caller announces
    world = build(False, SHAPES, HOST_BYTES)
    before = world.read()
    op(world.table, world.host.inner, table_of(segments), LAYERS, 16 * WIDTH, False)
    assert world.read() == before


@OPS
@pytest.mark.parametrize(
    "segment",
    [
        ring(1)._replace(first=-1),
        ring(1)._replace(first=1),
        ring(1)._replace(first=2, layers=INT64_MAX),
        ring(1)._replace(layers=2**32 + 2),
        ring(1)._replace(layers=2),
    ],
)
def test_layers_out_of_range_do_not_hide_the_others(op, segment):
    check(build(False, SHAPES, HOST_BYTES), op, [segment], False, most_layers=LAYERS, moves=True)


@OPS
def test_a_layer_whose_buffer_is_shorter(op):
    """Its ring would hold what lies behind the buffer; the other layers are reset."""
    shapes = ((WIDTH, 65), (WIDTH, 63), (WIDTH, 64))
    check(build(False, shapes, HOST_BYTES), op, [ring(3)], False, moves=True)


@OPS
def test_good_segments_among_hostile_ones(op):
    segments = [ring(1)._replace(**{field: value}) for field, values in HOSTILE.items() for value in values]
    segments[9:9] = [ring(0)]
    segments.append(Seg(1, 2, 48 * WIDTH, 512, 80, 2, 24, 40))
    check(build(False, SHAPES, HOST_BYTES), op, segments, False, most_layers=LAYERS, moves=True)


# ---------------------------------------------------------------------------------------------- the rest


@OPS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float8_e4m3fn, torch.int32])
@pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
def test_other_dtypes_are_refused_by_name(op, dtype, save):
    """Whether or not there is anything to reset."""
    world = build(save, SHAPES, HOST_BYTES)
    before = world.read()
    for segments in ([ring(0)], [run(0, 0, 0, 8)], []):
        with pytest.raises(TypeError, match=str(dtype)):
            op(world.table, world.host.inner, table_of(segments), LAYERS, 16 * WIDTH, save, dtype)
    assert world.read() == before


@pytest.mark.parametrize("layers", [3, 30])
def test_one_launch_with_the_copies_whatever_the_layers(monkeypatch, layers):
    counted = count_launches(monkeypatch, module._copy_rows)
    segments = [reset(0, layers, 16 * 32, 16, 32), Seg(0, layers, 0, 32, 32, 1, 32, 32)]
    check(build(False, ((32, 33),) * layers, 1_024), copy_rows, segments, False, moves=True, dtype=torch.bfloat16)
    assert counted.grids == [(2 * layers, 1, 1)]


@needs_cuda
@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("slot", [0, 5])
def test_compiled_kernel(dtype, slot):
    width = 2 * 512 * dtype.itemsize
    world = build(False, ((width, 6 * 128 + 1),) * 20, 1 << 20, "cuda")
    start = slot * 128 * width
    segments = [
        reset(0, 20, start, 100, width),
        Seg(0, 20, start + 100 * width, 64, width, 10, width, 20 * width),
        reset(0, 20, start + 110 * width, 18, width),
    ]
    check(world, copy_rows, segments, False, moves=True, dtype=dtype)
