"""copy_rows and its torch twin against a byte-by-byte loop; all memory is compared, guards included."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from builders import DEVICE, GUARD, INT64_MAX, INT64_MIN, Counted, Guarded, assert_bytes, needs_cuda
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_ops import copy_rows as module
from triton_ops.copy_rows import CHUNK_BYTES, copy_rows, copy_rows_torch
from triton_ops.tables import BufferTable

pytestmark = pytest.mark.cpu

OPS = pytest.mark.parametrize("op", [copy_rows, copy_rows_torch])
DIRECTIONS = pytest.mark.parametrize("save", [True, False], ids=["save", "load"])
# (row or page bytes, how many): c4 state, c4 indexer state, c128 state, a kv page, and a tiny one
SHAPES = ((8_192, 9), (2_048, 17), (4_096, 5), (37_440, 1), (16, 1))
HOST_BYTES = 96_000
Item = tuple[int, int, int, int]


@dataclass
class World:
    buffers: list[Guarded]
    host: Guarded
    table: BufferTable

    def read(self) -> tuple[list[bytearray], bytearray]:
        return [buffer.read() for buffer in self.buffers], self.host.read()


def build(save: bool, shapes=SHAPES, host_bytes: int = HOST_BYTES, device: str = DEVICE) -> World:
    """Random source, poisoned destination."""
    buffers = [Guarded(width * count, device) for width, count in shapes]
    host = Guarded(host_bytes, "cpu", pin=device == "cuda")
    for number, buffer in enumerate(buffers):
        buffer.noise(number) if save else buffer.poison()
    host.poison() if save else host.noise(99)
    views = [b.inner.view(count, width) for b, (width, count) in zip(buffers, shapes, strict=True)]
    return World(buffers, host, BufferTable.of(views))


def table_of(items: list[Item]) -> torch.Tensor:
    tensor = torch.tensor(items, dtype=torch.int64).reshape(-1, 4)
    return tensor.pin_memory() if DEVICE == "cuda" else tensor


def expect(world: World, items: list[Item], save: bool) -> tuple[list[bytearray], bytearray]:
    devices, host = world.read()
    for number, there, here, nbytes in items:
        if not 0 <= number < len(devices) or nbytes < 0:
            continue
        if not 0 <= there <= there + nbytes <= len(devices[number]) - 2 * GUARD:
            continue
        if not 0 <= here <= here + nbytes <= len(host) - 2 * GUARD:
            continue
        device = devices[number]
        for k in range(GUARD, GUARD + nbytes):
            if save:
                host[here + k] = device[there + k]
            else:
                device[there + k] = host[here + k]
    return devices, host


def check(world: World, op, items: list[Item], save: bool) -> None:
    before = world.read()
    wanted = expect(world, items, save)
    op(world.table, world.host.inner, table_of(items), save)
    found = world.read()
    for number, (want, have) in enumerate(zip(wanted[0], found[0], strict=True)):
        assert_bytes(f"buffer {number}", want, have)
    assert_bytes("host", wanted[1], found[1])
    unchanged = found[0] == before[0] if save else found[1] == before[1]
    assert unchanged, "the source changed"


@OPS
@DIRECTIONS
@pytest.mark.parametrize(
    "items",
    [
        [(0, 0, 0, 8)],
        [(4, 8, 95_992, 8)],
        [(0, 9 * 8_192 - 8, 8, 8)],
        [(0, 8_192, 4_096, 8_192 + 8), (1, 2_048 * 3, 64, 2_048), (2, 0, 40_000, 4_096 * 3)],
        [(3, 0, 50_000, 37_440), (4, 0, 48, 16), (3, 0, 0, 0)],
        [(0, 16, 24, CHUNK_BYTES), (0, 16 + CHUNK_BYTES, 24 + CHUNK_BYTES, CHUNK_BYTES)],
        [(0, 8, 16, 2 * CHUNK_BYTES + 8)],
        [(1, row * 2_048 + 8, 3_000 + k * 40, 24) for k, row in enumerate((16, 2, 9, 0, 5, 11))],
    ],
    ids=["first", "last", "row end", "three", "whole buffers", "chunks", "long", "scattered"],
)
def test_runs_land_where_they_belong_and_nowhere_else(op, save, items):
    check(build(save), op, items, save)


def test_the_check_itself_can_fail():
    def short(table, host, items, save):
        items = items.clone()
        items[:, 3] -= 8
        copy_rows_torch(table, host, items, save)

    def swapped(table, host, items, save):
        copy_rows_torch(table, host, items[:, [0, 2, 1, 3]].contiguous(), save)

    for broken in (short, swapped):
        with pytest.raises(AssertionError, match="wanted"):
            check(build(True), broken, [(0, 64, 128, 64)], True)


@OPS
@DIRECTIONS
def test_no_items(op, save):
    check(build(save), op, [], save)


def hostile_items() -> list[Item]:
    """One good item with each field in turn replaced by what no item may hold."""
    size = 9 * 8_192
    bad = {
        0: (INT64_MIN, INT64_MIN + 1, -(2**32), -1, len(SHAPES), 2**31, 2**32, INT64_MAX),
        1: (INT64_MIN, -(2**32), -8, -1, size - 56, size, size + 8, 2**31, 2**62, INT64_MAX - 63, INT64_MAX),
        2: (INT64_MIN, -(2**32), -8, -1, HOST_BYTES - 56, HOST_BYTES, 2**31, 2**62, INT64_MAX - 63, INT64_MAX),
        3: (INT64_MIN, -(2**32), -8, -1, size - 56, HOST_BYTES + 8, 2**31, 2**62, INT64_MAX - 127, INT64_MAX),
    }
    items = []
    for field, values in bad.items():
        for value in values:
            item = [0, 64, 128, 64]
            item[field] = value
            items.append(tuple(item))
    return items


@OPS
@DIRECTIONS
def test_hostile_items_are_skipped(op, save):
    world = build(save)
    before = world.read()
    op(world.table, world.host.inner, table_of(hostile_items()), save)
    assert world.read() == before


@OPS
@DIRECTIONS
def test_fields_that_overflow_together_are_skipped(op, save):
    pairs = (INT64_MIN, -8, INT64_MAX, INT64_MAX - 7)
    items = [(0, there, here, nbytes) for there in pairs for here in pairs for nbytes in pairs]
    world = build(save)
    before = world.read()
    op(world.table, world.host.inner, table_of(items), save)
    assert world.read() == before


@OPS
@DIRECTIONS
def test_good_items_among_hostile_ones_are_copied(op, save):
    items = hostile_items()
    items[7:7] = [(0, 64, 128, 64)]
    items.append((1, 0, 1_024, 2_048))
    check(build(save), op, items, save)


@OPS
@pytest.mark.parametrize(
    "items",
    [
        torch.zeros(2, 4, dtype=torch.int32),
        torch.zeros(2, 4, dtype=torch.float64),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(8, dtype=torch.int64),
        torch.zeros(2, 8, dtype=torch.int64)[:, ::2],
        torch.zeros(4, 2, dtype=torch.int64).T,
    ],
)
def test_bad_items_are_refused(op, items):
    world = build(True)
    before = world.read()
    with pytest.raises(TypeError, match="items must be"):
        op(world.table, world.host.inner, items, True)
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
        copy_rows(world.table, bad(world.host.inner), table_of([(0, 0, 0, 8)]), True)
    assert world.read() == before


def test_a_buffer_without_pages_has_nothing_inside():
    generator = torch.Generator().manual_seed(1)
    full = torch.randint(0, 256, (2, 32), dtype=torch.uint8, generator=generator).to(DEVICE)
    table = BufferTable.of([full, torch.empty(0, 32, dtype=torch.uint8, device=DEVICE)])
    host = torch.zeros(64, dtype=torch.uint8)
    host = host.pin_memory() if DEVICE == "cuda" else host
    copy_rows(table, host, table_of([(1, 0, 0, 8), (0, 32, 8, 16)]), True)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert host.tolist() == [0] * 8 + full.view(-1)[32:48].tolist() + [0] * 40


@pytest.mark.parametrize("buffers", [3, 30])
def test_one_launch_whatever_the_buffers(monkeypatch, buffers):
    counted = Counted(module._copy_rows_kernel)
    monkeypatch.setattr(module, "_copy_rows_kernel", counted)
    items = [(number, 64, 32 * number, 32) for number in range(buffers)]
    check(build(True, ((64, 3),) * buffers), copy_rows, items, True)
    assert counted.grids == [(buffers,)]


SLOT = 512
NUMBERS = st.one_of(st.sampled_from((INT64_MIN, -1, 2, INT64_MAX)), *[st.integers(0, 1)] * 3)
HOSTILE = st.sampled_from((INT64_MIN, -8, INT64_MAX))
OFFSETS = st.one_of(HOSTILE, *[st.integers(0, 31).map(lambda k: 8 * k)] * 6)
LENGTHS = st.one_of(HOSTILE, *[st.integers(0, 32).map(lambda k: 8 * k)] * 6)


@DIRECTIONS
@settings(max_examples=25, deadline=None)
@given(fields=st.lists(st.tuples(NUMBERS, OFFSETS, OFFSETS, LENGTHS), max_size=10), seed=st.integers(0, 2**32))
def test_any_items_as_the_loop_does_it(save, fields, seed):
    """Each item stays in slots of its own, on both sides, unless a field is hostile."""
    generator = torch.Generator().manual_seed(seed)
    order = [torch.randperm(12, generator=generator).tolist() for _ in range(2)]
    items = []
    for k, (number, there, here, nbytes) in enumerate(fields):
        own = [at + SLOT * order[side][k] if 0 <= at < SLOT else at for side, at in enumerate((there, here))]
        items.append((number, *own, nbytes))
    check(build(save, ((SLOT, 11), (SLOT, 10)), SLOT * 11), copy_rows, items, save)


@needs_cuda
@pytest.mark.gpu
@DIRECTIONS
def test_compiled_kernel_on_pinned_memory(save):
    world = build(save, ((8_192, 65), (2_048, 65), (4_096, 257), (149_760, 4)) * 3, 1 << 20, "cuda")
    # The hostile items were made for a smaller world: keep those that leave any.
    items, host = [i for i in hostile_items() if min(i) < 0 or max(i) >= 2**31], 4_096
    for number, (width, count) in enumerate(((8_192, 65), (2_048, 65), (4_096, 257), (149_760, 4)) * 3):
        for row in range(0, min(count, 9), 3):
            nbytes = min(width, CHUNK_BYTES) - 8 * row
            items.append((number, row * width + 8 * row, host, nbytes))
            host += nbytes + 8
    assert host < 1 << 20
    check(world, copy_rows, items, save)
