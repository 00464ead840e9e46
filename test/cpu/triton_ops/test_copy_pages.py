"""copy_pages and its torch twin against a loop over the pages; all memory is compared, guards included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from guarded import DEVICE, count_launches, int64
from paged import BLOCKS, World, build, check

from triton_ops import copy_pages as module
from triton_ops.cases import INT64_MAX, INT64_MIN, bad_indices
from triton_ops.cases.copy_pages import PAGE_SHAPES, PagesCase, pages_cases
from triton_ops.copy_pages import PageTable, copy_pages, copy_pages_torch

OPS = pytest.mark.parametrize("op", [copy_pages, copy_pages_torch], ids=["kernel", "torch"])
DIRECTIONS = pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
PAGES = min(count for _, count in PAGE_SHAPES)


@OPS
@DIRECTIONS
@pytest.mark.parametrize("case", pages_cases(), ids=str)
def test_pages_land_where_they_belong_and_nowhere_else(op, save, case):
    check(build(save, case), op, save)


def test_the_check_itself_can_fail():
    def forgetful(table, host, pages, blocks, save):
        copy_pages_torch(table, host, pages[:-1], blocks[:-1], save)

    def spilling(table, host, pages, blocks, save):
        copy_pages_torch(table, host, pages, blocks, save)
        host[-1] += 1

    for broken in (forgetful, spilling):
        with pytest.raises(AssertionError, match="wanted"):
            check(build(True), broken, True, [0, 1], [1, 0])


def test_save_and_load_back_to_other_pages():
    world = build(save=True)
    source = [buffer.inner.clone() for buffer in world.buffers]
    copy_pages(world.table, world.memory, int64([0, 2]), int64([4, 1]), True)
    for buffer in world.buffers:
        buffer.poison()
    copy_pages(world.table, world.memory, int64([3, 1]), int64([4, 1]), False)
    for buffer, before, (width, count) in zip(world.buffers, source, PAGE_SHAPES, strict=True):
        now, old = buffer.inner.view(count, width), before.view(count, width)
        assert torch.equal(now[3], old[0])
        assert torch.equal(now[1], old[2])


@OPS
@DIRECTIONS
def test_hostile_pages_and_blocks_are_skipped(op, save):
    """Each of them, without the loop's word for it; then good items among them, and pages that only some have."""
    world = build(save)
    before = world.read()
    pages, blocks = bad_indices(max(count for _, count in PAGE_SHAPES)), bad_indices(BLOCKS)
    op(world.table, world.memory, int64(pages), int64(k % BLOCKS for k in range(len(pages))), save)
    op(world.table, world.memory, int64(k % PAGES for k in range(len(blocks))), int64(blocks), save)
    assert world.read() == before
    check(world, op, save, [INT64_MIN, 3, -1, INT64_MAX, 1, 0], [0, 1, 2, 3, INT64_MAX, 5])
    check(world, op, save, [PAGES, PAGES + 1, 8], [0, 3, 2])


# --------------------------------------------------------------------------------------------------------- refusals


@OPS
@pytest.mark.parametrize(
    ("pages", "blocks", "error", "message"),
    [
        (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), TypeError, "pages"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float32), TypeError, "blocks"),
        (torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), TypeError, "pages"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.int64), TypeError, "blocks"),
        (torch.zeros(4, dtype=torch.int64)[::2], torch.zeros(2, dtype=torch.int64), TypeError, "pages"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), ValueError, "2 pages but 3 blocks"),
    ],
)
def test_bad_indices_are_refused_by_name(op, pages, blocks, error, message):
    world = build(True)
    before = world.read()
    with pytest.raises(error, match=message):
        op(world.table, world.memory, pages, blocks, True)
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
    world = build(True)
    before = world.read()
    with pytest.raises(error, match="host region"):
        copy_pages(world.table, bad(world.memory), int64([0]), int64([0]), True)
    assert world.read() == before


# --------------------------------------------------------------------------------------------------------- launches


class Elsewhere(torch.Tensor):
    """Memory of the CPU that says it lies on another device than the host side."""

    device = torch.device("meta")


def to_host(world: World) -> World:
    """The same world, saved as from a GPU to host memory."""
    if DEVICE == "cuda":
        return world
    world.table = replace(world.table, chunks=world.table.chunks.as_subclass(Elsewhere))
    return world


@pytest.fixture
def launched(monkeypatch):
    """Of stores to the device and of stores to host memory."""
    return [count_launches(monkeypatch, launcher) for launcher in (module._copy_pages, module._copy_pages_to_host)]


@DIRECTIONS
def test_one_launch_whatever_the_buffers(launched, save):
    """None without an item."""
    for buffers in (3, 30):
        check(build(save, PagesCase(((1_728, 3),) * buffers, BLOCKS, [2, 0], [1, 3])), copy_pages, save)
    check(build(save), copy_pages, save, [], [])
    assert launched[0].grids + launched[1].grids == [(6, 1, 1), (60, 1, 1)]


@pytest.mark.parametrize("programs", [1, 2, 7])
@DIRECTIONS
def test_programs_that_do_several_jobs(monkeypatch, launched, save, programs):
    """Jobs out of range in between, at both ends, and as all that one program has."""
    for name in ("MOST_PROGRAMS", "HOST_PROGRAMS"):
        monkeypatch.setattr(module, name, programs)
    pages = [-1, 3, INT64_MAX, 2, 8, 1, INT64_MIN, 0, 4]
    blocks = [0, 1, 2, INT64_MIN, 3, 4, 5, BLOCKS, 5]
    check(build(save), copy_pages, save, pages, blocks)
    check(build(save), copy_pages, save, [-1, 1] * 2, [0, 2, 1, INT64_MAX])
    check(build(save, PagesCase(((1_728, 3),), BLOCKS, [2], [4])), copy_pages, save)
    assert launched[0].grids + launched[1].grids == [(programs, 1, 1), (programs, 1, 1), (1, 1, 1)]


def test_stores_to_host_memory_have_a_bound_of_their_own(monkeypatch, launched):
    near, far = launched
    monkeypatch.setattr(module, "HOST_PROGRAMS", 3)
    pages, blocks = [4, -1, 0, INT64_MIN, 2], [0, 1, BLOCKS, 3, 5]
    check(to_host(build(True)), copy_pages, True, pages, blocks)
    assert (near.grids, far.grids) == ([], [(3, 1, 1)])
    loaded = build(False)
    check(to_host(loaded), copy_pages, False, pages, blocks)
    assert (near.grids, far.grids[1:]) == ([(len(loaded.table.chunks) * len(pages), 1, 1)], [])
