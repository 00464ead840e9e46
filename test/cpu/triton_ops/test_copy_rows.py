"""copy_rows and its torch twin against a loop over the rows; all memory is compared, guards included."""

from __future__ import annotations

import struct
from itertools import combinations, product

import pytest
import torch
from guarded import DEVICE, count_launches
from hypothesis import given, settings
from hypothesis import strategies as st
from segments import MINUS_INF, NO_HOST_SIDE, NUMBERS, build, check, page_numbers, table_of

from triton_ops import copy_rows as module
from triton_ops.cases import INT64_MAX, INT64_MIN
from triton_ops.cases.copy_rows import Seg, reset, run
from triton_ops.copy_rows import CHUNK_WORDS, EMPTY, FIELDS, copy_rows, copy_rows_torch, empty_score_word
from triton_ops.tables import BufferTable, host_words

OPS = pytest.mark.parametrize("op", [copy_rows, copy_rows_torch], ids=["kernel", "torch"])
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


@OPS
@DIRECTIONS
@pytest.mark.parametrize("segments", RUNS.values(), ids=RUNS.keys())
def test_runs_land_where_they_belong_and_nowhere_else(op, save, segments):
    check(build(save, SHAPES, HOST_BYTES), op, segments, save, moves=bool(segments))


def test_the_check_itself_can_fail():
    def with_field(field: str, by: int):
        def broken(table, host, segments, *rest):
            segments = segments.clone()
            segments[:, FIELDS.index(field)] += by
            copy_rows_torch(table, host, segments, *rest)

        return broken

    def after(change):
        def broken(table, host, *rest):
            copy_rows_torch(table, host, *rest)
            change(table.buffers, host)

        return broken

    def other_dtype(*arguments):
        copy_rows_torch(*arguments[:7], torch.bfloat16)

    shift = {"first": 1, "layers": -1, "device_offset": 8, "host_offset": 8, "layer_stride": 8}
    shift |= {"rows": -1, "row_bytes": -8, "row_stride": 8, "follows": 1, "page_bytes": 8}
    for broken in [with_field(field, by) for field, by in shift.items()]:
        with pytest.raises(AssertionError, match="wanted"):
            check(build(True, SHAPES, HOST_BYTES), broken, [Seg(0, 2, 64, 128, 400, 3, 64, 80, 1, 8)], True)
    negative_zero = after(lambda buffers, _: buffers[1][16].fill_(0x80))
    too_far = after(lambda buffers, _: buffers[0][32].zero_())
    on_the_host = after(lambda _, host: host[:1].bitwise_not_())
    for broken in (negative_zero, too_far, on_the_host, other_dtype):
        with pytest.raises(AssertionError, match="wanted"):
            check(build(False, RINGS, 4_096), broken, [ring(1)], False, dtype=torch.float32)


# ---------------------------------------------------------------------------------------- rows that a load resets

LAYERS, ROWS, WIDTH = 3, 65, 64  # rings of 16 rows of four slots, and the sentinel row
RINGS = ((WIDTH, ROWS),) * LAYERS
STATE_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


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


@OPS
@STATE_DTYPES
@pytest.mark.parametrize("segments", RESETS.values(), ids=RESETS.keys())
def test_rows_without_a_host_side_are_reset_and_nothing_else(op, dtype, segments):
    check(build(False, RINGS, 4_096), op, segments, False, most_layers=LAYERS, moves=True, dtype=dtype)


@OPS
def test_a_host_side_that_could_not_hold_the_rows_does_not_matter(op):
    """Nor does a buffer that is shorter in one layer: it is skipped. Float32 is meant where no dtype is named."""
    check(build(False, RINGS, WIDTH), op, [ring(1)], False, moves=True)
    check(build(False, ((WIDTH, 65), (WIDTH, 63), (WIDTH, 64)), 4_096), op, [ring(3)], False, moves=True)


@OPS
@pytest.mark.parametrize(("dtype", "ring_rows"), [(torch.float32, 128), (torch.bfloat16, 256)])
def test_a_ring_is_longer_than_what_one_program_does(op, dtype, ring_rows):
    width = 2 * 512 * dtype.itemsize
    assert ring_rows * width > CHUNK_BYTES
    world = build(False, ((width, 2 * ring_rows + 1),) * 2, 4_096)
    check(world, op, [reset(0, 2, ring_rows * width, ring_rows, width)], False, moves=True, dtype=dtype)


@OPS
def test_a_save_skips_them(op):
    segments = [ring(1), reset(0, 1, 0, ROWS, WIDTH), reset(2, 1, ROWS * WIDTH - 16, 1, 16)]
    segments += [ring(1)._replace(**{field: value}) for field in FIELDS for value in (-1, INT64_MIN)]
    check(build(True, RINGS, 4_096), op, segments, True, most_layers=LAYERS, moves=False)


