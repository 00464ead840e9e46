"""Describes every device buffer of a pool as bytes and tables, so that one launch reaches them all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.family import Address, Family, Group
from sglang_dsv4.cache.packed import PackedPage
from sglang_dsv4.residency import Residents
from triton_ops.copy_pages import PageTable
from triton_ops.tables import BufferTable, Upload

UNBOUNDED = 2**31 - 1  # page limit of an address without a family in this stage


@dataclass(frozen=True, eq=False)
class DeviceBuffers:
    """Describes all device memory that holds requests' caches. The pool owns the memory.

    geometry: sizes of the layout. families: in the layout's order.
    buffers: family name -> one uint8 tensor [pages, page bytes] a layer, contiguous, in the order of ``family.layers``.
    pages: family name -> pages that requests may use. state_dtype: of the ring rows that a load resets.
    draft_begins: by request slot, the position from which a DSpark draft's rows were ever filled; None for others.
    page_stride: full page ids are multiples of it; above 1 the buffers of a family overlap, see ``pools.page_major``.
    """

    geometry: Geometry
    families: tuple[Family, ...]
    buffers: dict[str, tuple[torch.Tensor, ...]]
    pages: dict[str, int]
    state_dtype: torch.dtype
    draft_begins: torch.Tensor | None = None
    page_stride: int = 1

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        return next(b for bs in self.buffers.values() for b in bs).device

    @cached_property
    def residents(self) -> Residents:
        """The static tables of transfers on this rank's card; no transfer uploads one."""
        return Residents(self.device)

    @cached_property
    def folded(self) -> bool:
        """Returns whether a step writes rows in place that a copy needs as they were before it."""
        return any(family.folded for family in self.families)

    @cached_property
    def limits(self) -> tuple[int, int]:
        """Upper bounds of full page ids and of SWA page ids in every family; the dummy page 0 counts."""
        return self._fewest(Address.FULL_PAGE), self._fewest(Address.SWA_PAGE)

    @cached_property
    def page_counts(self) -> tuple[int, int]:
        """Full pages and SWA pages in every family, the dummy page 0 included."""
        full, swa = self.limits
        return full if full == UNBOUNDED else -(-full // self.page_stride), swa

    def _fewest(self, address: Address) -> int:
        return min((self.pages[f.name] for f in self.families if f.layers and f.address is address), default=UNBOUNDED)

    @cached_property
    def row_families(self) -> tuple[Family, ...]:
        """Families that move row by row and have a layer."""
        return tuple(f for f in self.families if f.layers and not f.whole_pages)

    @cached_property
    def first_row_buffer(self) -> dict[str, int]:
        """Number of each row family's first buffer in ``row_table``."""
        first, numbers = 0, {}
        for family in self.row_families:
            numbers[family.name] = first
            first += len(self.buffers[family.name])
        return numbers

    @cached_property
    def row_table(self) -> BufferTable:
        """Buffers of the row families, for ``copy_rows``."""
        return BufferTable.of([b for f in self.row_families for b in self.buffers[f.name]], self._upload("rows"))

    @cached_property
    def page(self) -> PackedPage:
        """The layout of a page in host memory."""
        return PackedPage.of(self.families)

    def page_table(self, stride: int) -> PageTable | None:
        """Uploads the table of the paged families for ``copy_pages``; None without such a layer. Called once.

        stride: bytes of a unit.
        """
        members = [f for f in self.families if f.group is Group.PAGED and f.layers]
        if not members:
            return None
        buffers = [b for f in members for b in self.buffers[f.name]]
        offsets = [self.page.offset(f, i) for f in members for i in range(len(f.layers))]
        return PageTable.of(buffers, offsets, stride, self._upload("pages"))

    def _upload(self, owner: str) -> Upload:
        return lambda name, table: self.residents.constant(f"transfer.{owner}.{name}", table)

    @cached_property
    def request_slots(self) -> int | None:
        """Request slots of the state rings; None where this stage has no ring."""
        rings = [f for f in self.families if f.address is Address.REQUEST_SLOT and f.layers]
        return min(self.pages[f.name] for f in rings) if rings else None
