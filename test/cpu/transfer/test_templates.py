"""Row templates against word-by-word arithmetic over published sizes, at every length of the grid."""

from __future__ import annotations

import numpy as np
import pytest
from builders import Served, served

from sglang_dsv4.transfer.templates import RowImage, RowTemplates
from triton_ops.copy_rows import EMPTY, FIELDS, HOST_OFFSET

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
LENGTHS = (0, 1, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 385, 511, 512, 513, 1_000, 4_097, 65_536 + 130)
PAGES = (3, 9, 7)  # the slot, and the window's SWA pages


@pytest.fixture(scope="module")
def world() -> Served:
    return served(RATIOS, blocks=BLOCKS, copies=COPIES, pages=12, swa_pages=9)


@pytest.fixture(scope="module")
def templates(world) -> RowTemplates:
    return RowTemplates(world.side, world.memory)


def placed(template) -> list[dict[str, int]]:
    """The segments, their device offsets counted in the buffer."""
    found = []
    for row in template.segments.tolist():
        segment = dict(zip(FIELDS, row, strict=True))
        segment["device_offset"] += PAGES[segment.pop("follows")] * segment.pop("page_bytes")
        found.append(segment)
    return found


def words_of(segments: list[dict[str, int]]) -> np.ndarray:
    """Every 8-byte word that moves: (buffer, device word, host word), in order. What is reset does not move."""
    found = []
    for s in segments:
        if s["host_offset"] == EMPTY:
            continue
        k = np.arange(s["row_bytes"] // 8)
        for layer in range(s["layers"]):
            for row in range(s["rows"]):
                there = (s["device_offset"] + row * s["row_bytes"]) // 8 + k
                here = (s["host_offset"] + layer * s["layer_stride"] + row * s["row_stride"]) // 8 + k
                found.append(np.stack([np.full(len(k), s["first"] + layer), there, here], axis=1))
    return ordered(found)


def ordered(found: list[np.ndarray]) -> np.ndarray:
    table = np.concatenate(found) if found else np.empty((0, 3), np.int64)
    return table[np.lexsort(table.T)]


def first_live(name: str, n: int) -> int:
    return {"swa_kv": max(0, n - 127), "c128_state": n - n % 128}.get(name, max(0, n - n % 4 - 4))


def expected_words(n: int) -> np.ndarray:
    """One token and one layer at a time; the window's first page is SWA page 9, its second 7."""
    found = []
    for name, (layers, first, page_bytes, in_block, layer_stride, planes) in FAMILIES.items():
        start = first_live(name, n)
        for position in range(start, n):
            page = PAGES[1 + position // 256 - max(0, n - 127) // 256]
            row, group = position % 256 % (256 if name == "swa_kv" else 8), "window"
            if name == "c128_state":
                page, row, group = PAGES[0], position % 128, "request"
            for layer in range(layers):
                base = IMAGE[group] + in_block + layer * layer_stride
                for device, host, width, pitch in planes:
                    k = np.arange(width // 8)
                    there = (page * page_bytes + device + row * width) // 8 + k
                    here = (base + host + (position - start) * pitch) // 8 + k
                    found.append(np.stack([np.full(len(k), first + layer), there, here], axis=1))
    return ordered(found)


@pytest.mark.parametrize("n", LENGTHS)
def test_every_word_that_moves(templates, n):
    wanted = expected_words(n)
    assert len(np.unique(wanted[:, 0] << 40 | wanted[:, 1])) == len(wanted), "a device word twice"
    assert len(np.unique(wanted[:, 2])) == len(wanted), "a host word twice"
    for save in (True, False):
        template = templates.of(n, save)
        assert np.array_equal(words_of(placed(template)), wanted)
        table = template.segments
        for segment in placed(template):
            assert segment["layers"] <= template.most_layers
            assert segment["rows"] * segment["row_bytes"] <= template.most_bytes
        assert bool((table[:, HOST_OFFSET] == EMPTY).any()) != save


@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 300, 511])
def test_a_load_resets_the_rows_of_the_ring_that_it_does_not_write(templates, n):
    resets = [s for s in placed(templates.of(n, save=False)) if s["host_offset"] == EMPTY]
    rows = []
    for s in resets:
        assert (s["first"], s["layers"], s["row_bytes"]) == (9, 2, 4_096)
        at = (s["device_offset"] - PAGES[0] * 524_288) // 4_096
        rows += range(at, at + s["rows"])
    assert rows == [row for row in range(128) if row not in {p % 128 for p in range(n - n % 128, n)}]


@pytest.mark.parametrize("n", [0, 1, 127, 128, 300])
def test_the_runs_of_an_image_hold_what_lives(world, templates, n):
    """Of the request block the pending rows alone; in the arena, blocks other than the first."""
    before = world.memory.allocate(100, world.side.geometry)
    copy = world.memory.allocate(n, world.side.geometry)
    starts = {"window": REGION["window"] + WINDOW, "request": REGION["request"] + REQUEST}
    groups = [group for group, live in (("window", n), ("request", n % 128)) if live]
    image = RowImage(world.memory)
    runs = image.runs(copy)
    assert [run[:2] for run in runs] == [(starts[group], IMAGE[group]) for group in groups]
    sizes = dict(zip(groups, (run[2] for run in runs), strict=True))
    assert sizes.get("request", 0) == (n % 128) * 2 * 4_096
    assert sizes.get("window", 0) <= WINDOW
    assert image.nbytes == WINDOW + REQUEST
    touched = 8 * words_of(placed(templates.of(n, save=True)))[:, 2]
    held = np.zeros(len(touched), bool)
    for _, start, nbytes in runs:
        held |= (touched >= start) & (touched + 8 <= start + nbytes)
    assert bool(held.all())
    copy.release()
    before.release()
