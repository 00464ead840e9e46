"""The device side of a pool: its buffers as bytes, and the tables built from them once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from sglang_dsv4.cache.families import Address, Family, Geometry, Group
from sglang_dsv4.cache.packed import PackedBlock
from sglang_dsv4.residency import Residents
from triton_ops.copy_pages import PageTable
from triton_ops.tables import BufferTable, Upload

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class DeviceBuffers:
    """Everything on the device that holds a request's cache.

    buffers: family name -> one uint8 2-D contiguous tensor a layer, in the order of ``family.layers`` (views of
    the pool's own buffers; the pool owns the memory). pages: family name -> pages that requests may use.
    """

    geometry: Geometry
    families: tuple[Family, ...]
    buffers: dict[str, tuple[torch.Tensor, ...]]
    pages: dict[str, int]
    c128_state_dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return next(b for bs in self.buffers.values() for b in bs).device

    def family(self, name: str) -> Family:
        """The family called ``name``."""
        return next(family for family in self.families if family.name == name)

    @cached_property
    def residents(self) -> Residents:
        """The static tables of transfers on this rank's card; none is uploaded by a transfer."""
        return Residents(self.device)

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make()`` returns, made by the first that asks for ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _upload(self, owner: str) -> Upload:
        return lambda name, table: self.residents.constant(f"{owner}.{name}", table)

    @cached_property
    def row_table(self) -> BufferTable:
        """Buffers of the families that move row by row; ``row_base`` says where each family starts."""
        buffers = [b for f in self.families if not f.whole_pages for b in self.buffers[f.name]]
        return BufferTable.of(buffers, self._upload("transfer.rows"))

    @cached_property
    def row_base(self) -> dict[str, int]:
        """First buffer number of each row family in ``row_table``."""
        base, numbers = 0, {}
        for family in self.families:
            if not family.whole_pages:
                numbers[family.name] = base
                base += len(self.buffers[family.name])
        return numbers

    def page_table(self, packed: PackedBlock) -> PageTable | None:
        """Pointer and geometry table of the block group; None when this stage has no such layer."""
        return self.once(("pages", packed), lambda: self._page_table(packed))

    def _page_table(self, packed: PackedBlock) -> PageTable | None:
        members = [f for f in self.families if f.group is Group.PAGED and f.layers]
        if not members:
            return None
        buffers = [b for f in members for b in self.buffers[f.name]]
        offsets = [packed.slot_offset(f, i) for f in members for i in range(len(f.layers))]
        return PageTable.of(buffers, offsets, packed.block_stride, self._upload("transfer.pages"))

    @property
    def has_rings(self) -> bool:
        """Whether this stage has state buffers addressed by request slot."""
        return any(f.address is Address.REQUEST_SLOT and f.layers for f in self.families)
