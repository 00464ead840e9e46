"""Copies c4 rows of the engine's HiSparse device pool to the host and back, through its live mapping."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import HiSparseC4DevicePool as StockHiSparseC4DevicePool

from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.pools.sub_pools import SingleKVPool, require_inside


class HiSparseC4DevicePool(SingleKVPool, StockHiSparseC4DevicePool):
    """Adds host copies of the c4 rows behind ``full_to_hisparse_device_index_mapping`` to the stock pool.

    indices are compressed locations (full slot // 4), as for the stock setters. Only rows that are on the
    device now can be copied; the history in the coordinator's host pool is not this pool's.
    """

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        mapping = self.full_to_hisparse_device_index_mapping
        require_inside(indices, len(mapping), "compressed location")
        rows = mapping[indices]
        unmapped = torch.nonzero(rows <= 0)
        if len(unmapped):
            where = int(unmapped[0, 0])
            raise IndexMismatch(f"compressed location {int(indices[where])} has no HiSparse device row")
        return rows
