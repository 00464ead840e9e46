"""copy_rows and its torch twin against a byte-by-byte loop; all memory is compared, guards included."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from builders import DEVICE, INT64_MAX, INT64_MIN, count_launches, needs_cuda
from hypothesis import given, settings
from hypothesis import strategies as st
from segments import NO_HOST_SIDE, Seg, World, check, run, table_of
from segments import build as build_world

from triton_ops import copy_rows as module
from triton_ops.copy_rows import CHUNK_WORDS, FIELDS, copy_rows, copy_rows_torch
from triton_ops.tables import BufferTable

OPS = pytest.mark.parametrize("op", [copy_rows, copy_rows_torch])
DIRECTIONS = pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
# (row or page bytes, how many): two c4 states, c4 indexer state, three c128 states, a kv page, and a tiny one
SHAPES = ((8_192, 9), (8_192, 9), (2_048, 17), (4_096, 5), (4_096, 5), (4_096, 5), (37_440, 1), (16, 1))
HOST_BYTES = 96_000
CHUNK_BYTES = 8 * CHUNK_WORDS


def build(save: bool, shapes=SHAPES, host_bytes: int = HOST_BYTES, device: str = DEVICE) -> World:
    return build_world(save, shapes, host_bytes, device)


RUNS = {
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
    "a layer past the end of the host": [Seg(3, 3, 0, HOST_BYTES - 80, 24, 2, 16, 24)],
}


@OPS
@DIRECTIONS
@pytest.mark.parametrize("segments", RUNS.values(), ids=RUNS.keys())
def test_runs_land_where_they_belong_and_nowhere_else(op, save, segments):
    check(build(save), op, segments, save, moves=True)


def test_the_check_itself_can_fail():
    def with_field(field: str, change):
        def broken(table, host, segments, most_layers, most_bytes, save):
            segments = segments.clone()
            column = FIELDS.index(field)
            segments[:, column] = change(segments[:, column])
            copy_rows_torch(table, host, segments, most_layers, most_bytes, save)

        return broken

    def swapped(table, host, segments, *rest):
        copy_rows_torch(table, host, segments[:, [0, 1, 3, 2, 4, 5, 6, 7]].contiguous(), *rest)

    shift = {"first": 1, "layers": -1, "device_offset": 8, "host_offset": 8, "layer_stride": 8}
    shift |= {"rows": -1, "row_bytes": -8, "row_stride": 8}
    wrong = [with_field(field, lambda column, by=by: column + by) for field, by in shift.items()]
    for broken in (*wrong, swapped):
        with pytest.raises(AssertionError, match="wanted"):
            check(build(True), broken, [Seg(0, 2, 64, 128, 400, 3, 64, 80)], True)


@OPS
@DIRECTIONS
def test_no_segments(op, save):
    check(build(save), op, [], save, moves=False)


# ---------------------------------------------------------------------------------------------- hostile

SMALL = ((512, 9),) * 4
SMALL_BYTES, SMALL_HOST = 9 * 512, 10_240


def good(k: int) -> Seg:
    """Two rows of two layers, in a place of its own (there is one for each ``k`` < 16), with room for four layers."""
    return Seg(0, 2, 128 * k, 512 * k, 80, 2, 32, 40)


def hostile_values(field: str, s: Seg) -> list[int]:
    """What ``field`` of ``s`` may not hold, or only for some layers: extremes, what looks small when it is cut or
    when it overflows in a product, and one word past each end. A host offset of -1 is none, and resets on a load."""
    left, host_left = SMALL_BYTES - s.device_offset, SMALL_HOST - s.host_offset
    common = [INT64_MIN, INT64_MIN + 1, -(2**32), -8, -1, 2**31, 2**32, 2**62, INT64_MAX - 7, INT64_MAX]
    reach = s.row_stride + s.row_bytes
    own = {
        "first": [-4, -2, len(SMALL) - 1, len(SMALL), len(SMALL) + 1],
        "layers": [0, len(SMALL) + 1, 2**32 + 2],
        "device_offset": [SMALL_BYTES - 56, SMALL_BYTES, SMALL_BYTES + 8, INT64_MAX - 63],
        "host_offset": [
            SMALL_HOST - reach - s.layer_stride + 8, SMALL_HOST - reach + 8, SMALL_HOST, SMALL_HOST + 8, INT64_MAX - 63,
        ],
        "layer_stride": [host_left - reach + 8, SMALL_HOST, SMALL_HOST + 8, 2**63 - 8 * 64, 2**62 + 8],
        "rows": [0, left // 32 + 1, SMALL_HOST // 40 + 1, 2**32 + 2, 2**64 // 32 + 1, 2**64 // 40 + 1],
        "row_bytes": [0, left // 2 + 8 - left // 2 % 8, 2**32 + 32, 2**62 + 32],
        "row_stride": [max(host_left, SMALL_HOST // 2) + 8, SMALL_HOST, SMALL_HOST + 8, 2**32 + 40, 2**62 + 40],
    }  # fmt: skip
    return sorted({*common, *own[field]})


def hostile_segments(fields=FIELDS) -> list[Seg]:
    """Segments with one field replaced; some of their layers may be good, and those lie apart."""
    found = []
    for field in fields:
        for k in range(16):
            values = hostile_values(field, good(k))
            if k < len(values):
                found.append(good(k)._replace(**{field: values[k]}))
        assert len(hostile_values(field, good(0))) <= 16
    return found


@pytest.mark.parametrize(
    ("op", "field"),
    [(op, field) for op in (copy_rows, copy_rows_torch) for field in FIELDS],
)
@DIRECTIONS
def test_a_hostile_field(op, field, save):
    segments = hostile_segments([field])
    check(build(save, SMALL, SMALL_HOST), op, segments, save, most_layers=len(SMALL))


@pytest.mark.parametrize("op", [copy_rows, copy_rows_torch])
def test_layers_before_the_first_buffer_do_not_hide_the_others(op):
    segments = [Seg(-2, len(SMALL) + 2, 64, 128, 80, 2, 24, 40)]
    check(build(True, SMALL, SMALL_HOST), op, segments, True, moves=True)


@OPS
@DIRECTIONS
def test_most_hostile_values_move_nothing(op, save):
    """The values of which no layer is good, without the loop's word for what is skipped."""
    fields = ("device_offset", "rows", "row_bytes", "row_stride")
    segments = hostile_segments(fields)
    world = build(save, SMALL, SMALL_HOST)
    before = world.read()
    op(world.table, world.host.inner, table_of(segments), 2, 1_024, save)
    assert world.read() == before


