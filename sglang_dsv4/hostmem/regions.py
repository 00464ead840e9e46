"""Cuts the arena into regions and chunks: some hosts refuse to register more than 96 GiB at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_dsv4.cache.groups import KVCacheGroupSpec
from sglang_dsv4.cache.packed import PackedBlock, align
from sglang_dsv4.hostmem.populate import system_page

CHUNK_BYTES = 32 << 30  # most bytes registered at once, in whole blocks


@dataclass(frozen=True)
class GroupRegion:
    """Describes one group's region of the arena: ``blocks`` from byte ``start`` on.

    chunk: blocks that are registered together; a copy of neighbouring blocks must not cross a multiple of it. Region
    and chunks begin with a page of the system: a page cannot be registered twice.
    """

    spec: KVCacheGroupSpec
    packed: PackedBlock
    start: int
    blocks: int
    chunk: int

    @classmethod
    def of(cls, spec: KVCacheGroupSpec, start: int, blocks: int) -> GroupRegion:
        """Lays out the region of ``spec`` at ``start``."""
        packed = PackedBlock.of(spec)
        stride = max(1, packed.block_stride)
        whole = system_page() // math.gcd(system_page(), stride)  # blocks that end with a page
        return cls(spec, packed, start, blocks, max(whole, CHUNK_BYTES // stride // whole * whole))

    @property
    def nbytes(self) -> int:
        """Bytes of the region, in whole pages."""
        return align(self.blocks * self.packed.block_stride, system_page())

    @property
    def chunk_starts(self) -> list[int]:
        """Bytes at which a chunk begins."""
        blocks = self.blocks if self.packed.block_stride else 0  # else they have no bytes
        return [self.start + block * self.packed.block_stride for block in range(0, blocks, self.chunk)]
