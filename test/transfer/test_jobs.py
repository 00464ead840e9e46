"""describe against word-by-word arithmetic over published sizes."""

from __future__ import annotations

import numpy as np
import pytest
from builders import Served, served

from sglang_dsv4.transfer.jobs import Jobs, describe, image_bytes

pytestmark = pytest.mark.cpu

RATIOS = (0, 4, 128, 4, 128)
BLOCKS, COPIES = 12, 3
# family: (layers, first row buffer, device page bytes, first byte in the host block, bytes from layer to layer,
#          planes as (device offset, host offset, bytes a row, bytes from row to row on the host)); rings 8 and 128
FAMILIES = {
    "swa_kv": (5, 0, 149_760, 0, 74_752, [(0, 0, 576, 576), (147_456, 73_728, 8, 8)]),
    "c4_state": (2, 5, 65_536, 373_760, 65_536, [(0, 0, 8_192, 8_192)]),
    "c4_indexer_state": (2, 7, 16_384, 504_832, 16_384, [(0, 0, 2_048, 2_048)]),
    "c128_state": (2, 9, 524_288, 0, 4_096, [(0, 0, 4_096, 8_192)]),  # row by row, the two layers in turn
}
BLOCK, WINDOW, REQUEST = 98_304, 540_672, 1_048_576
REGION = {"window": BLOCKS * BLOCK, "request": BLOCKS * BLOCK + COPIES * WINDOW}
IMAGE = {"window": 0, "request": WINDOW}


@pytest.fixture(scope="module")
def world() -> Served:
    return served(RATIOS, blocks=BLOCKS, copies=COPIES, pages=12, swa_pages=9)


def words_of(segments: np.ndarray) -> np.ndarray:
    """Every 8-byte word that moves: (buffer, device word, host word), in order."""
    found = []
    for first, layers, device, host, layer_stride, rows, row_bytes, row_stride in segments.tolist():
        assert min(layers, rows, row_bytes) > 0
        assert row_bytes % 8 == device % 8 == host % 8 == layer_stride % 8 == row_stride % 8 == 0
        k = np.arange(row_bytes // 8)
        for layer in range(layers):
            for row in range(rows):
                there = (device + row * row_bytes) // 8 + k
                here = (host + layer * layer_stride + row * row_stride) // 8 + k
                found.append(np.stack([np.full(len(k), first + layer), there, here], axis=1))
    return ordered(found)


def ordered(found: list[np.ndarray]) -> np.ndarray:
    table = np.concatenate(found) if found else np.empty((0, 3), np.int64)
    return table[np.lexsort(table.T)]


def first_live(name: str, n: int) -> int:
    return {"swa_kv": max(0, n - 127), "c128_state": n - n % 128}.get(name, max(0, n - n % 4 - 4))


def expected_words(world: Served, request, starts: dict[str, int]) -> np.ndarray:
    """One token and one layer at a time; ``starts``: where the window and the request block begin."""
    place = world.place(request)
    n, found = place.tokens, []
    for name, (layers, first, page_bytes, in_block, layer_stride, planes) in FAMILIES.items():
        start = first_live(name, n)
        for position in range(start, n):
            swa = int(place.swa[position - max(0, n - 127)])
            page, row, group = swa // 256, swa % (256 if name == "swa_kv" else 8), "window"
            if name == "c128_state":
                page, row, group = request.req_slot, position % 128, "request"
            for layer in range(layers):
                base = starts[group] + in_block + layer * layer_stride
                for device, host, width, pitch in planes:
                    k = np.arange(width // 8)
                    there = (page * page_bytes + device + row * width) // 8 + k
                    here = (base + host + (position - start) * pitch) // 8 + k
                    found.append(np.stack([np.full(len(k), first + layer), there, here], axis=1))
    return ordered(found)


def check_image(jobs: Jobs, n: int, starts: dict[str, int]) -> None:
    """The runs of ``jobs.image`` hold every word of the rows, and of the request block only pending rows."""
    groups = ["window", "request"] if n % 128 else ["window"]
    assert [(arena, image) for arena, image, _ in jobs.image] == [(starts[group], IMAGE[group]) for group in groups]
    live = {group: nbytes for group, (_, _, nbytes) in zip(groups, jobs.image, strict=True)}
    assert 0 < live["window"] <= WINDOW
    assert live.get("request", 0) == (n % 128) * 2 * 4_096
    for segments, column in ((jobs.rows_in_arena(), 0), (jobs.rows, 1)):
        touched = 8 * words_of(segments)[:, 2]
        held = np.zeros(len(touched), bool)
        for run in jobs.image:
            held |= (touched >= run[column]) & (touched + 8 <= run[column] + run[2])
        assert bool(held.all())


@pytest.mark.parametrize("n", [1, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 384, 385, 1000])
def test_words_and_pages(world, n):
    request = world.start(n, slot=3)
    before = world.memory.allocate(100, world.side.geometry)  # so that no block has number 0
    copy = world.memory.allocate(n, world.side.geometry)
    try:
        blocks = {group.value: numbers.tolist() for group, numbers in copy.blocks.items()}
        assert blocks["window"] == blocks["request"] == [1]
        jobs = describe(world.side, copy, world.plan(request))
        assert jobs.pages.tolist() == [int(request.slots[p]) // 256 for p in range(0, n, 256)]
        assert jobs.blocks.tolist() == blocks["block"]
        starts = {"window": REGION["window"] + WINDOW, "request": REGION["request"] + REQUEST}
        found = words_of(jobs.rows_in_arena())
        assert np.array_equal(found, expected_words(world, request, starts))
        assert len(np.unique(found[:, :2], axis=0)) == len(found), "a device word twice"
        assert len(np.unique(found[:, 2])) == len(found), "a host word twice"
        assert np.array_equal(words_of(jobs.rows), expected_words(world, request, IMAGE))
        check_image(jobs, n, starts)
        assert jobs.rows.shape[1] == 8
        assert jobs.rows.flags["C_CONTIGUOUS"]
        assert jobs.rows_in_arena().flags["C_CONTIGUOUS"]
        assert jobs.rows.dtype == jobs.pages.dtype == jobs.blocks.dtype == np.int64
        assert jobs.most_layers == int(jobs.rows[:, 1].max()) == 5
        assert jobs.most_bytes == int((jobs.rows[:, 5] * jobs.rows[:, 6]).max())
    finally:
        copy.release()
        before.release()
        world.allocator.free(request.slots)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 2), (2, 0), (1, 1), (2, 2)])