@OPS
@DIRECTIONS
def test_fields_that_overflow_together_are_skipped(op, save):
    fields = [field for field in FIELDS if field != "layers"]
    segments = [
        good(1)._replace(**{one: a, other: b})
        for one, other in combinations(fields, 2)
        for a, b in product((INT64_MIN, INT64_MAX - 7), repeat=2)
    ]
    world = build(save, SMALL, SMALL_HOST)
    before = world.read()
    op(world.table, world.host.inner, table_of(segments), 2, 1_024, save)
    assert world.read() == before


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


@OPS
@DIRECTIONS
def test_products_that_overflow_into_range_are_skipped(op, save):
    world = build(save, SMALL, SMALL_HOST)
    before = world.read()
    op(world.table, world.host.inner, table_of(OVERFLOWS), 2, 1_024, save)
    assert world.read() == before


@OPS
@DIRECTIONS
def test_good_segments_among_hostile_ones_are_copied(op, save):
    segments = hostile_segments(("device_offset", "rows", "row_stride"))
    segments[7:7] = [good(15)]
    segments.append(Seg(1, 3, 4_096, 8_192, 512, 2, 96, 104))
    check(build(save, SMALL, SMALL_HOST), op, segments, save, moves=True)


# ---------------------------------------------------------------------------------------------- refusals


@OPS
@pytest.mark.parametrize(
    "segments",
    [
        torch.zeros(2, 8, dtype=torch.int32),
        torch.zeros(2, 8, dtype=torch.float64),
        torch.zeros(2, 7, dtype=torch.int64),
        torch.zeros(2, 4, dtype=torch.int64),
        torch.zeros(8, dtype=torch.int64),
        torch.zeros(1, 2, 8, dtype=torch.int64),
        torch.zeros(2, 16, dtype=torch.int64)[:, ::2],
        torch.zeros(8, 2, dtype=torch.int64).T,
    ],
)
def test_bad_segments_are_refused(op, segments):
    world = build(True)
    before = world.read()
    with pytest.raises(TypeError, match="segments must be"):
        op(world.table, world.host.inner, segments, 1, 8, True)
    assert world.read() == before


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (lambda host: host.view(torch.int32), TypeError),
        (lambda host: host.view(2, -1), TypeError),
        (lambda host: host[8:-8], ValueError),
        (lambda host: host[:-8], ValueError),
    ],
)
def test_a_bad_host_region_is_refused(bad, error):
    world = build(True)
    before = world.read()
    with pytest.raises(error, match="host region"):
        copy_rows(world.table, bad(world.host.inner), table_of([run(0, 0, 0, 8)]), 1, 8, True)
    assert world.read() == before


