"""Row templates move the words that plain arithmetic gives, at every length of the grid."""

from __future__ import annotations

import numpy as np
import pytest
from builders import Served, served

from sglang_dsv4.cache.family import Group
from sglang_dsv4.transfer.templates import RowTemplates
from triton_ops.copy_rows import EMPTY, FIELDS, HOST_OFFSET

RATIOS = (0, 4, 128, 4, 128)
LENGTHS = (0, 1, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 385, 511, 512, 513, 1_000, 4_097, 65_536 + 130)
PAGES = (3, 9, 7)  # the slot, and the window's SWA pages


@pytest.fixture(scope="module", params=["v4", "with pairs"])
def world(request) -> Served:
    """The second has two request families, whose pending rows differ in number."""
    pairs = {} if request.param == "v4" else {"sources": (5, 6)}
    ratios = (*RATIOS, 2, 1) if pairs else RATIOS
    return served(ratios, pages=12, swa_pages=9, **pairs)


@pytest.fixture(scope="module")
def templates(world) -> RowTemplates:
    return RowTemplates(world.side)


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
    """One token and one layer at a time; the window's first page is SWA page 9, its second 7.

    In the tail families begin at multiples of 256, layers at multiples of 128; plane by plane, the live rows alone.
    """
    found, first, at = [], 0, 0
    for family in (f for f in world.side.families if f.layers and f.group is not Group.PAGED):
        at, live = -(-at // 256) * 256, family.live_from(n)
        for layer in range(len(family.layers)):
            at = -(-at // 128) * 128
            for plane in family.planes:
                k = np.arange(plane.row_bytes // 8)
                for position in range(live, n):
                    page = PAGES[0 if family.group is Group.REQUEST else 1 + position // 256 - max(0, n - 127) // 256]
                    row = position % 256 % family.rows
                    there = (page * family.page_bytes + plane.offset + row * plane.row_bytes) // 8 + k
                    found.append(np.stack([np.full(len(k), first + layer), there, at // 8 + k], axis=1))
                    at += plane.row_bytes
        first += len(family.layers)
    assert at <= world.memory.units.tail(n) * world.memory.units.nbytes
    return ordered(found)


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
