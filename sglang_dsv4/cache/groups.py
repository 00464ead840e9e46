"""Groups the cache families by growth, and counts the host blocks that a request needs of each group.

A group's block holds every layer of every family of the group. ``blocks_for`` alone counts the blocks of a request;
compression never changes it, because a block is counted in full tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Family, Group


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Describes one group: its families, and the most blocks of a request.

    max_blocks is None where the group grows with the sequence.
    """

    group: Group
    families: tuple[Family, ...]
    block_size: int
    max_blocks: int | None

    def blocks_for(self, tokens: int) -> int:
        """Counts the host blocks that a request of ``tokens`` saved tokens needs."""
        needed = -(-tokens // self.block_size)
        return needed if self.max_blocks is None else self.max_blocks


def init_groups(geometry: Geometry) -> dict[Group, KVCacheGroupSpec]:
    """Makes the three groups of a pool. The geometry is read once, here; nothing re-reads a model config."""
    by_group: dict[Group, list[Family]] = {group: [] for group in Group}
    for family in families(geometry):
        by_group[family.group].append(family)
    groups = {}
    for group, members in by_group.items():
        max_blocks = None if group is Group.PAGED else 1
        groups[group] = KVCacheGroupSpec(group, tuple(members), geometry.page_size, max_blocks)
    return groups
