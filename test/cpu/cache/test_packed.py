"""The packed host block: no two slots overlap, every byte is counted, views alias the right bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from builders import FLASH_RATIOS, PRO_RATIOS
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dsv4.cache.families import Geometry, Group
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.cache.packed import PackedBlock, align
from sglang_dsv4.errors import GeometryError

RATIOS = (0, 4, 128, 4, 128)  # every family has more than one layer
GEOMETRIES = st.builds(
    Geometry,
    ratios=st.lists(st.sampled_from((0, 4, 128)), min_size=1, max_size=12).map(tuple),
    first_layer=st.integers(0, 50),
    c4_ring=st.sampled_from((8, 16)),
    c128_ring=st.sampled_from((128, 256)),
    index_value_bytes=st.sampled_from((128, 64)),
    c4_state_bytes=st.sampled_from((2, 4)),
    c128_state_bytes=st.sampled_from((2, 4)),
)


def packed_of(g: Geometry) -> dict[Group, PackedBlock]:
    return {group: PackedBlock.of(spec) for group, spec in init_groups(g).items()}


def slot_sizes(g: Geometry) -> dict[Group, list[tuple[str, int, int]]]:
    """(family, layers, bytes of a slot) by group, in order, from the published numbers."""
    c4, c128 = g.ratios.count(4), g.ratios.count(128)
    return {
        Group.PAGED: [
            ("c4_kv", c4, 37_440),
            ("c4_indexer", c4, 64 * (g.index_value_bytes + 4)),
            ("c128_kv", c128, 1_728),
        ],
        Group.WINDOW: [
            ("swa_kv", len(g.ratios), 128 * 584),
            ("c4_state", c4, 8 * 2_048 * g.c4_state_bytes),
            ("c4_indexer_state", c4, 8 * 512 * g.c4_state_bytes),
        ],
        Group.REQUEST: [("c128_state", c128, 128 * 1_024 * g.c128_state_bytes)],
    }


def layout(g: Geometry, group: Group) -> tuple[dict[str, tuple[int, int]], dict[tuple[str, int], int]]:
    """family -> [start, end) of all its layers, in order, each from a multiple of 256;
    (family, index) -> start of the layer: one slot after the other, or row by row in turn."""
    extents, starts, end = {}, {}, 0
    for name, layers, size in slot_sizes(g)[group]:
        start = -(-end // 256) * 256
        end = start + layers * size
        extents[name] = (start, end)
        step = 1_024 * g.c128_state_bytes if name == "c128_state" else size
        starts.update({(name, index): start + index * step for index in range(layers)})
    return extents, starts


def row_widths(g: Geometry) -> dict[str, tuple[int, ...]]:
    """Bytes of a row in each plane of a family, from the published numbers."""
    return {
        "c4_kv": (576, 8),
        "c4_indexer": (g.index_value_bytes, 4),
        "c128_kv": (576, 8),
        "swa_kv": (576, 8),
        "c4_state": (2_048 * g.c4_state_bytes,),
        "c4_indexer_state": (512 * g.c4_state_bytes,),
        "c128_state": (1_024 * g.c128_state_bytes,),
    }


def cells(g: Geometry, packed: PackedBlock, name: str) -> np.ndarray:
    """[layer, row, plane, (start, end)] of one family's bytes in a block."""
    family = next(f for f in packed.families if f.name == name)
    found = np.zeros((len(family.layers), family.host_rows, len(family.planes), 2), np.int64)
    for index in range(len(family.layers)):
        for number, width in enumerate(row_widths(g)[name]):
            first = packed.slot_offset(family, index) + family.host_planes[number].offset
            starts = first + np.arange(family.host_rows) * family.host_row_stride(number)
            found[index, :, number] = np.stack([starts, starts + width], axis=1)
    return found


def check_packed(g: Geometry) -> None:
    for group, packed in packed_of(g).items():
        extents, starts = layout(g, group)
        found = {
            (f.name, index): packed.slot_offset(f, index) for f in packed.families for index in range(len(f.layers))
        }
        assert found == starts
        everything = []
        for name, (start, end) in extents.items():
            assert start % 16 == end % 16 == 0
            pieces = cells(g, packed, name).reshape(-1, 2)
            assert bool(((pieces >= start) & (pieces <= end)).all()), f"{name}: outside its share"
            everything.append(pieces)
        ordered = np.concatenate(everything)
        ordered = ordered[np.argsort(ordered[:, 0])]
        assert bool((ordered[:-1, 1] <= ordered[1:, 0]).all()), f"{group.value}: two rows overlap"
        for (_, end), (start, _) in pairwise(extents.values()):
            assert end <= start, f"{group.value}: two families overlap"
        assert all(start % 16 == 0 for start in starts.values())
        assert packed.payload_bytes == sum(layers * size for _, layers, size in slot_sizes(g)[group])
        used = max((end for start, end in extents.values() if end > start), default=0)
        assert used <= packed.block_stride < used + 4096
        assert packed.block_stride % 4096 == 0


@settings(max_examples=60, deadline=None)
@given(GEOMETRIES)
def test_any_stage(g):
    check_packed(g)


@pytest.mark.parametrize("ratios", [FLASH_RATIOS, PRO_RATIOS, (4,), (128,), (0,), RATIOS])
def test_real_models(ratios):
    check_packed(Geometry(ratios))


