"""Groups the cache families by how they grow, and counts the host blocks that a request needs of each group.

A group's block holds every layer of every family of the group. ``blocks_for`` is the only place that says
how many blocks a request needs; compression never changes it, because a block is counted in full tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Family, Group


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """One group: its families, and how many blocks a request may hold at most.

    max_blocks is None where the group grows with the sequence.
    """

    group: Group
    families: tuple[Family, ...]
    block_size: int
    max_blocks: int | None

    @property
    def empty(self) -> bool:
        """A pipeline stage may have no layer of this group: then it needs no block."""
        return not any(family.layers for family in self.families)

    def blocks_for(self, tokens: int) -> int:
        """Host blocks a request of ``tokens`` saved tokens needs."""
        if self.empty:
            return 0
        needed = -(-tokens // self.block_size)
        return needed if self.max_blocks is None else self.max_blocks


def init_groups(geometry: Geometry) -> dict[Group, KVCacheGroupSpec]:
    """The three groups of a pool. The geometry is read once, here; nothing re-reads a model config."""
    by_group: dict[Group, list[Family]] = {group: [] for group in Group}
    for family in families(geometry):
        by_group[family.group].append(family)
    groups = {}
    for group, members in by_group.items():
        max_blocks = None if group is Group.PAGED else 1
        groups[group] = KVCacheGroupSpec(group, tuple(members), geometry.page_size, max_blocks)
    return groups
