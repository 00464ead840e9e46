"""Groups the cache families by growth.

The pages of the paged group take a unit of host memory each; the live rows of the other two share a tail.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Family, Group


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Describes one group: its families, and the tokens of a page."""

    group: Group
    families: tuple[Family, ...]
    page_size: int

    @property
    def grows(self) -> bool:
        """Returns whether the group grows with the sequence."""
        return self.group is Group.PAGED

    def nbytes(self, tokens: int) -> int:
        """Counts the bytes that a request of ``tokens`` saved tokens has here: whole pages, or live rows."""
        return sum(family.moved_bytes(self.page_size, tokens) for family in self.families)


def init_groups(geometry: Geometry) -> dict[Group, KVCacheGroupSpec]:
    """Makes the three groups of a pool. The geometry is read once, here; nothing re-reads a model config."""
    members = families(geometry)
    return {
        group: KVCacheGroupSpec(group, tuple(f for f in members if f.group is group), geometry.page_size)
        for group in Group
    }
