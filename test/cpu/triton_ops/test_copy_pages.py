"""copy_pages and its torch twin against a loop over the pages; all memory is compared, guards included."""

from __future__ import annotations

import pytest
import torch
from guarded import DEVICE, count_launches, int64
from paged import BLOCKS, EMPTY_CASE, build, check

from triton_ops import copy_pages as module
from triton_ops.cases import bad_indices
from triton_ops.cases.copy_pages import PAGE_SHAPES, PagesCase, pages_cases
from triton_ops.copy_pages import PageTable, copy_pages, copy_pages_torch
from triton_ops.tables import host_words

OPS = pytest.mark.parametrize("op", [copy_pages, copy_pages_torch], ids=["kernel", "torch"])
DIRECTIONS = pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
PAGES = min(count for _, count in PAGE_SHAPES)


@OPS
@DIRECTIONS
@pytest.mark.parametrize("case", pages_cases(), ids=str)
def test_pages_land_where_they_belong_and_nowhere_else(op, save, case):
    check(build(save, case), op, save)


@OPS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_only_the_first_slot_of_each_page_is_read(op, dtype):
    """Of one page or of many tokens, the last page full or not, the first slot anywhere in memory."""
    for page, last, skip in ((1, 1, 0), (2, 2, 1), (256, 1, 3), (256, 255, 2)):
        check(build(True, EMPTY_CASE._replace(pages=[3, 0, 4], page=page)), op, True, None, dtype, skip, last)


def test_the_check_itself_can_fail():
    def forgetful(table, host, slots, page, save):
        copy_pages_torch(table, host, slots[:-page], page, save)

    def spilling(table, host, slots, page, save):
        copy_pages_torch(table, host, slots, page, save)
        host[-1] += 1

    for broken in (forgetful, spilling):
        with pytest.raises(AssertionError, match="wanted"):
            check(build(True), broken, True, [0, 1])


def test_save_and_load_back_to_other_pages():
    world = build(save=True)
    source = [buffer.inner.clone() for buffer in world.buffers]
    copy_pages(world.table, world.memory, int64([0, 2]), 1, True)
    for buffer in world.buffers:
        buffer.poison()
    copy_pages(world.table, world.memory, int64([3, 1]), 1, False)
    for buffer, before, (width, count) in zip(world.buffers, source, PAGE_SHAPES, strict=True):
        now, old = buffer.inner.view(count, width), before.view(count, width)
        assert torch.equal(now[3], old[0])
        assert torch.equal(now[1], old[2])


@OPS
@DIRECTIONS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_hostile_slots_are_skipped(op, save, dtype):
    """Each of them, without the loop's word for it; then among good ones, and a page that only some buffers have."""
    world = build(save)
    before = world.read()
    slots = torch.tensor(bad_indices(4 * max(count for _, count in PAGE_SHAPES), dtype), dtype=dtype).to(DEVICE)
    for first in range(0, len(slots), BLOCKS):
        op(world.table, world.memory, slots[first : first + BLOCKS].clone(), 1, save)
        op(world.table, world.memory, slots[first : first + BLOCKS].repeat_interleave(4), 4, save)
    assert world.read() == before
    check(world, op, save, [-1, 3, PAGES, 2**28, 1, PAGES + 1], dtype)
    check(world, op, save, [8, 0], dtype)


@OPS
@DIRECTIONS
def test_pages_without_a_block_are_skipped(op, save):
    """More pages than the host has room for."""
    check(build(save, EMPTY_CASE._replace(pages=[2, 0, 1], host_blocks=2)), op, save)


# --------------------------------------------------------------------------------------------------------- refusals


@OPS
@pytest.mark.parametrize(
    "slots",
    [
        torch.zeros(2, dtype=torch.int16),
        torch.zeros(2, dtype=torch.float32),
        torch.zeros(1, 2, dtype=torch.int64),
        torch.zeros((), dtype=torch.int64),
        torch.zeros(4, dtype=torch.int64)[::2],
    ],
)
def test_bad_slots_are_refused_by_name(op, slots):
    world = build(True)
    before = world.read()
    with pytest.raises(TypeError, match="slots must be"):
        op(world.table, world.memory, slots, 4, True)
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
        host_words(bad(torch.zeros(4096, dtype=torch.uint8)))


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
    check(build(save), copy_pages, save, [-1, 3, 2**40, 2, 8, 1, 0])
    check(build(save), copy_pages, save, [-1, 1, -1])
    check(build(save, PagesCase(((1_728, 3),), BLOCKS, [2])), copy_pages, save)
    assert launched.grids == [(programs, 1, 1), (programs, 1, 1), (1, 1, 1)]
