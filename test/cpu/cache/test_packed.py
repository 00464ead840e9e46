"""The packed host block has a place for every row, without overlap, and its views alias the right bytes."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from made_families import family_sets

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Family, Group
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.cache.packed import PackedBlock

RATIOS = (0, 4, 128, 4, 128)  # every family has more than one layer


def packed_of(g: Geometry, members: tuple[Family, ...] | None = None) -> dict[Group, PackedBlock]:
    """The block of each group; of ``members`` where they are not those of ``g``."""
    members = families(g) if members is None else members
    return {
        group: PackedBlock.of(dataclasses.replace(spec, families=tuple(f for f in members if f.group is group)))
        for group, spec in init_groups(g).items()
    }


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
    """Each family has a share that begins at a multiple of 256, and in it every row a place of its own."""
    everything, end = [np.empty((0, 2), np.int64)], 0
    for family in packed.families:
        start = -(-end // 256) * 256
        end = start + len(family.layers) * family.host_bytes
        pieces = cells(packed, family).reshape(-1, 2)
        assert bool(((pieces >= start) & (pieces <= end)).all()), f"{family.name}: outside its share"
        everything.append(pieces)
    ordered = np.concatenate(everything)
    ordered = ordered[np.argsort(ordered[:, 0], kind="stable")]
    assert bool((ordered[:-1, 1] <= ordered[1:, 0]).all()), f"{packed.group.value}: two rows overlap"
    assert packed.payload_bytes == sum(len(f.layers) * f.host_bytes for f in packed.families)
    assert end <= packed.block_stride < end + 4096 and packed.block_stride % 4096 == 0


@settings(max_examples=40, deadline=None)
@given(family_sets())
def test_any_families_of_any_stage(pool):
    for packed in packed_of(*pool).values():
        check_packed(packed)


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
