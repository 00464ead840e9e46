"""copy_pages against its torch twin; all memory is compared, guards included."""

from __future__ import annotations

import pytest
import torch
from guarded import DEVICE
from paged import BLOCKS, World, check

from triton_ops import copy_pages as module
from triton_ops.cases import INT64_MAX, INT64_MIN, bad_indices
from triton_ops.cases.copy_pages import PAGE_SHAPES, PagesCase, pages_cases, slots_of
from triton_ops.copy_pages import PageTable, copy_pages, copy_pages_torch
from triton_ops.tables import host_words

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


def spare(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)


def table(*buffers, offsets=(0,), stride=4_096):
    return PageTable.of(list(buffers), list(offsets), stride)


PAIR = spare(64).view(2, 32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: table(offsets=[]), ValueError, "at least one"),
        (lambda: table(PAIR, spare(64), offsets=[0, 64]), TypeError, "buffer 1 must be"),
        (lambda: table(spare(128).view(2, 64)[:, :32]), TypeError, "buffer 0 must be"),
        (lambda: table(PAIR, spare(80)[8:72].view(2, 32), offsets=[0, 64]), ValueError, "buffer 1 is not aligned"),
        (lambda: table(PAIR, offsets=[0, 64]), ValueError, "zip"),
        (lambda: table(PAIR, stride=16), ValueError, "stride"),
        (lambda: table(PAIR, offsets=[8]), ValueError, "16"),
        (lambda: host_words(spare(4_096).view(torch.int64)), TypeError, "host region"),
        (lambda: host_words(spare(4_096)[8:-8]), ValueError, "host region"),
        (lambda: copy_pages(table(PAIR), host_words(spare(4_096)), torch.zeros(2), 256, True), TypeError, "slots must"),
        (
            lambda: copy_pages_torch(table(PAIR), host_words(spare(4_096)), torch.zeros(1, 2).long(), 256, True),
            TypeError,
            "slots must",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("programs", [1, 2, 7])
@DIRECTIONS
def test_programs_that_do_several_jobs(monkeypatch, save, programs):
    """Jobs out of range in between, at both ends, and as all that one program has."""
    monkeypatch.setattr(module, "MOST_PROGRAMS", programs)
    check(World(save), copy_pages, save, [-1, 3 * 256, INT64_MAX, 2 * 256, 8 * 256, INT64_MIN, 0, 4 * 256])
    check(World(save), copy_pages, save, [-1, 256, INT64_MAX, 0])
    check(World(save, PagesCase(((1_728, 3),), BLOCKS, [2])), copy_pages, save)
    check(World(save), copy_pages, save, [])
