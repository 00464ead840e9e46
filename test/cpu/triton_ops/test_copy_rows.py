"""copy_rows leaves all memory, guards included, as its torch twin does."""

from itertools import product

import pytest
import torch
from segments import NUMBERS, World, check

from triton_ops.cases import INT64_MAX, INT64_MIN
from triton_ops.cases.copy_rows import Seg, reset, run
from triton_ops.copy_rows import CHUNK_WORDS, FIELDS

DIRECTIONS = pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
# (row or page bytes, how many): two c4 states, c4 indexer state, three c128 states, a kv page, and a tiny one
SHAPES = ((8_192, 9), (8_192, 9), (2_048, 17), (4_096, 5), (4_096, 5), (4_096, 5), (37_440, 1), (16, 1))
HOST_BYTES = 96_000
CHUNK_BYTES = 8 * CHUNK_WORDS

RUNS = {
    "none": [],
    "first": [run(0, 0, 0, 8)],
    "last": [run(7, 8, 95_992, 8)],
    "row end": [run(0, 9 * 8_192 - 8, 8, 8)],
    "three": [
        Seg(0, 2, 8_192, 4_096, 8_208, 1, 8_200, 8_200),
        run(2, 2_048 * 3, 64, 2_048),
        Seg(3, 3, 0, 40_000, 3 * 4_096 + 16, 3, 4_096, 4_096),
    ],
    "whole buffers": [run(6, 0, 50_000, 37_440), run(7, 0, 48, 16), run(6, 0, 0, 0)],
    "chunks": [run(0, 16, 24, CHUNK_BYTES), run(0, 16 + CHUNK_BYTES, 24 + CHUNK_BYTES, CHUNK_BYTES)],
    "long": [run(0, 8, 16, 2 * CHUNK_BYTES + 8)],
    "scattered": [run(2, row * 2_048 + 8, 3_000 + k * 40, 24) for k, row in enumerate((16, 2, 9, 0, 5, 11))],
    "layers in turn": [Seg(3, 3, 4_096, 24_000, 4_096, 3, 4_096, 3 * 4_096)],
    "layers and rows the other way round": [Seg(0, 2, 64, 8, 1_000 * 8, 40, 48, 56)],
    "narrow rows over several steps": [Seg(2, 1, 8, 16, 0, 300, 24, 40)],
    "rows over the end of a chunk": [Seg(0, 2, 16, 8, 45_000, 9, 4_104, 4_200)],
    "as long as the host": [Seg(3, 1, 0, 0, HOST_BYTES, 2, 8, HOST_BYTES // 2), Seg(4, 2, 8, 16, 95_976, 1, 8, 8)],
    "a layer whose buffer is shorter": [Seg(2, 3, 20_000, 800, 512, 2, 240, 240)],
    "a layer past the last buffer": [Seg(6, 4, 0, 800, 512, 2, 8, 8)],
    "a layer before the first buffer": [Seg(-1, 2, 0, 800, 512, 2, 8, 8)],
    "two layers before the first buffer": [Seg(-2, 6, 64, 128, 80, 2, 24, 40)],
    "each on its own page": [
        Seg(0, 2, 8, 64, 80, 2, 24, 40, 0, 8_192),
        Seg(2, 1, 16, 4_096, 0, 1, 2_048, 2_048, 2, 2_048),
        Seg(3, 3, 4_096, 10_000, 4_096, 1, 4_096, 4_096, 1, 8_192),
        Seg(3, 3, 0, 40_000, 8_192, 2, 4_096, 4_096, 2, 0),
    ],
    "a page past the end of the buffer": [run(7, 0, 0, 8)._replace(follows=1, page_bytes=16), run(7, 0, 8, 8)],
    "a layer past the end of the host": [Seg(3, 3, 0, HOST_BYTES - 80, 24, 2, 16, 24)],
}


@DIRECTIONS
@pytest.mark.parametrize("segments", RUNS.values(), ids=RUNS.keys())
def test_runs_land_where_they_belong_and_nowhere_else(save, segments):
    check(World(save, SHAPES, HOST_BYTES), segments, save, moves=bool(segments))


LAYERS, ROWS, WIDTH = 3, 65, 64  # rings of 16 rows of four slots, and the sentinel row
RINGS = ((WIDTH, ROWS),) * LAYERS
STATE_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def ring(slot: int, first: int = 0, rows: int = 16) -> Seg:
    """Rows of a slot's ring in every layer."""
    return reset(0, LAYERS, (16 * slot + first) * WIDTH, rows, WIDTH)


RESETS = {
    "slots": [ring(0), ring(3)],
    "some rows": [ring(0, rows=7), ring(0, first=9, rows=7), ring(2, first=5, rows=3), ring(3, first=15, rows=1)],
    "a whole buffer": [reset(1, 1, 0, ROWS, WIDTH)],
    "other widths": [reset(2, 1, 64, 4, 16), reset(2, 1, 128, 2, 1_008), reset(0, 1, 24, 5, 48)],
    "among live rows": [
        ring(1, rows=4),
        Seg(0, LAYERS, 20 * WIDTH, 64, 200, 3, WIDTH, WIDTH),
        ring(1, first=7, rows=9),
        run(0, 40 * WIDTH, 2_048, 5 * WIDTH),
        reset(1, 2, 48 * WIDTH, 16, WIDTH),
        Seg(1, 2, 8, 3_000, 24, 1, 24, 24),
    ],
    "layers out of range": [ring(1)._replace(first=-1), ring(2)._replace(first=2, layers=INT64_MAX)],
    "more layers than announced": [ring(1)._replace(layers=2**32 + 2)],
    "strides without meaning": [
        ring(slot)._replace(**{field: value})
        for slot, (field, value) in enumerate(product(("layer_stride", "row_stride"), (INT64_MIN, 2**62)))
    ],
}


@DIRECTIONS
@STATE_DTYPES
@pytest.mark.parametrize("segments", RESETS.values(), ids=RESETS.keys())
def test_rows_without_a_host_side_are_reset_and_nothing_else(dtype, save, segments):
    """By a load; a save skips them."""
    moves = None if save else True
    check(World(save, RINGS, 4_096), segments, save, most_layers=LAYERS, moves=moves, dtype=dtype)


SMALL = ((512, 9),) * 4
SMALL_BYTES, SMALL_HOST = 9 * 512, 10_240


def good(k: int) -> Seg:
    """Two rows of two layers, apart for each ``k`` < 16, with room for four; a page number takes it 512 bytes on."""
    return Seg(0, 2, 128 * k, 512 * k, 80, 2, 32, 40, k % 3, 512 // NUMBERS[k % 3])


# Extremes, what looks small when it is cut or overflows in a product, and one word past an end.
EXTREMES = [INT64_MIN, -(2**32), -8, -1, 2**31, 2**32, 2**62, INT64_MAX - 7, INT64_MAX]
HOSTILE_VALUES = {
    "first": [-4, -2, len(SMALL) - 1, len(SMALL)],
    "layers": [0, len(SMALL) + 1, 2**32 + 2],
    "device_offset": [SMALL_BYTES - 512 - 56, SMALL_BYTES],
    "host_offset": [SMALL_HOST - 64, SMALL_HOST],
    "layer_stride": [SMALL_HOST, SMALL_HOST + 8, 2**63 - 8 * 64],
    "rows": [0, SMALL_HOST // 40 + 1, 2**32 + 2, 2**64 // 32 + 1, 2**64 // 40 + 1],
    "row_bytes": [0, SMALL_BYTES, 2**32 + 32, 2**62 + 32],
    "row_stride": [SMALL_HOST // 2 + 8, SMALL_HOST, 2**32 + 40, 2**62 + 40],
    "follows": [3, 4, 2**32 + 1],
    "page_bytes": [SMALL_BYTES, 2**62 + 128, INT64_MIN + 128],
}


@DIRECTIONS
@pytest.mark.parametrize("field", FIELDS)
def test_a_hostile_field_among_good_segments(field, save):
    """Some of their layers may be good, and those lie apart. A load resets where the host offset is -1."""
    values = (*EXTREMES, *HOSTILE_VALUES[field])
    segments = [good(k)._replace(**{field: value}) for k, value in enumerate(values)]
    segments[7:7] = [good(15)]
    check(World(save, SMALL, SMALL_HOST), segments, save, most_layers=len(SMALL), moves=True)


@DIRECTIONS
@pytest.mark.parametrize("which", range(3))
def test_a_hostile_page_number_among_good_ones(which, save):
    """What follows it is skipped, even where it would lie right. The last number does, when its product is cut."""
    here, its = [good(k) for k in range(3) if k != which], good(which)
    still = its._replace(device_offset=its.device_offset + 1_024, host_offset=2_048, page_bytes=0)
    right_when_cut = 2**64 // its.page_bytes + NUMBERS[which]
    for number in (INT64_MIN, -(2**32), -1, SMALL_BYTES, 2**31, 2**32 + 1, 2**62, INT64_MAX, right_when_cut):
        numbers = tuple(number if k == which else found for k, found in enumerate(NUMBERS))
        check(World(save, SMALL, SMALL_HOST), [*here, its, still], save, 2, moves=True, numbers=numbers)
