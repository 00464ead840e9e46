"""Packs all layers of a group into one host block: one copy instead of dozens.

    block b of a group starts at  base + b * block_stride
    | family 0: layer 0, layer 1, ... | pad | family 1: layer 0, ... | pad | ...     | pad to block_stride
    slot of (family, layer i) = base + b * block_stride + offset[family] + i * family.host_layer_stride
    (a request family is interleaved: the layers' rows alternate, see Family.interleaved)

All layers of all families of the group lie in one block. One block is one region and, when blocks are neighbours, one
run: a later tier needs one copy a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_dsv4.cache.family import Family, Group
from sglang_dsv4.cache.groups import KVCacheGroupSpec
from sglang_dsv4.errors import GeometryError

if TYPE_CHECKING:
    import torch

FAMILY_ALIGNMENT = 256
BLOCK_ALIGNMENT = 4096


def align(value: int, to: int) -> int:
    """Rounds ``value`` up to a multiple of ``to``."""
    return -(-value // to) * to


@dataclass(frozen=True)
class PackedBlock:
    """Holds the offsets of one group's block. Bytes throughout."""

    group: Group
    families: tuple[Family, ...]
    offsets: tuple[int, ...]
    payload_bytes: int
    payload_end: int
    block_stride: int

    @classmethod
    def of(cls, spec: KVCacheGroupSpec) -> PackedBlock:
        """Lays the families of ``spec`` one after the other."""
        offsets, end, payload = [], 0, 0
        for family in spec.families:
            offset = align(end, FAMILY_ALIGNMENT)
            offsets.append(offset)
            size = len(family.layers) * family.host_bytes
            payload += size
            end = offset + size
        return cls(spec.group, spec.families, tuple(offsets), payload, end, align(end, BLOCK_ALIGNMENT))

    def slot_offset(self, family: Family, index: int) -> int:
        """Returns the offset of layer number ``index`` (position in ``family.layers``) inside a block."""
        if not 0 <= index < len(family.layers):
            raise GeometryError(f"{family.name} has {len(family.layers)} layers, asked for number {index}")
        return self.offsets[self.families.index(family)] + index * family.host_layer_stride

    def view(
        self, region: torch.Tensor, block: int, family: Family, index: int, plane: int, tile: int = 0
    ) -> torch.Tensor:
        """Views one plane of one layer's slot in ``block`` of ``region`` as ``[rows, row_bytes]`` uint8.

        tile: of a page in tiles; the view has its rows. region: 1-D uint8, this group's blocks from number 0 on. The
        view aliases it.
        """
        shape, stride, offset = self.view_geometry(block, family, index, plane, tile)
        last = offset + (shape[0] - 1) * stride[0] + shape[1]
        if block < 0 or last > region.numel():
            raise GeometryError(f"block {block} lies outside the {self.group.value} region")
        # as_strided counts from the start of the STORAGE: a region that is itself a slice adds its own offset.
        return region.as_strided(shape, stride, region.storage_offset() + offset)

    def view_geometry(
        self, block: int, family: Family, index: int, plane: int, tile: int = 0
    ) -> tuple[tuple[int, int], tuple[int, int], int]:
        """Returns shape, stride and offset (from the region's start) of ``view``; strides come from a meta tensor."""
        import torch  # noqa: PLC0415 - `sglang-dsv4 plan` computes sizes without torch

        piece = family.host_planes[plane]
        pitch = family.host_row_stride(plane)
        count = family.tile_rows if family.whole_pages else family.host_rows
        rows = torch.empty((count, pitch), dtype=torch.uint8, device="meta")[:, : piece.row_bytes]
        offset = block * self.block_stride + self.slot_offset(family, index) + tile * family.tile_bytes + piece.offset
        return (count, piece.row_bytes), (rows.stride(0), rows.stride(1)), offset
