"""The engine's compress-state pool cannot copy its own rows to the host (one pool a layer): here it can."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool as StockCompressStatePool

from sglang_dsv4.errors import CopyMismatch, IndexMismatch


class CompressStatePool(StockCompressStatePool):
    """Stock pool plus ``get_cpu_copy`` / ``load_cpu_copy``; indices are state rows of this pool.

    Rows must be distinct: a ring row written twice with different values would keep either. The last row is
    the engine's empty sentinel and is never copied.
    """

    def _check(self, indices: torch.Tensor) -> None:
        rows = indices.to("cpu", torch.int64)
        last = self.kv_score_buffer.kv_score.shape[0] - 1
        bad = torch.nonzero((rows < 0) | (rows >= last))
        if len(bad):
            raise IndexMismatch(f"state row {int(rows[bad[0, 0]])} is the sentinel or outside 0..{last - 1}")
        if len(torch.unique(rows)) != len(rows):
            raise IndexMismatch("duplicate state rows: copy live rows only, each once")

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> torch.Tensor:
        """Rows ``[n, last_dim]`` in the pool's dtype, on the CPU."""
        self._check(indices)
        return self.kv_score_buffer.kv_score[indices.long()].cpu()

    def load_cpu_copy(
        self,
        kv_cache_cpu: torch.Tensor,
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Write such rows to other rows. Raises CopyMismatch when shape or dtype differ."""
        self._check(indices)
        state = self.kv_score_buffer.kv_score
        if kv_cache_cpu.shape != (len(indices), state.shape[1]) or kv_cache_cpu.dtype != state.dtype:
            raise CopyMismatch(f"rows {tuple(kv_cache_cpu.shape)} of {kv_cache_cpu.dtype} do not fit this pool")
        state[indices.long()] = kv_cache_cpu.to(state.device)
