"""Row templates move the words that plain arithmetic gives, at every length of the grid."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from builders import Served, served

from sglang_dsv4.cache.family import Group
from sglang_dsv4.transfer.templates import RowImage, RowTemplates
from triton_ops.copy_rows import EMPTY, FIELDS, HOST_OFFSET

RATIOS = (0, 4, 128, 4, 128)
BLOCKS, COPIES = 12, 3
LENGTHS = (0, 1, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 385, 511, 512, 513, 1_000, 4_097, 65_536 + 130)
PAGES = (3, 9, 7)  # the slot, and the window's SWA pages


@pytest.fixture(scope="module", params=["v4", "with pairs"])
def world(request) -> Served:
    """The second has two request families, whose pending rows differ in number."""
    pairs = {} if request.param == "v4" else {"sources": (5, 6)}
    ratios = (*RATIOS, 2, 1) if pairs else RATIOS
    return served(ratios, blocks=BLOCKS, copies=COPIES, pages=12, swa_pages=9, **pairs)


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


def expected_words(world: Served, n: int) -> np.ndarray:
    """One token and one layer at a time; the window's first page is SWA page 9, its second 7."""
    found, first = [], 0
    for family in (f for f in world.side.families if f.layers and f.group is not Group.PAGED):
        packed, live = world.memory.regions[family.group].packed, family.live_from(n)
        turns = len(family.layers) if family.group is Group.REQUEST else 1  # row by row, the layers in turn
        for position, layer in itertools.product(range(live, n), range(len(family.layers))):
            page = PAGES[0 if family.group is Group.REQUEST else 1 + position // 256 - max(0, n - 127) // 256]
            at = page * family.page_bytes, image(world)[family.group] + packed.slot_offset(family, layer)
            for plane, on_host in zip(family.planes, family.host_planes, strict=True):
                k, row = np.arange(plane.row_bytes // 8), position % 256 % family.rows
                there = (at[0] + plane.offset + row * plane.row_bytes) // 8 + k
                here = (at[1] + on_host.offset + (position - live) * turns * plane.row_bytes) // 8 + k
                found.append(np.stack([np.full(len(k), first + layer), there, here], axis=1))
        first += len(family.layers)
    return ordered(found)


def image(world: Served) -> dict[Group, int]:
    """Where a group's block starts in the row image."""
    return {Group.WINDOW: 0, Group.REQUEST: world.memory.regions[Group.WINDOW].packed.block_stride}


@pytest.mark.parametrize("n", LENGTHS)
def test_every_word_that_moves(world, templates, n):
    wanted = expected_words(world, n)
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
def test_a_load_resets_the_rows_of_the_rings_that_it_does_not_write(world, templates, n):
    resets = [s for s in placed(templates.of(n, save=False)) if s["host_offset"] == EMPTY]
    for family in (f for f in world.side.families if f.layers and f.group is Group.REQUEST):
        rows, first = [], world.side.first_row_buffer[family.name]
        for s in (s for s in resets if s["first"] == first):
            assert (s["layers"], s["row_bytes"]) == (len(family.layers), family.row_bytes)
            at = (s["device_offset"] - PAGES[0] * family.page_bytes) // family.row_bytes
            rows += range(at, at + s["rows"])
        live = {p % family.rows for p in range(family.live_from(n), n)}
        assert rows == [row for row in range(family.rows) if row not in live]


@pytest.mark.parametrize("n", [0, 1, 127, 128, 300])
def test_the_runs_of_an_image_hold_what_lives(world, templates, n):
    """Of the request block the pending rows alone; in the arena, blocks other than the first."""
    before = world.memory.allocate(100, world.side.geometry)
    copy = world.memory.allocate(n, world.side.geometry)
    runs = RowImage(world.memory).runs(copy)
    starts = {
        world.memory.regions[group].start + world.memory.regions[group].packed.block_stride - start
        for group, start in image(world).items()
    }
    assert {arena - start for arena, start, _ in runs} <= starts, "another copy's block"
    pending = sum(nbytes for _, start, nbytes in runs if start >= image(world)[Group.REQUEST])
    requests = [f for f in world.side.families if f.group is Group.REQUEST]
    assert pending == sum(f.moved_bytes(world.side.geometry.page_size, n) for f in requests)
    touched = 8 * words_of(placed(templates.of(n, save=True)))[:, 2]
    held = np.zeros(len(touched), bool)
    for _, start, nbytes in runs:
        held |= (touched >= start) & (touched + 8 <= start + nbytes)
    assert bool(held.all())
    copy.release()
    before.release()
