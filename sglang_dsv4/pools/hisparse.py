"""The engine's HiSparse c4 pool refuses host copies: here it copies rows, which lie where a live mapping says."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import HiSparseC4DevicePool as StockHiSparseC4DevicePool

from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.pools.sub_pools import Rows, copy_layers, load_layers


class HiSparseC4DevicePool(StockHiSparseC4DevicePool):
    """Stock pool plus host copies of the c4 rows behind ``full_to_hisparse_device_index_mapping``.

    indices are compressed locations (full slot // 4), as for the stock setters. Only rows that are on the
    device now can be copied; the history that the coordinator keeps on the host is not this pool's.
    """

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        rows = self.full_to_hisparse_device_index_mapping[indices]
        unmapped = torch.nonzero(rows <= 0)
        if len(unmapped):
            where = int(unmapped[0, 0])
            raise IndexMismatch(f"compressed location {int(indices[where])} has no HiSparse device row")
        return rows

    def get_cpu_copy(self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None) -> Rows:
        """A (k_nope, k_rope, scale) triple for each layer."""
        return copy_layers(self.kv_buffer, self._rows(indices), self.page_size)

    def load_cpu_copy(
        self,
        kv_cache_cpu: Rows,
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Write such a copy to the rows that other compressed locations map to."""
        load_layers(self.kv_buffer, self._rows(indices), self.page_size, kv_cache_cpu)
