"""The engine's indexer pool cannot copy its own rows to the host: here it can."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4IndexerPool

from sglang_dsv4.cache.families import INDEX_SCALE_BYTES
from sglang_dsv4.errors import CopyMismatch, LayoutRefused
from triton_ops.get_index_k_and_s import get_index_k_and_s, put_index_k_and_s

Pair = tuple[torch.Tensor, torch.Tensor]


class IndexerPool(DeepSeekV4IndexerPool):
    """Stock pool plus ``get_cpu_copy`` / ``load_cpu_copy``; indices are locations in this pool."""

    def _value_bytes(self) -> int:
        if self.index_k_with_scale_buffer is None:
            raise LayoutRefused("split indexer buffers have no host copy")
        return self.get_bytes_per_token() - INDEX_SCALE_BYTES

    def get_cpu_copy(self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None) -> list[Pair]:
        """(key uint8 [n, 128 or 64], scale uint8 [n, 4]) for each layer, on the CPU."""
        width = self._value_bytes()
        pairs = [get_index_k_and_s(buffer, indices, self.page_size, width) for buffer in self.index_k_with_scale_buffer]
        return [(key.cpu(), scale.cpu()) for key, scale in pairs]

    def load_cpu_copy(
        self,
        kv_cache_cpu: list[Pair],
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Write such a copy to other rows. Raises CopyMismatch when the sizes differ."""
        width = self._value_bytes()
        buffers = self.index_k_with_scale_buffer
        if len(kv_cache_cpu) != len(buffers) or any(
            len(part) != len(indices) or key.shape[1] != width for key, scale in kv_cache_cpu for part in (key, scale)
        ):
            raise CopyMismatch(f"this copy does not fit {len(buffers)} layers of {len(indices)} rows of {width} bytes")
        for buffer, (key, scale) in zip(buffers, kv_cache_cpu, strict=True):
            put_index_k_and_s(buffer, indices, key.to(buffer.device), scale.to(buffer.device), self.page_size, width)
