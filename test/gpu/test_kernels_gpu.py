"""Compares compiled kernels with the references: real sizes, and variants of sizes, alignments and streams."""

import located as locating
import paged
import planar
import pytest
import segments
import torch

from triton_ops import copy_pages as page_ops
from triton_ops import locate as locate_op
from triton_ops.cases import INT64_MAX, bad_indices
from triton_ops.cases.copy_pages import REAL_PAGES, PagesCase
from triton_ops.cases.copy_rows import REAL_ROWS, reset
from triton_ops.cases.locate import LOCATE_LENGTHS, REAL_LOCATED, located
from triton_ops.cases.planar_rows import REAL_PLANAR, PlanarCase
from triton_ops.cases.prep_rows import REAL_PREP, prep_arguments
from triton_ops.copy_pages import copy_pages
from triton_ops.locate import NOTHING
from triton_ops.prep_rows import prep_rows, prep_rows_torch

DIRECTIONS = pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
DTYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


@DTYPES
@pytest.mark.parametrize("case", REAL_PLANAR, ids=str)
def test_planar_rows(case: PlanarCase, dtype):
    case = case._replace(dtype=dtype)
    planar.check(case, case.format.get, case.format.put, "cuda")


@DTYPES
@pytest.mark.parametrize("case", REAL_PLANAR[::2], ids=str)
def test_planar_rows_at_hostile_locations(case: PlanarCase, dtype):
    fmt, page_size = case.format, case.page_size
    buf, good = fmt.pages(page_size, case.count, "cuda"), case._replace(dtype=dtype).distinct("cuda")
    loc = torch.cat([good, torch.tensor(bad_indices(case.count * page_size, dtype), dtype=dtype, device="cuda")])
    got = fmt.get(buf, loc, page_size, *fmt.more)
    assert planar.raw(got) == planar.expected(fmt, buf, loc, page_size)
    parts = fmt.rows(len(loc), "cuda")
    wanted = planar.written(fmt, buf, loc, parts, page_size)
    fmt.put(buf, loc, *parts, page_size, *fmt.more)
    assert planar.raw([buf]) == [wanted]


@DTYPES
@DIRECTIONS
@pytest.mark.parametrize("case", REAL_PAGES[:2], ids=str)
def test_pages(case: PagesCase, save, dtype):
    """Between hostile slots, which are more than there are blocks."""
    bad = bad_indices(case.page * case.shapes[0][1], dtype)
    firsts = [bad[0], *case.firsts[:-2], *bad]
    paged.check(paged.World(save, case, "cuda"), copy_pages, save, firsts, dtype)


@DIRECTIONS
@pytest.mark.parametrize("programs", [None, 1, 3])
def test_a_compiled_variant_of_pages_serves_other_sizes(monkeypatch, save, programs):
    """One page first, then many; slots that are not 16-byte aligned; on the current stream and on a named one."""
    monkeypatch.setattr(page_ops._copy_pages, "_variants", {})
    if programs:
        monkeypatch.setattr(page_ops, "MOST_PROGRAMS", programs)
    named = torch.cuda.Stream()

    def elsewhere(*arguments):
        torch.cuda.synchronize()
        copy_pages(*arguments, stream=named.cuda_stream)

    small, many = paged.EMPTY_CASE, PagesCase(((37_440, 40), (8_448, 40)), 33, [*range(31)])
    for case, op, firsts, skip in (
        (small, copy_pages, [3 * 256], 0),
        (small, copy_pages, [3 * 256, 0, -1, 256], 1),
        (many, copy_pages, many.firsts, 2),
        (small, elsewhere, [-1, 4 * 256, 2 * 256], 3),
    ):
        for dtype in (torch.int32, torch.int64):
            paged.check(paged.World(save, case, "cuda"), op, save, firsts, dtype, skip)
            paged.check(paged.World(save, case, "cuda"), op, save, firsts, dtype, skip, pages=range(1, len(firsts)))
    assert len(page_ops._copy_pages._variants) == 2


@DIRECTIONS
@pytest.mark.parametrize("case", REAL_ROWS, ids=str)
def test_rows(case, save):
    """Live rows and rows to reset of every layer, and segments that leave the memory on either side."""
    hostile = ("device_offset", "host_offset", "rows", "row_bytes", "row_stride", "follows", "page_bytes")
    bad = [
        case.segments[0]._replace(**{field: value})
        for field in hostile
        for value in (-(2**63), -(2**32), 2**32, 2**62, INT64_MAX - 7)
    ]
    slot, page, none = case.page_numbers
    for numbers in ((slot, page, none), (slot, -1, none), (2**62, page, none)):
        world = segments.World(save, case.shapes, case.host_bytes, "cuda")
        segments.check(world, [*case.segments, *bad], save, moves=True, numbers=numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_are_reset(dtype):
    width = 2 * 512 * dtype.itemsize
    world = segments.World(False, ((width, 6 * 128 + 1),) * 20, 1 << 20, "cuda")
    for slot in (0, 5):
        ring = reset(0, 20, slot * 128 * width, 128, width)
        segments.check(world, [ring], False, moves=True, dtype=dtype)


@DTYPES
def test_locate(monkeypatch, dtype):
    """One compiled variant for every length, alignment, and mapping."""
    monkeypatch.setattr(locate_op._locate, "_variants", {})
    for tokens in (1, 4_097, *LOCATE_LENGTHS):
        for skip in range(4):
            assert set(locating.check(located(tokens, skip), dtype, skip, "cuda")) <= {NOTHING}
    for tokens in REAL_LOCATED[:2]:
        request = located(tokens, full_pages=tokens // 256 + 9)
        assert set(locating.check(request, dtype, 0, "cuda")) == {NOTHING}
        for position in (0, 2_000, tokens - 1):
            for bad in (-1, -(2**31), 2**31 - 1, request.limits[0] * 256):
                locating.check(request.with_slots({position: bad}), dtype, 1, "cuda")
        for value in (0, -1, 2**40):
            locating.check(request.with_swa({tokens - 127: value, tokens - 1: value}), dtype, 0, "cuda")


@pytest.mark.parametrize("requests", REAL_PREP)
def test_prep_rows(requests):
    found = []
    for op in (prep_rows, prep_rows_torch):
        sizes, inputs, outputs = prep_arguments(requests, seed=requests, device="cuda")
        for output in outputs:
            if output is not None:
                output.fill_(-77)
        op(sizes, inputs, outputs)
        found.append(outputs)
    for name, ours, wanted in zip(found[0]._fields, *found, strict=True):
        assert ours is wanted is None or torch.equal(ours, wanted), name
