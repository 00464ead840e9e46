"""copy_pages leaves all memory, guards included, as its torch twin does."""

import pytest
import torch
from guarded import DEVICE
from paged import BLOCKS, World, check

from triton_ops import copy_pages as module
from triton_ops.cases import INT64_MAX, INT64_MIN, bad_indices
from triton_ops.cases.copy_pages import PAGE_SHAPES, PagesCase, pages_cases, slots_of
from triton_ops.copy_pages import copy_pages

DTYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
DIRECTIONS = pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
PAGES = min(count for _, count in PAGE_SHAPES)


@DTYPES
@DIRECTIONS
@pytest.mark.parametrize("case", pages_cases(), ids=str)
def test_pages_land_where_they_belong_and_nowhere_else(save, dtype, case):
    for skip, last in ((0, 1), (1, case.page)):
        check(World(save, case), copy_pages, save, None, dtype, skip, last)


@DTYPES
@DIRECTIONS
@pytest.mark.parametrize("pages", [range(1, 4), range(2, 5), range(3, 3)], ids=str)
def test_some_pages_of_a_request_are_copied(save, dtype, pages):
    check(World(save), copy_pages, save, [4 * 256, 0, -1, 3 * 256, 256], dtype, pages=pages)


@pytest.mark.parametrize("pages", [range(-1, 1), range(1, 4), range(0, 2, 2), range(1, -2)], ids=str)
def test_pages_that_a_request_does_not_have_are_refused(pages):
    with pytest.raises(ValueError, match="of 3 pages"):
        check(World(True), copy_pages, True, [0, 256, 512], pages=pages)


@DTYPES
@DIRECTIONS
def test_hostile_slots_and_more_pages_than_blocks_are_skipped(save, dtype):
    """Each of them, without the twin's word for it; then good ones among them, and pages that only some have."""
    world = World(save)
    before, end = world.read(), 256 * max(count for _, count in PAGE_SHAPES)
    bad = bad_indices(end, dtype)
    for first in range(0, len(bad), BLOCKS):
        hostile = slots_of(bad[first : first + BLOCKS], dtype=dtype)
        copy_pages(world.table, world.memory, hostile.to(DEVICE), 256, save)
    assert world.read() == before
    check(world, copy_pages, save, [bad[0], 3 * 256, -1, bad[-1], 256, 0, 2 * 256, 4 * 256], dtype, skip=1)
    check(
        world, copy_pages, save, [256 * PAGES, 256 * (PAGES + 1), 256 * 8 + 255], dtype
    )  # a slot in the middle of a page


@pytest.mark.parametrize("programs", [1, 2, 7])
@DIRECTIONS
def test_programs_that_do_several_jobs(monkeypatch, save, programs):
    """Jobs out of range in between, at both ends, and as all that one program has."""
    monkeypatch.setattr(module, "MOST_PROGRAMS", programs)
    check(World(save), copy_pages, save, [-1, 3 * 256, INT64_MAX, 2 * 256, 8 * 256, INT64_MIN, 0, 4 * 256])
    check(World(save), copy_pages, save, [-1, 256, INT64_MAX, 0])
    check(World(save, PagesCase(((1_728, 3),), BLOCKS, [2])), copy_pages, save)
    check(World(save), copy_pages, save, [])
