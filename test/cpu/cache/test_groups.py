"""Block counts: in full tokens, whatever the compression."""

from __future__ import annotations

import pytest

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.engine.standalone import FLASH_RATIOS

# tokens: blocks of 256, counted by hand
BLOCKS = {
    0: 0, 1: 1, 3: 1, 4: 1, 127: 1, 128: 1, 255: 1, 256: 1, 257: 2, 511: 2, 512: 2, 513: 3,
    1000: 4, 4095: 16, 4096: 16, 4097: 17, 65_536: 256, 1_000_000: 3907,
}  # fmt: skip


@pytest.mark.parametrize("ratios", [FLASH_RATIOS, (4,), (128,), (0, 4, 128)])
def test_the_block_group_grows_by_full_tokens(ratios):
    block = init_groups(Geometry(ratios))[Group.PAGED]
    assert block.block_size == 256
    assert block.max_blocks is None
    assert {tokens: block.blocks_for(tokens) for tokens in BLOCKS} == BLOCKS


@pytest.mark.parametrize("group", [Group.WINDOW, Group.REQUEST])
def test_window_and_request_never_grow(group):
    spec = init_groups(Geometry(FLASH_RATIOS))[group]
    assert {spec.blocks_for(tokens) for tokens in BLOCKS} == {1}
    assert spec.max_blocks == 1


def test_every_family_is_in_its_group_with_its_size():
    g = Geometry(FLASH_RATIOS)
    groups = init_groups(g)
    assert list(groups) == [Group.PAGED, Group.WINDOW, Group.REQUEST]
    for group, spec in groups.items():
        assert spec.families == tuple(family for family in families(g) if family.group is group)


@pytest.mark.parametrize(
    ("ratios", "empty"),
    [
        ((0, 4, 4), {Group.REQUEST}),
        ((0, 128), set()),
        ((0, 0), {Group.PAGED, Group.REQUEST}),
        ((4, 128), set()),
    ],
)
def test_a_stage_without_a_group_needs_no_block_of_it(ratios, empty):
    groups = init_groups(Geometry(ratios))
    assert {group for group, spec in groups.items() if spec.empty} == empty
    for group in empty:
        assert {groups[group].blocks_for(tokens) for tokens in BLOCKS} == {0}
    for group in set(groups) - empty:
        assert groups[group].blocks_for(1) == 1