@OPS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float8_e4m3fn, torch.int32])
@DIRECTIONS
def test_other_dtypes_are_refused_by_name(op, dtype, save):
    """Whether or not there is anything to reset."""
    world = build(save, RINGS, 4_096)
    before = world.read()
    for segments in ([ring(0)], [run(0, 0, 0, 8)], []):
        with pytest.raises(TypeError, match=str(dtype)):
            memory = host_words(world.host.inner)
            op(world.table, memory, table_of(segments), page_numbers(), LAYERS, 16 * WIDTH, save, dtype)
    assert world.read() == before


# ---------------------------------------------------------------------------------------------------------- hostile

SMALL = ((512, 9),) * 4
SMALL_BYTES, SMALL_HOST = 9 * 512, 10_240


def good(k: int) -> Seg:
    """Two rows of two layers, in a place of its own (there is one for each ``k`` < 16), with room for four layers.

    Each follows a page number, which takes it 512 bytes further."""
    return Seg(0, 2, 128 * k, 512 * k, 80, 2, 32, 40, k % 3, 512 // NUMBERS[k % 3])


def hostile_values(field: str, s: Seg) -> list[int]:
    """What ``field`` of ``s`` may not hold, or only for some layers: extremes, what looks small when it is cut or
    when it overflows in a product, and one word past each end. A host offset of -1 is none, and resets on a load."""
    left, host_left = SMALL_BYTES - 512 - s.device_offset, SMALL_HOST - s.host_offset
    common = [INT64_MIN, INT64_MIN + 1, -(2**32), -8, -1, 2**31, 2**32, 2**62, INT64_MAX - 7, INT64_MAX]
    reach = s.row_stride + s.row_bytes
    own = {
        "first": [-4, -2, len(SMALL) - 1, len(SMALL), len(SMALL) + 1],
        "layers": [0, len(SMALL) + 1, 2**32 + 2],
        "device_offset": [SMALL_BYTES - 512 - 56, SMALL_BYTES, SMALL_BYTES + 8, INT64_MAX - 63],
        "host_offset": [
            SMALL_HOST - reach - s.layer_stride + 8, SMALL_HOST - reach + 8, SMALL_HOST, SMALL_HOST + 8, INT64_MAX - 63,
        ],
        "layer_stride": [host_left - reach + 8, SMALL_HOST, SMALL_HOST + 8, 2**63 - 8 * 64, 2**62 + 8],
        "rows": [0, left // 32 + 1, SMALL_HOST // 40 + 1, 2**32 + 2, 2**64 // 32 + 1, 2**64 // 40 + 1],
        "row_bytes": [0, left // 2 + 8 - left // 2 % 8, 2**32 + 32, 2**62 + 32],
        "row_stride": [max(host_left, SMALL_HOST // 2) + 8, SMALL_HOST, SMALL_HOST + 8, 2**32 + 40, 2**62 + 40],
        "follows": [3, 4, 2**32 + 1],
        # The last two, times 4 and 2, are 512 again when they are cut.
        "page_bytes": [-(-(left + 512 - 56) // 16) * 16, SMALL_BYTES, 2**62 + 128, INT64_MIN + 256],
    }  # fmt: skip
    return sorted({*common, *own[field]})


def hostile_segments(field: str) -> list[Seg]:
    """Segments with one field replaced; some of their layers may be good, and those lie apart."""
    assert len(hostile_values(field, good(0))) <= 16
    values = [(k, hostile_values(field, good(k))) for k in range(16)]
    return [good(k)._replace(**{field: found[k]}) for k, found in values if k < len(found)]


@OPS
@DIRECTIONS
@pytest.mark.parametrize("field", FIELDS)
def test_a_hostile_field_among_good_segments(op, field, save):
    """No layer of most of these is good."""
    segments, none_good = hostile_segments(field), field not in {"first", "layers", "host_offset", "layer_stride"}
    segments[7:7] = [good(15)]
    only, layers = ([good(15)], 2) if none_good else (None, len(SMALL))
    check(build(save, SMALL, SMALL_HOST), op, segments, save, most_layers=layers, moves=True, only=only)


@OPS
@DIRECTIONS
@pytest.mark.parametrize("which", range(3))
def test_a_hostile_page_number_among_good_ones(op, which, save):
    """What follows it is skipped, even where it would lie right. The last number does, when its product is cut."""
    here, its = [good(k) for k in range(3) if k != which], good(which)
    still = its._replace(device_offset=its.device_offset + 1_024, host_offset=2_048, page_bytes=0)
    right_when_cut = 2**64 // its.page_bytes + NUMBERS[which]
    for number in (INT64_MIN, -(2**32), -1, SMALL_BYTES, 2**31, 2**32 + 1, 2**62, INT64_MAX, right_when_cut):
        numbers = tuple(number if k == which else found for k, found in enumerate(NUMBERS))
        only = [*here, still] if 0 <= number < 2**31 else here
        world = build(save, SMALL, SMALL_HOST)
        check(world, op, [*here, its, still], save, 2, moves=True, only=only, numbers=numbers)


RING_HOSTILE = {
    "first": [INT64_MIN, -(2**32), -LAYERS, LAYERS, LAYERS + 1, 2**31, 2**32, INT64_MAX],
    "layers": [INT64_MIN, -(2**32), -1, 0],
    "device_offset": [
        INT64_MIN, -(2**32), -16, (ROWS - 16) * WIDTH + 8, ROWS * WIDTH, 2**32, INT64_MAX - 7, INT64_MAX,
    ],
    "host_offset": [-2, -8, -(2**32) - 1, INT64_MIN, INT64_MAX],
    "rows": [INT64_MIN, -(2**32), -1, 0, ROWS + 1, 2**32, 2**58, 2**58 + 16, 2**64 // WIDTH + 1, INT64_MAX],
    "row_bytes": [
        INT64_MIN, -(2**32), -WIDTH, 0, ROWS * WIDTH, 2**32, 2**60, 2**60 + WIDTH, 2**63 - 16, INT64_MAX,
    ],
    "follows": [INT64_MIN, -1, 3, 2**32, INT64_MAX],
    "page_bytes": [INT64_MIN, -8, (ROWS - 16) * WIDTH // 2, 2**31, 2**32, 2**62, 2**63 - 8],
}  # fmt: skip


@OPS
@pytest.mark.parametrize("field", RING_HOSTILE)
def test_a_hostile_field_of_rows_to_reset(op, field):
    """Only -1 as a host offset means them."""
    like = ring(1) if field != "host_offset" else ring(1)._replace(row_stride=WIDTH, layer_stride=WIDTH)
    hostile = [like._replace(**{field: value}) for value in RING_HOSTILE[field]]
    check(build(False, RINGS, 1 << 14), op, [*hostile, ring(0)], False, most_layers=LAYERS, only=[ring(0)])


# Each product of two fields is small, or even right, in 64 bits.
OVERFLOWS = [
    good(1)._replace(rows=-2, row_bytes=-32),
    good(1)._replace(rows=-2, row_bytes=-32, row_stride=0),
    good(1)._replace(rows=5, row_stride=2**62 + 8),
    good(1)._replace(rows=5, row_stride=2**62),
    good(1)._replace(rows=3, row_stride=INT64_MAX - 7),
    good(1)._replace(rows=2**64 // 32 + 1, row_stride=0),
    good(1)._replace(rows=2**61 + 2, row_bytes=16, row_stride=0),
    good(1)._replace(rows=2**61 + 2, row_bytes=16, row_stride=16),
    good(1)._replace(rows=2, row_bytes=2**63 - 8, row_stride=0),
    good(1)._replace(rows=4, row_bytes=2**62 + 8, row_stride=0),
]
PAIRS = [
    good(1)._replace(**{one: a, other: b})
    for one, other in combinations([field for field in FIELDS if field != "layers"], 2)
    for a, b in product((INT64_MIN, INT64_MAX - 7), repeat=2)
]
RING_PAIRS = [
    ring(0)._replace(**{one: a, other: b})
    for one, other in combinations([field for field in RING_HOSTILE if field not in {"layers", "host_offset"}], 2)
    for a, b in product((INT64_MIN, -1, 2**60, INT64_MAX - 7), repeat=2)
]


@OPS
@pytest.mark.parametrize(
    ("segments", "save"),
    [(OVERFLOWS, True), (OVERFLOWS, False), (PAIRS, True), (PAIRS, False), (RING_PAIRS, False)],
    ids=["products, save", "products, load", "pairs, save", "pairs, load", "pairs, reset"],
)
def test_fields_that_overflow_together_are_skipped(op, save, segments):
    check(build(save, SMALL, SMALL_HOST), op, segments, save, most_layers=1, only=[])


# --------------------------------------------------------------------------------------------------------- refusals


@OPS
@pytest.mark.parametrize(
    "segments",
    [
        torch.zeros(2, 10, dtype=torch.int32),
        torch.zeros(2, 10, dtype=torch.float64),
        torch.zeros(2, 8, dtype=torch.int64),
        torch.zeros(10, dtype=torch.int64),
        torch.zeros(1, 2, 10, dtype=torch.int64),
        torch.zeros(2, 20, dtype=torch.int64)[:, ::2],
        torch.zeros(10, 2, dtype=torch.int64).T,
    ],
)
def test_bad_segments_are_refused(op, segments):
    refused(op, segments, page_numbers(), "^segments ")


@OPS
@pytest.mark.parametrize(
    "numbers",
    [torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64),
     torch.zeros(1, 3, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)[::2]],
)  # fmt: skip
def test_bad_page_numbers_are_refused(op, numbers):
    refused(op, table_of([run(0, 0, 0, 8)]), numbers, "page_numbers must be")


def refused(op, segments, numbers, message):
    world = build(True, SMALL, SMALL_HOST)
    before = world.read()
    with pytest.raises(TypeError, match=message):
        op(world.table, host_words(world.host.inner), segments, numbers, 1, 8, True)
    assert world.read() == before


@OPS
def test_a_buffer_without_pages_has_nothing_inside(op):
    generator = torch.Generator().manual_seed(1)
    full = torch.randint(0, 256, (2, 32), dtype=torch.uint8, generator=generator).to(DEVICE)
    table = BufferTable.of([full, torch.empty(0, 32, dtype=torch.uint8, device=DEVICE)])
    host = torch.zeros(64, dtype=torch.uint8)
    host = host.pin_memory() if DEVICE == "cuda" else host
    op(
        table,
        host_words(host),
        table_of([run(1, 0, 0, 8), Seg(0, 2, 32, 8, 16, 1, 16, 16)]),
        page_numbers(),
        2,
        16,
        True,
    )
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert host.tolist() == [0] * 8 + full.view(-1)[32:48].tolist() + [0] * 40


# --------------------------------------------------------------------------------------------------------- launches


def test_one_launch_whatever_the_layers_segments_and_bytes(monkeypatch):
    """A program for each layer of each segment and each chunk; segments with less than the most do nothing there."""
    counted = count_launches(monkeypatch, module._copy_rows)
    check(build(True, ((64, 3),) * 30, 4_096), copy_rows, [Seg(0, 30, 64, 32, 32, 1, 32, 32)], True, moves=True)
    segments = [run(2, 0, 90_000, 2_048), Seg(0, 2, 0, 0, 40_000, 1, CHUNK_BYTES + 8, CHUNK_BYTES + 8)]
    check(build(True, SHAPES, HOST_BYTES), copy_rows, segments, True, moves=True)
    segments = [reset(0, 3, 16 * 32, 16, 32), Seg(0, 3, 0, 32, 32, 1, 32, 32)]
    check(build(False, ((32, 33),) * 3, 1_024), copy_rows, segments, False, moves=True, dtype=torch.bfloat16)
    for nothing in ([], [run(0, 0, 0, 0)]):
        check(build(True, SMALL, SMALL_HOST), copy_rows, nothing, True, moves=False)
    assert counted.grids == [(30, 1, 1), (4, 2, 1), (6, 1, 1)]


# --------------------------------------------------------------------------------------------------------- anything

SLOT, HOST_SLOT, MOST_LAYERS = 512, 2_048, 3
HOSTILE = st.one_of(
    st.none(), st.none(), st.tuples(st.sampled_from(FIELDS), st.sampled_from((INT64_MIN, -8, INT64_MAX - 7, INT64_MAX)))
)
SHAPE = st.tuples(
    st.integers(-1, 1), st.integers(0, MOST_LAYERS), st.integers(0, 4), st.integers(0, 12).map(lambda k: 8 * k),
    st.integers(0, 16).map(lambda k: 8 * k), st.integers(0, 2).map(lambda k: 8 * k), st.booleans(), HOSTILE,
)  # fmt: skip


def somewhere(shape, device_slot: int, host_slot: int) -> Seg:
    """A segment inside slots of its own on both sides, unless a field of it is hostile."""
    first, layers, rows, row_bytes, at, gap, in_turn, hostile = shape
    device, host = device_slot * SLOT + at, host_slot * HOST_SLOT + at
    if in_turn:
        s = Seg(first, layers, device, host, row_bytes + gap, rows, row_bytes, MOST_LAYERS * (row_bytes + gap))
    else:
        s = Seg(first, layers, device, host, rows * (row_bytes + gap) + gap, rows, row_bytes, row_bytes + gap)
    return s if hostile is None else s._replace(**dict([hostile]))


@DIRECTIONS
@settings(max_examples=15, deadline=None)
@given(shapes=st.lists(SHAPE, max_size=8), seed=st.integers(0, 2**32))
def test_any_segments_as_the_loop_does_it(save, shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    order = [torch.randperm(9, generator=generator).tolist() for _ in range(2)]
    segments = [somewhere(shape, order[0][k], order[1][k]) for k, shape in enumerate(shapes)]
    world = build(save, ((SLOT, 11), (SLOT, 7)), HOST_SLOT * 9)
    check(world, copy_rows, segments, save, most_layers=MOST_LAYERS)
