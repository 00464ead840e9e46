"""copy_pages and its torch twin against a loop over the pages; all memory is compared, guards included."""

from __future__ import annotations

import pytest
import torch
from guarded import DEVICE, count_launches
from paged import BLOCKS, build, check

from triton_ops import copy_pages as module
from triton_ops.cases import INT64_MAX, INT64_MIN, bad_indices
from triton_ops.cases.copy_pages import PAGE_SHAPES, PagesCase, pages_cases, slots_of
from triton_ops.copy_pages import PageTable, copy_pages, copy_pages_torch
from triton_ops.tables import host_words

OPS = pytest.mark.parametrize("op", [copy_pages, copy_pages_torch], ids=["kernel", "torch"])
DTYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
DIRECTIONS = pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
PAGES = min(count for _, count in PAGE_SHAPES)


@OPS
@DTYPES
@DIRECTIONS
@pytest.mark.parametrize("case", pages_cases(), ids=str)
def test_pages_land_where_they_belong_and_nowhere_else(op, save, dtype, case):
    for skip, last in ((0, 1), (1, case.page)):
        check(build(save, case), op, save, None, dtype, skip, last)


@OPS
@DTYPES
@DIRECTIONS
def test_hostile_slots_and_more_pages_than_blocks_are_skipped(op, save, dtype):
    """Each of them, without the loop's word for it; then good ones among them, and pages that only some have."""
    world = build(save)
    before, end = world.read(), 256 * max(count for _, count in PAGE_SHAPES)
    bad = bad_indices(end, dtype)
    for first in range(0, len(bad), BLOCKS):
        hostile = slots_of(bad[first : first + BLOCKS], dtype=dtype)
        op(world.table, world.memory, hostile.to(DEVICE), 256, save)
    assert world.read() == before
    check(world, op, save, [bad[0], 3 * 256, -1, bad[-1], 256, 0, 2 * 256, 4 * 256], dtype, skip=1)
    check(world, op, save, [256 * PAGES, 256 * (PAGES + 1), 256 * 8 + 255], dtype)  # a slot in the middle of a page


# --------------------------------------------------------------------------------------------------------- refusals


@OPS
@pytest.mark.parametrize(
    "bad",
    [torch.zeros(2).short(), torch.zeros(2), torch.zeros(1, 2).long(), torch.tensor(0), torch.zeros(4).long()[::2]],
)
def test_bad_slots_are_refused(op, bad):
    world = build(True)
    before = world.read()
    with pytest.raises(TypeError, match="slots must be"):
        op(world.table, world.memory, bad, 256, True)
    assert world.read() == before


def spare(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize(
    ("buffers", "error", "message"),
    [
        (lambda: [], ValueError, "at least one"),
        (lambda: [spare(64).view(2, 32), spare(64)], TypeError, "buffer 1 must be"),
        (lambda: [spare(64).view(2, 2, 16)], TypeError, "buffer 0 must be"),
        (lambda: [spare(64).view(torch.int8).view(2, 32)], TypeError, "buffer 0 must be"),
        (lambda: [spare(128).view(2, 64)[:, :32]], TypeError, "buffer 0 must be"),
        (lambda: [spare(64).view(2, 32), torch.zeros(2, 32, dtype=torch.uint8, device="meta")], ValueError, "meta"),
        (lambda: [spare(64).view(2, 32), spare(80)[8:72].view(2, 32)], ValueError, "buffer 1 is not aligned"),
        (lambda: [spare(48).view(2, 24)], ValueError, "buffer 0 is not aligned"),
    ],
)
def test_bad_buffers_are_refused_by_number(buffers, error, message):
    made = buffers()
    with pytest.raises(error, match=message):
        PageTable.of(made, [0] * len(made), 4096)


@pytest.mark.parametrize(
    ("offsets", "stride", "message"),
    [([0, 64], 4096, "zip"), ([0], 16, "stride"), ([8], 4096, "16"), ([0], 4104, "16"), ([-16], 4096, "16")],
)
def test_a_host_layout_that_does_not_fit_is_refused(offsets, stride, message):
    with pytest.raises(ValueError, match=message):
        PageTable.of([spare(64).view(2, 32)], offsets, stride)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (lambda host: host.view(torch.int64), TypeError),
        (lambda host: host.view(-1, 16), TypeError),
        (lambda host: host[::2], TypeError),
        (lambda host: host[8:-8], ValueError),
        (lambda host: host[:-8], ValueError),
    ],
)
def test_a_bad_host_region_is_refused(bad, error):
    with pytest.raises(error, match="host region"):
        host_words(bad(spare(4_096)))


# --------------------------------------------------------------------------------------------------------- launches


@DIRECTIONS
def test_one_launch_whatever_the_buffers(monkeypatch, save):
    """None without a page."""
    launched = count_launches(monkeypatch, module._copy_pages)
    for buffers in (3, 30):
        check(build(save, PagesCase(((1_728, 3),) * buffers, BLOCKS, [2, 0])), copy_pages, save)
    check(build(save), copy_pages, save, [])
    assert launched.grids == [(6, 1, 1), (60, 1, 1)]


@pytest.mark.parametrize("programs", [1, 2, 7])
@DIRECTIONS
def test_programs_that_do_several_jobs(monkeypatch, save, programs):
    """Jobs out of range in between, at both ends, and as all that one program has."""
    launched = count_launches(monkeypatch, module._copy_pages)
    monkeypatch.setattr(module, "MOST_PROGRAMS", programs)
    check(build(save), copy_pages, save, [-1, 3 * 256, INT64_MAX, 2 * 256, 8 * 256, INT64_MIN, 0, 4 * 256])
    check(build(save), copy_pages, save, [-1, 256, INT64_MAX, 0])
    check(build(save, PagesCase(((1_728, 3),), BLOCKS, [2])), copy_pages, save)
    assert launched.grids == [(programs, 1, 1), (programs, 1, 1), (1, 1, 1)]