@pytest.mark.parametrize("live", [0, 1, 2, 63, 127, 128])
@pytest.mark.parametrize("ratios", [FLASH_RATIOS, PRO_RATIOS, (128,), RATIOS])
def test_the_first_rows_of_a_request_family_are_one_run(ratios, live):
    """All layers' rows 0..live-1, and nothing else, from the family's offset on."""
    g = Geometry(ratios)
    packed = packed_of(g)[Group.REQUEST]
    for family, offset in zip(packed.families, packed.offsets, strict=True):
        hits = np.zeros(packed.block_stride, np.uint8)
        for start, end in cells(g, packed, family.name)[:, :live].reshape(-1, 2).tolist():
            hits[start:end] += 1
        wanted = np.zeros_like(hits)
        wanted[offset : offset + live * len(family.layers) * family.row_bytes] = 1
        assert np.array_equal(hits, wanted), family.name


def test_flash_strides():
    strides = {group: p.block_stride for group, p in packed_of(Geometry(FLASH_RATIOS)).items()}
    assert strides == {Group.PAGED: 999_424, Group.WINDOW: 4_935_680, Group.REQUEST: 10_485_760}


def test_an_empty_group_has_no_bytes():
    packed = packed_of(Geometry((0, 4)))[Group.REQUEST]
    assert (packed.payload_bytes, packed.block_stride) == (0, 0)


@pytest.mark.parametrize("group", list(Group))
def test_views_of_a_sliced_region_alias_the_right_bytes(group):
    """The region starts inside its storage: a stride view counts from the start of the storage."""
    g = Geometry(RATIOS, index_value_bytes=64)
    packed = packed_of(g)[group]
    _, starts = layout(g, group)
    before, blocks = 12_288 + 16, 3
    storage = torch.zeros(before + blocks * packed.block_stride + 512, dtype=torch.uint8)
    region = storage[before : before + blocks * packed.block_stride]
    assert region.storage_offset() == before
    for block in (0, blocks - 1):
        for family in packed.families:
            for index in range(len(family.layers)):
                inside = before + block * packed.block_stride + starts[family.name, index]
                turns = len(family.layers) if family.name == "c128_state" else 1
                for number, plane in enumerate(family.host_planes):
                    width = row_widths(g)[family.name][number]
                    view = packed.view(region, block, family, index, number)
                    assert view.shape == (family.host_rows, width)
                    assert view.is_contiguous() == (turns == 1)
                    view.fill_(0xC3)
                    rows = [inside + plane.offset + row * turns * width for row in range(family.host_rows)]
                    wanted = torch.zeros_like(storage)
                    for start in rows:
                        wanted[start : start + width] = 0xC3
                    assert torch.equal(storage, wanted), f"{family.name} {index} plane {number}"
                    for row, start in enumerate(rows):
                        values = torch.arange(row * width, (row + 1) * width, dtype=torch.int64)
                        storage[start : start + width] = (values % 251).to(torch.uint8)
                    assert view.tolist() == [
                        [k % 251 for k in range(row * width, (row + 1) * width)] for row in range(family.host_rows)
                    ]
                    storage.zero_()


def test_views_of_all_slots_cover_the_payload_once():
    """The whole of three blocks: written through the views, every payload byte is hit exactly once."""
    g = Geometry(RATIOS)
    for group, packed in packed_of(g).items():
        hits = torch.zeros(3 * packed.block_stride, dtype=torch.uint8)
        for block in range(3):
            for family in packed.families:
                for index in range(len(family.layers)):
                    for number in range(len(family.host_planes)):
                        packed.view(hits, block, family, index, number).add_(1)
        assert hits.max() == 1
        padding = {"c4_kv": 37_440 - 64 * 584, "c128_kv": 1_728 - 2 * 584}
        unused = sum(layers * padding.get(name, 0) for name, layers, _ in slot_sizes(g)[group])
        assert int(hits.sum()) == 3 * (packed.payload_bytes - unused)


@pytest.mark.parametrize("group", list(Group))
def test_a_block_past_the_end_is_refused(group):
    packed = packed_of(Geometry(RATIOS))[group]
    storage = torch.zeros(4 * packed.block_stride, dtype=torch.uint8)
    region = storage[packed.block_stride : 3 * packed.block_stride]
    family = packed.families[0]
    packed.view(region, 1, family, 0, 0)
    with pytest.raises(GeometryError, match=f"block 2 .*{group.value}"):
        packed.view(region, 2, family, 0, 0)


def test_a_block_before_the_start_is_refused():
    packed = packed_of(Geometry(RATIOS))[Group.WINDOW]
    storage = torch.zeros(4 * packed.block_stride, dtype=torch.uint8)
    with pytest.raises(GeometryError, match="block -1"):
        packed.view(storage[packed.block_stride :], -1, packed.families[0], 0, 0)


@pytest.mark.parametrize("index", [-1, 2, 100])
def test_a_layer_that_the_family_has_not_is_refused(index):
    packed = packed_of(Geometry(RATIOS))[Group.PAGED]
    with pytest.raises(GeometryError, match=f"c4_kv has 2 layers, asked for number {index}"):
        packed.slot_offset(packed.families[0], index)


@pytest.mark.parametrize(("value", "to", "wanted"), [(0, 256, 0), (1, 256, 256), (256, 256, 256), (257, 256, 512)])
def test_align(value, to, wanted):
    assert align(value, to) == wanted
