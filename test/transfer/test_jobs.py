"""describe against word-by-word arithmetic over published sizes."""

from __future__ import annotations

import numpy as np
import pytest
from builders import Served, served

from sglang_dsv4.transfer.jobs import Jobs, describe

pytestmark = pytest.mark.cpu

BLOCKS, COPIES = 12, 3
# family: (layers, first row buffer, device page bytes, first byte in the host block, bytes of a host slot,
#          planes as (device offset, host offset, bytes a row)); ratios (0, 4, 128, 4), rings 8 and 128
FAMILIES = {
    "swa_kv": (4, 0, 149_760, 0, 74_752, [(0, 0, 576), (147_456, 73_728, 8)]),
    "c4_state": (2, 4, 65_536, 299_008, 65_536, [(0, 0, 8_192)]),
    "c4_indexer_state": (2, 6, 16_384, 430_080, 16_384, [(0, 0, 2_048)]),
    "c128_state": (1, 8, 524_288, 0, 524_288, [(0, 0, 4_096)]),
}
BLOCK, WINDOW, REQUEST = 94_208, 462_848, 524_288
REGION = {"window": BLOCKS * BLOCK, "request": BLOCKS * BLOCK + COPIES * WINDOW}


@pytest.fixture(scope="module")
def world() -> Served:
    return served(blocks=BLOCKS, copies=COPIES, pages=12, swa_pages=9)


def words_of(jobs: Jobs) -> np.ndarray:
    """Every 8-byte word that moves: (buffer, device word, host word), in order."""
    found = []
    for buffer, device, host, nbytes in jobs.items.tolist():
        assert nbytes > 0
        assert nbytes % 8 == device % 8 == host % 8 == 0
        k = np.arange(nbytes // 8)
        found.append(np.stack([np.full(len(k), buffer), device // 8 + k, host // 8 + k], axis=1))
    table = np.concatenate(found) if found else np.empty((0, 3), np.int64)
    return table[np.lexsort(table.T)]


def expected_words(world: Served, request, blocks: dict[str, int]) -> np.ndarray:
    place = world.place(request)
    n, found = place.tokens, []
    for name, (layers, first, page_bytes, in_block, slot_bytes, planes) in FAMILIES.items():
        start = {"swa_kv": max(0, n - 127), "c128_state": n - n % 128}.get(name, max(0, n - n % 4 - 4))
        for position in range(start, n):
            swa = int(place.swa[position - max(0, n - 127)])
            page, row = swa // 256, swa % (256 if name == "swa_kv" else 8)
            group, stride = "window", WINDOW
            if name == "c128_state":
                page, row, group, stride = request.req_slot, position % 128, "request", REQUEST
            for layer in range(layers):
                base = REGION[group] + blocks[group] * stride + in_block + layer * slot_bytes
                for device, host, width in planes:
                    k = np.arange(width // 8)
                    there = (page * page_bytes + device + row * width) // 8 + k
                    here = (base + host + (position - start) * width) // 8 + k
                    found.append(np.stack([np.full(len(k), first + layer), there, here], axis=1))
    table = np.concatenate(found)
    return table[np.lexsort(table.T)]


@pytest.mark.parametrize("n", [1, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 384, 385, 1000])
def test_words_and_pages(world, n):
    request = world.start(n, slot=3)
    before = world.memory.allocate(100, world.side.geometry)  # so that no block has number 0
    copy = world.memory.allocate(n, world.side.geometry)
    blocks = {group.value: numbers.tolist() for group, numbers in copy.blocks.items()}
    assert blocks["window"] == blocks["request"] == [1]
    jobs = describe(world.side, copy, world.plan(request))
    assert jobs.pages.tolist() == [int(request.slots[p]) // 256 for p in range(0, n, 256)]
    assert jobs.blocks.tolist() == blocks["block"]
    wanted = expected_words(world, request, {group: numbers[0] for group, numbers in blocks.items()})
    found = words_of(jobs)
    assert np.array_equal(found, wanted)
    assert len(np.unique(found[:, :2], axis=0)) == len(found), "a device word twice"
    assert len(np.unique(found[:, 2])) == len(found), "a host word twice"
    assert jobs.items.flags["C_CONTIGUOUS"]
    assert jobs.items.dtype == jobs.pages.dtype == jobs.blocks.dtype == np.int64
    assert int(jobs.items[:, 3].max()) <= 32_768
    copy.release()
    before.release()
    world.allocator.free(request.slots)


def test_the_number_of_items_does_not_grow_with_the_tokens(world):
    """The window and the pending block are bounded, so a long request has no more items than a short one."""
    sizes = []
    for n in (511, 2047):
        request = world.start(n, slot=1)
        copy = world.memory.allocate(n, world.side.geometry)
        sizes.append(len(describe(world.side, copy, world.plan(request)).items))
        copy.release()
        world.allocator.free(request.slots)
    assert sizes[0] == sizes[1]


def test_a_stage_without_token_blocks():
    world = served((0, 0), blocks=0, copies=2)
    request = world.start(300, slot=1)
    copy = world.memory.allocate(300, world.side.geometry)
    jobs = describe(world.side, copy, world.plan(request))
    assert len(jobs.pages) == len(jobs.blocks) == 0
    assert set(jobs.items[:, 0].tolist()) == {0, 1}
    assert int(jobs.items[:, 3].sum()) == 2 * 127 * 584
    copy.release()