def test_rows_follow_the_blocks_of_their_copy(world, first, second):
    """Window and request block of different numbers, the first and the last of their regions too."""
    request = world.start(200, slot=0)
    copy = world.memory.allocate(200, world.side.geometry)
    numbers = {group: blocks.copy() for group, blocks in copy.lease.blocks.items()}
    try:
        for group, number in zip(("window", "request"), (first, second), strict=True):
            copy.lease.blocks[group][:] = number
        starts = {"window": REGION["window"] + first * WINDOW, "request": REGION["request"] + second * REQUEST}
        jobs = describe(world.side, copy, world.plan(request))
        assert np.array_equal(words_of(jobs.rows_in_arena()), expected_words(world, request, starts))
        assert np.array_equal(words_of(jobs.rows), expected_words(world, request, IMAGE))
        check_image(jobs, 200, starts)
    finally:
        copy.lease.blocks.update(numbers)
        copy.release()
        world.allocator.free(request.slots)


def test_the_size_of_a_row_image(world):
    assert image_bytes(world.memory) == WINDOW + REQUEST


def test_no_rows(world):
    copy = world.memory.allocate(0, world.side.geometry)
    jobs = describe(world.side, copy, ())
    assert jobs.rows.shape == jobs.rows_in_arena().shape == (0, 8)
    assert (len(jobs.pages), len(jobs.blocks), jobs.most_layers, jobs.most_bytes, jobs.image) == (0, 0, 0, 0, ())
    copy.release()


def test_the_number_of_segments_does_not_grow_with_the_tokens(world):
    """The window and the pending block are bounded, so a long request has no more segments than a short one."""
    sizes = []
    for n in (511, 2047):
        request = world.start(n, slot=1)
        copy = world.memory.allocate(n, world.side.geometry)
        sizes.append(len(describe(world.side, copy, world.plan(request)).rows))
        copy.release()
        world.allocator.free(request.slots)
    assert sizes[0] == sizes[1]


def test_the_number_of_segments_does_not_grow_with_the_layers():
    sizes = []
    for repeat in (1, 4):
        world = served((0, 4, 128) * repeat, blocks=2, copies=1, pages=3, swa_pages=3, requests=1)
        request = world.start(300, slot=0)
        copy = world.memory.allocate(300, world.side.geometry)
        jobs = describe(world.side, copy, world.plan(request))
        assert jobs.most_layers == 3 * repeat
        sizes.append(len(jobs.rows))
        copy.release()
    assert sizes[0] == sizes[1]


def test_a_stage_without_token_blocks():
    world = served((0, 0), blocks=0, copies=2)
    request = world.start(300, slot=1)
    copy = world.memory.allocate(300, world.side.geometry)
    jobs = describe(world.side, copy, world.plan(request))
    assert len(jobs.pages) == len(jobs.blocks) == 0
    words = words_of(jobs.rows_in_arena())
    assert set(words[:, 0].tolist()) == {0, 1}
    assert 8 * len(words) == 2 * 127 * 584
    assert [(arena, image) for arena, image, _ in jobs.image] == [(0, 0)]
    copy.release()
