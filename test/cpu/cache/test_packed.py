"""The packed host block: no two slots overlap, every byte is counted, views alias the right bytes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from made_families import family_sets

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Family, Group
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.cache.packed import PackedBlock, align
from sglang_dsv4.errors import GeometryError
from sglang_dsv4.testing.standalone import FLASH_RATIOS, PRO_RATIOS

RATIOS = (0, 4, 128, 4, 128)  # every family has more than one layer


def packed_of(g: Geometry, members: tuple[Family, ...] | None = None) -> dict[Group, PackedBlock]:
    """The block of each group; of ``members`` where they are not those of ``g``."""
    members = families(g) if members is None else members
    return {
        group: PackedBlock.of(dataclasses.replace(spec, families=tuple(f for f in members if f.group is group)))
        for group, spec in init_groups(g).items()
    }


def layout(packed: PackedBlock) -> tuple[list[tuple[int, int]], dict[tuple[str, int], int]]:
    """[start, end) of each family's layers, one after the other from a multiple of 256; (family, index) -> start of the
    layer: slot after slot, or of a request family row after row in turn."""
    extents, starts, end = [], {}, 0
    for family in packed.families:
        start = -(-end // 256) * 256
        end = start + len(family.layers) * family.host_bytes
        extents.append((start, end))
        step = family.row_bytes if family.group is Group.REQUEST else family.host_bytes
        starts.update({(family.name, index): start + index * step for index in range(len(family.layers))})
    return extents, starts


def tile_rows(family: Family) -> int:
    """Rows that lie plane by plane together: of a tile in a page, all of a host slot for rows."""
    return family.rows // family.tiles if family.group is Group.PAGED else family.host_rows


def cells(packed: PackedBlock, family: Family) -> np.ndarray:
    """[layer, row, plane, (start, end)] of one family's bytes in a block."""
    found = np.zeros((len(family.layers), family.host_rows, len(family.planes), 2), np.int64)
    for index in range(len(family.layers)):
        for number, plane in enumerate(family.planes):
            first = packed.slot_offset(family, index) + family.host_planes[number].offset
            tile, inner = np.divmod(np.arange(family.host_rows), tile_rows(family))
            starts = first + tile * (family.page_bytes // family.tiles) + inner * family.host_row_stride(number)
            found[index, :, number] = np.stack([starts, starts + plane.row_bytes], axis=1)
    return found


def check_packed(packed: PackedBlock) -> None:
    extents, starts = layout(packed)
    found = {(f.name, index): packed.slot_offset(f, index) for f in packed.families for index in range(len(f.layers))}
    assert found == starts
    everything = [np.empty((0, 2), np.int64)]
    for family, (start, end) in zip(packed.families, extents, strict=True):
        pieces = cells(packed, family).reshape(-1, 2)
        assert bool(((pieces >= start) & (pieces <= end)).all()), f"{family.name}: outside its share"
        everything.append(pieces)
    ordered = np.concatenate(everything)
    ordered = ordered[np.argsort(ordered[:, 0], kind="stable")]
    assert bool((ordered[:-1, 1] <= ordered[1:, 0]).all()), f"{packed.group.value}: two rows overlap"
    assert packed.payload_bytes == sum(end - start for start, end in extents)
    used = max((end for start, end in extents if end > start), default=0)
    assert used <= packed.block_stride < used + 4096
    assert packed.block_stride % 4096 == 0


@settings(max_examples=40, deadline=None)
@given(family_sets())
def test_any_families_of_any_stage(pool):
    for packed in packed_of(*pool).values():
        check_packed(packed)


@pytest.mark.parametrize("ratios", [FLASH_RATIOS, PRO_RATIOS, (4,), (128,), (0,), RATIOS])
def test_real_models(ratios):
    for packed in packed_of(Geometry(ratios)).values():
        check_packed(packed)


@pytest.mark.parametrize("live", [0, 1, 2, 63, 127, 128])
@pytest.mark.parametrize("ratios", [FLASH_RATIOS, PRO_RATIOS, (128,), RATIOS])
def test_the_first_rows_of_a_request_family_are_one_run(ratios, live):
    """All layers' rows 0..live-1, and nothing else, from the family's offset on."""
    packed = packed_of(Geometry(ratios))[Group.REQUEST]
    for family, offset in zip(packed.families, packed.offsets, strict=True):
        hits = np.zeros(packed.block_stride, np.uint8)
        for start, end in cells(packed, family)[:, :live].reshape(-1, 2).tolist():
            hits[start:end] += 1
        wanted = np.zeros_like(hits)
        wanted[offset : offset + live * len(family.layers) * family.row_bytes] = 1
        assert np.array_equal(hits, wanted), family.name


def test_an_empty_group_has_no_bytes():
    packed = PackedBlock.of(dataclasses.replace(init_groups(Geometry((0, 4)))[Group.REQUEST], families=()))
    assert (packed.payload_bytes, packed.block_stride) == (0, 0)


@pytest.mark.parametrize("group", list(Group))
def test_views_of_a_sliced_region_alias_the_right_bytes(group):
    """The region starts inside its storage: a stride view counts from the start of the storage."""
    packed = packed_of(Geometry((*RATIOS, 1, 2), sources=(5, 6), index_rows={4: "fp4"}, swa_tiles=4))[group]
    before, blocks = 12_288 + 16, 3
    storage = torch.zeros(before + blocks * packed.block_stride + 512, dtype=torch.uint8)
    region = storage[before : before + blocks * packed.block_stride]
    for block in (0, blocks - 1):
        for family in packed.families:
            rows = cells(packed, family) + before + block * packed.block_stride
            for index in range(len(family.layers)):
                for number, plane in enumerate(family.planes):
                    values = torch.randint(1, 256, (family.host_rows, plane.row_bytes), dtype=torch.uint8)
                    for tile, part in enumerate(values.split(tile_rows(family))):
                        view = packed.view(region, block, family, index, number, tile)
                        assert view.shape == part.shape
                        view.copy_(part)
                    for row, (start, end) in enumerate(rows[index, :, number].tolist()):
                        assert torch.equal(storage[start:end], values[row]), f"{family.name} {index} plane {number}"
                        storage[start:end] = 0
                    assert not bool(storage.any()), f"{family.name} {index} plane {number}: a byte elsewhere"


@pytest.mark.parametrize("group", list(Group))
def test_a_block_past_the_end_or_before_the_start_is_refused(group):
    packed = packed_of(Geometry(RATIOS))[group]
    storage = torch.zeros(4 * packed.block_stride, dtype=torch.uint8)
    region = storage[packed.block_stride : 3 * packed.block_stride]
    family = packed.families[0]
    packed.view(region, 1, family, 0, 0)
    with pytest.raises(GeometryError, match=f"block 2 .*{group.value}"):
        packed.view(region, 2, family, 0, 0)
    with pytest.raises(GeometryError, match="block -1"):
        packed.view(region, -1, family, 0, 0)


@pytest.mark.parametrize("index", [-1, 2, 100])
def test_a_layer_that_the_family_has_not_is_refused(index):
    packed = packed_of(Geometry(RATIOS))[Group.PAGED]
    with pytest.raises(GeometryError, match=f"{packed.families[0].name} has 2 layers, asked for number {index}"):
        packed.slot_offset(packed.families[0], index)


@pytest.mark.parametrize(("value", "to", "wanted"), [(0, 256, 0), (1, 256, 256), (256, 256, 256), (257, 256, 512)])
def test_align(value, to, wanted):
    assert align(value, to) == wanted