@OPS
def test_a_buffer_without_pages_has_nothing_inside(op):
    generator = torch.Generator().manual_seed(1)
    full = torch.randint(0, 256, (2, 32), dtype=torch.uint8, generator=generator).to(DEVICE)
    table = BufferTable.of([full, torch.empty(0, 32, dtype=torch.uint8, device=DEVICE)])
    host = torch.zeros(64, dtype=torch.uint8)
    host = host.pin_memory() if DEVICE == "cuda" else host
    op(table, host, table_of([run(1, 0, 0, 8), Seg(0, 2, 32, 8, 16, 1, 16, 16)]), 2, 16, True)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert host.tolist() == [0] * 8 + full.view(-1)[32:48].tolist() + [0] * 40


# ---------------------------------------------------------------------------------------------- launches


@pytest.mark.parametrize("layers", [3, 30])
def test_one_launch_whatever_the_layers(monkeypatch, layers):
    counted = count_launches(monkeypatch, module._copy_rows)
    check(build(True, ((64, 3),) * layers), copy_rows, [Seg(0, layers, 64, 32, 32, 1, 32, 32)], True, moves=True)
    assert counted.grids == [(layers, 1, 1)]


def test_one_launch_whatever_the_segments_and_bytes(monkeypatch):
    """A program for each layer of each segment and each chunk; segments with less than the most do nothing there."""
    counted = count_launches(monkeypatch, module._copy_rows)
    segments = [run(2, 0, 90_000, 2_048), Seg(0, 2, 0, 0, 40_000, 1, CHUNK_BYTES + 8, CHUNK_BYTES + 8)]
    check(build(True), copy_rows, segments, True, moves=True)
    assert counted.grids == [(4, 2, 1)]


@pytest.mark.parametrize("nothing", [[], [run(0, 0, 0, 0)]], ids=["no segment", "no byte"])
def test_nothing_to_do_is_no_launch(monkeypatch, nothing):
    counted = count_launches(monkeypatch, module._copy_rows)
    check(build(True), copy_rows, nothing, True, moves=False)
    assert counted.grids == []


# ---------------------------------------------------------------------------------------------- anything

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
@settings(max_examples=25, deadline=None)
@given(shapes=st.lists(SHAPE, max_size=8), seed=st.integers(0, 2**32))
def test_any_segments_as_the_loop_does_it(save, shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    order = [torch.randperm(9, generator=generator).tolist() for _ in range(2)]
    segments = [somewhere(shape, order[0][k], order[1][k]) for k, shape in enumerate(shapes)]
    world = build(save, ((SLOT, 11), (SLOT, 7)), HOST_SLOT * 9)
    check(world, copy_rows, segments, save, most_layers=MOST_LAYERS)


@needs_cuda
@pytest.mark.gpu
@DIRECTIONS
def test_compiled_kernel_on_pinned_memory(save):
    shapes = [(8_192, 65)] * 3 + [(2_048, 65)] * 3 + [(4_096, 257)] * 3 + [(149_760, 4)] * 3
    world = build(save, tuple(shapes), 1 << 21, "cuda")
    segments, host = [], 4_096
    for first in range(0, len(shapes), 3):
        width, count = shapes[first]
        for row in range(0, min(count, 9), 3):
            nbytes = min(width, CHUNK_BYTES) - 8 * row
            segments.append(Seg(first, 3, row * width + 8 * row, host, nbytes + 8, 1, nbytes, nbytes))
            host += 3 * (nbytes + 8)
    segments.append(Seg(6, 3, 4_096 * 100, host, 4_096, 44, 4_096, 3 * 4_096))  # longer than a chunk, layers in turn
    host += 44 * 3 * 4_096
    assert host < 1 << 21
    # Made for a smaller world: those that leave any, and no layer of them is good.
    bad = hostile_segments(("device_offset", "host_offset", "rows", "row_bytes", "row_stride"))
    segments += [s for s in bad if (min(s) < 0 or max(s) >= 2**31) and s.host_offset != NO_HOST_SIDE]
    check(world, copy_rows, segments, save, moves=True)
