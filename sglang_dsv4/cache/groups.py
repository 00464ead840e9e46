"""Of a request's cache one part grows with its tokens, one is bounded, one is fixed: a group of host blocks for each.

A group's block holds every layer of every family of the group. ``blocks_for`` is the only place that says
how many blocks a request needs; compression never changes it, because a block is counted in full tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Family, Group
from sglang_dsv4.errors import GeometryError


@dataclass(frozen=True)
class KVCacheSpec:
    """Size of one family's share of a block, for one layer.

    block_size: full tokens a block stands for; page_bytes: bytes of one layer's slot; compress_ratio: tokens a row.
    """

    block_size: int
    page_bytes: int
    compress_ratio: int

    def __post_init__(self) -> None:
        if self.compress_ratio < 1 or self.block_size < self.compress_ratio:
            raise GeometryError(
                f"block_size {self.block_size} is smaller than compress_ratio {self.compress_ratio}: "
                "a block would hold no row; raise the page size"
            )
        if self.page_bytes < 1:
            raise GeometryError(f"page_bytes {self.page_bytes} must be positive")

    @property
    def rows(self) -> int:
        """Rows a block."""
        return self.block_size // self.compress_ratio


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """One group: its families with their specs, and how many blocks a request may hold at most.

    max_blocks is None where the group grows with the sequence.
    """

    group: Group
    families: tuple[Family, ...]
    specs: tuple[KVCacheSpec, ...]
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
        specs = tuple(KVCacheSpec(geometry.page_size, f.host_bytes, f.ratio) for f in members)
        max_blocks = None if group is Group.PAGED else 1
        groups[group] = KVCacheGroupSpec(group, tuple(members), specs, geometry.page_size, max_blocks)
    return groups
