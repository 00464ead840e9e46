"""A request needs blocks by its full tokens, whatever the compression."""

from __future__ import annotations

import pytest

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.testing.standalone import FLASH_RATIOS

# tokens: blocks of 256, counted by hand
BLOCKS = {0: 0, 1: 1, 3: 1, 255: 1, 256: 1, 257: 2, 511: 2, 512: 2, 513: 3, 65_536: 256, 1_000_000: 3907}


@pytest.mark.parametrize(
    ("ratios", "empty"),
    [(FLASH_RATIOS, ()), ((0, 4, 4), (Group.REQUEST,)), ((0, 128), ()), ((0, 0), (Group.PAGED, Group.REQUEST))],
)
def test_blocks_of_each_group(ratios, empty):
    """Pages grow with the tokens; a window and a request have one block each; a stage without a group has none."""
    for group, spec in init_groups(Geometry(ratios)).items():
        found = {tokens: spec.blocks_for(tokens) for tokens in BLOCKS}
        bounded = dict.fromkeys(BLOCKS, 0 if group in empty else 1)
        assert found == (BLOCKS if group is Group.PAGED and group not in empty else bounded)
