"""copy_pages and its torch twin against a byte-by-byte loop; all memory is compared, guards included."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from builders import DEVICE, GUARD, INT64_MAX, INT64_MIN, Guarded, assert_bytes, count_launches, int64, needs_cuda

from triton_ops import copy_pages as module
from triton_ops.copy_pages import PageTable, copy_pages, copy_pages_torch

OPS = pytest.mark.parametrize("op", [copy_pages, copy_pages_torch])
DIRECTIONS = pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
# (page bytes, pages): c4 kv, indexer, c128 kv, and one whose pages are the most
SHAPES = ((37_440, 5), (8_448, 6), (1_728, 7), (1_728, 9))
BLOCKS = 6
PAGES = min(count for _, count in SHAPES)


@dataclass
class World:
    buffers: list[Guarded]
    shapes: tuple[tuple[int, int], ...]
    host: Guarded
    offsets: list[int]
    stride: int
    table: PageTable

    @property
    def memory(self) -> torch.Tensor:
        return self.host.inner

    def read(self) -> tuple[list[bytearray], bytearray]:
        return [buffer.read() for buffer in self.buffers], self.host.read()


def build(save: bool, shapes=SHAPES, blocks: int = BLOCKS, device: str = DEVICE, slack: int = 48) -> World:
    """Random source, poisoned destination. ``slack``: bytes behind the last whole block."""
    offsets, end = [], 256
    for width, _ in shapes:
        offsets.append(end)
        end += width + 64
    stride = -(-end // 4096) * 4096
    assert max(stride, *(width for width, _ in shapes)) <= GUARD or device == "cuda"
    buffers = [Guarded(width * count, device) for width, count in shapes]
    host = Guarded(blocks * stride + slack, "cpu", pin=device == "cuda")
    for number, buffer in enumerate(buffers):
        buffer.noise(number) if save else buffer.poison()
    host.poison() if save else host.noise(99)
    views = [b.inner.view(count, width) for b, (width, count) in zip(buffers, shapes, strict=True)]
    return World(buffers, shapes, host, offsets, stride, PageTable.of(views, offsets, stride))


def expect(world: World, pages: list[int], blocks: list[int], save: bool) -> tuple[list[bytearray], bytearray]:
    """What all memory must hold afterwards: one page at a time, in plain Python."""
    devices, host = world.read()
    block_count = (len(host) - 2 * GUARD) // world.stride
    for page, block in zip(pages, blocks, strict=True):
        for number, (width, count) in enumerate(world.shapes):
            if not (0 <= page < count and 0 <= block < block_count):
                continue
            there = GUARD + page * width
            here = GUARD + block * world.stride + world.offsets[number]
            if save:
                host[here : here + width] = devices[number][there : there + width]
            else:
                devices[number][there : there + width] = host[here : here + width]
    return devices, host


def check(world: World, op, pages: list[int], blocks: list[int], save: bool) -> None:
    before = world.read()
    wanted = expect(world, pages, blocks, save)
    op(world.table, world.memory, int64(pages), int64(blocks), save)
    found = world.read()
    for number, (want, have) in enumerate(zip(wanted[0], found[0], strict=True)):
        assert_bytes(f"buffer {number}", want, have)
    assert_bytes("host", wanted[1], found[1])
    unchanged = found[0] == before[0] if save else found[1] == before[1]
    assert unchanged, "the source changed"


def assert_untouched(world: World, before) -> None:
    assert world.read() == before


@OPS
@DIRECTIONS
@pytest.mark.parametrize(
    ("pages", "blocks"),
    [
        ([0], [0]),
        ([PAGES - 1], [BLOCKS - 1]),
        ([3, 0, 4, 1], [5, 2, 0, 3]),
        ([4, 3, 2, 1, 0], [0, 1, 2, 3, 4]),
    ],
)
def test_pages_land_where_they_belong_and_nowhere_else(op, save, pages, blocks):
    check(build(save), op, pages, blocks, save)


def test_the_check_itself_can_fail():
    def forgetful(table, host, pages, blocks, save):
        copy_pages_torch(table, host, pages[:-1], blocks[:-1], save)

    def spilling(table, host, pages, blocks, save):
        copy_pages_torch(table, host, pages, blocks, save)
        host[-1] += 1

    for broken in (forgetful, spilling):
        with pytest.raises(AssertionError, match="wanted"):
            check(build(True), broken, [0, 1], [1, 0], True)


@DIRECTIONS
def test_one_buffer_and_many_buffers_of_one_width(save):
    for shapes in (((37_440, 2),), ((1_728, 3),) * 7):
        check(build(save, shapes), copy_pages, [1, 0], [4, 2], save)


def test_save_and_load_back_to_other_pages():
    world = build(save=True)
    source = [buffer.inner.clone() for buffer in world.buffers]
    copy_pages(world.table, world.memory, int64([0, 2]), int64([4, 1]), True)
    for buffer in world.buffers:
        buffer.poison()
    copy_pages(world.table, world.memory, int64([3, 1]), int64([4, 1]), False)
    for buffer, before, (width, count) in zip(world.buffers, source, SHAPES, strict=True):
        now, old = buffer.inner.view(count, width), before.view(count, width)
        assert torch.equal(now[3], old[0])
        assert torch.equal(now[1], old[2])


HOSTILE_PAGES = (INT64_MIN, INT64_MIN + 1, -(2**32), -1, max(c for _, c in SHAPES), 2**31, 2**32, INT64_MAX)
HOSTILE_BLOCKS = (INT64_MIN, INT64_MIN + 1, -(2**32), -1, BLOCKS, 2**31, 2**32, INT64_MAX)


@OPS
@DIRECTIONS
def test_hostile_pages_are_skipped(op, save):
    world = build(save)
    before = world.read()
    op(world.table, world.memory, int64(HOSTILE_PAGES), int64([k % BLOCKS for k in range(8)]), save)
    assert_untouched(world, before)


@OPS
@DIRECTIONS
def test_hostile_blocks_are_skipped(op, save):
    world = build(save)
    before = world.read()
    op(world.table, world.memory, int64([k % PAGES for k in range(8)]), int64(HOSTILE_BLOCKS), save)
    assert_untouched(world, before)


@OPS
@DIRECTIONS
def test_good_items_among_hostile_ones_are_copied(op, save):
    pages = [INT64_MIN, 3, -1, INT64_MAX, 1, 0]
    blocks = [0, 1, 2, 3, INT64_MAX, 5]
    check(build(save), op, pages, blocks, save)


@OPS
@DIRECTIONS
def test_a_page_that_only_some_buffers_have(op, save):
    check(build(save), op, [PAGES, PAGES + 1, 8], [0, 3, 2], save)


@OPS
@DIRECTIONS
def test_no_items(op, save):
    world = build(save)
    before = world.read()
    op(world.table, world.memory, int64([]), int64([]), save)
    assert_untouched(world, before)


@OPS
@pytest.mark.parametrize(
    ("pages", "blocks", "error", "message"),
    [
        (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), TypeError, "pages"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float32), TypeError, "blocks"),
        (torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), TypeError, "pages"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.int64), TypeError, "blocks"),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), ValueError, "2 pages but 3 blocks"),
    ],
)
def test_bad_indices_are_refused_by_name(op, pages, blocks, error, message):
    world = build(True)
    before = world.read()
    with pytest.raises(error, match=message):
        op(world.table, world.memory, pages, blocks, True)
    assert_untouched(world, before)


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


def test_a_host_offset_for_every_buffer():
    with pytest.raises(ValueError, match="zip"):
        PageTable.of([spare(64).view(2, 32)], [0, 64], 4096)


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
    assert_untouched(world, before)


@DIRECTIONS
def test_strided_indices_are_refused_or_read_right(save):
    world = build(save)
    wanted = expect(world, [3, 1], [4, 0], save)
    try:
        copy_pages(world.table, world.memory, int64([3, 0, 1, 2])[::2], int64([4, 1, 0, 2])[::2], save)
    except (TypeError, ValueError):
        return
    assert world.read() == wanted


def test_a_page_that_leaves_its_block_is_refused():
    with pytest.raises(ValueError, match="stride"):
        PageTable.of([spare(2 * 8_448).view(2, 8_448)], [0], 4096)


@pytest.mark.parametrize(("offset", "stride"), [(8, 4096), (0, 4104), (-16, 4096)])
def test_a_misaligned_host_layout_is_refused(offset, stride):
    with pytest.raises(ValueError, match="16"):
        PageTable.of([spare(64).view(2, 32)], [offset], stride)


# ---------------------------------------------------------------------------------------------- launches


class Elsewhere(torch.Tensor):
    """Memory of the CPU that says it lies on another device than the host side."""

    device = torch.device("meta")


def to_host(world: World) -> World:
    """The same world, saved as from a GPU to host memory."""
    if DEVICE == "cuda":
        return world
    world.table = replace(world.table, chunks=world.table.chunks.as_subclass(Elsewhere))
    return world


@pytest.mark.parametrize("buffers", [3, 30])
@DIRECTIONS
def test_one_launch_whatever_the_buffers(monkeypatch, buffers, save):
    counted = [count_launches(monkeypatch, launcher) for launcher in (module._copy_pages, module._copy_pages_to_host)]
    check(build(save, ((1_728, 3),) * buffers), copy_pages, [2, 0], [1, 3], save)
    assert counted[0].grids + counted[1].grids == [(2 * buffers, 1, 1)]


def test_no_items_are_no_launch(monkeypatch):
    counted = count_launches(monkeypatch, module._copy_pages)
    check(build(False), copy_pages, [], [], False)
    assert counted.grids == []


@pytest.mark.parametrize("programs", [1, 2, 3, 7])
@DIRECTIONS
def test_programs_that_do_several_jobs(monkeypatch, save, programs):
    """Jobs out of range in between, at both ends, and as all that one program has."""
    for name in ("MOST_PROGRAMS", "HOST_PROGRAMS"):
        monkeypatch.setattr(module, name, programs)
    counted = [count_launches(monkeypatch, launcher) for launcher in (module._copy_pages, module._copy_pages_to_host)]
    pages = [-1, 3, INT64_MAX, 2, 8, 1, INT64_MIN, 0, 4]
    blocks = [0, 1, 2, INT64_MIN, 3, 4, 5, BLOCKS, 5]
    check(build(save), copy_pages, pages, blocks, save)
    check(build(save), copy_pages, [-1, 1] * 2, [0, 2, 1, INT64_MAX], save)
    check(build(save, ((1_728, 3),)), copy_pages, [2], [4], save)
    grids = counted[0].grids + counted[1].grids
    assert grids == [(programs, 1, 1), (programs, 1, 1), (1, 1, 1)]


@pytest.mark.parametrize("programs", [1, 2, 3])
def test_stores_to_host_memory_have_a_bound_of_their_own(monkeypatch, programs):
    monkeypatch.setattr(module, "HOST_PROGRAMS", programs)
    near, far = (count_launches(monkeypatch, launcher) for launcher in (module._copy_pages, module._copy_pages_to_host))
    pages, blocks = [4, -1, 0, INT64_MIN, 2], [0, 1, BLOCKS, 3, 5]
    check(to_host(build(True)), copy_pages, pages, blocks, True)
    assert (near.grids, far.grids) == ([], [(programs, 1, 1)])
    loaded = build(False)
    check(to_host(loaded), copy_pages, pages, blocks, False)
    assert (near.grids, far.grids[1:]) == ([(len(loaded.table.chunks) * len(pages), 1, 1)], [])


@needs_cuda
@pytest.mark.gpu
@DIRECTIONS
def test_compiled_kernel_on_pinned_memory(save):
    shapes = ((37_440, 40), (8_448, 40), (1_728, 50)) * 4
    world = build(save, shapes, blocks=33, device="cuda")
    generator = torch.Generator().manual_seed(5)
    pages = [*torch.randperm(40, generator=generator)[:31].tolist(), -1, INT64_MAX]
    check(world, copy_pages, pages, torch.randperm(33, generator=generator).tolist(), save)


@needs_cuda
@pytest.mark.gpu
@DIRECTIONS
@pytest.mark.parametrize("programs", [None, 1, 3])
def test_a_compiled_variant_serves_other_sizes(monkeypatch, save, programs):
    """One page first, then many; indices that are not 16-byte aligned; on the current stream and on a named one."""
    for launcher in (module._copy_pages, module._copy_pages_to_host):
        monkeypatch.setattr(launcher, "_variants", {})
    if programs:
        for name in ("MOST_PROGRAMS", "HOST_PROGRAMS"):
            monkeypatch.setattr(module, name, programs)
    named = torch.cuda.Stream()

    def tail(table, host, pages, blocks, save):
        copy_pages(table, host, pages[1:], blocks[1:], save, named.cuda_stream)

    check(build(save, device="cuda"), copy_pages, [3], [0], save)
    check(build(save, device="cuda"), copy_pages, [3, 0, -1, 1], [5, 2, 0, 3], save)
    check(build(save, ((37_440, 40), (8_448, 40)), 33, "cuda"), copy_pages, [*range(31)], [*range(2, 33)], save)
    check(build(save, device="cuda"), tail, [-1, 4, 2], [0, 5, 1], save)
