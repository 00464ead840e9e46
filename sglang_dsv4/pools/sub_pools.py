"""Copies single rows of the engine's sub-pools to the host and back: kv rows, indexer rows, states.

Pageable copies, one gather a layer. Whole requests go through the aggregate pool, ``token_to_kv``.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool as StockCompressStatePool
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4IndexerPool, DeepSeekV4SingleKVPool

from sglang_dsv4.cache.families import INDEX_SCALE_BYTES
from sglang_dsv4.errors import CopyMismatch, IndexMismatch, LayoutRefused
from triton_ops.planar_rows import get_index_k_and_s, get_k_and_s, put_index_k_and_s, put_k_and_s

Rows = list[tuple[torch.Tensor, ...]]  # the parts of the rows, for each layer


def copy_layers(buffers: list[torch.Tensor], rows: torch.Tensor, page_size: int) -> Rows:
    """Copy ``rows`` to the CPU: (k_nope fp8 [n, 448], k_rope bf16 [n, 64], scale uint8 [n, 8]) for each layer."""
    gathered = [get_k_and_s(buffer, rows, page_size) for buffer in buffers]
    return [tuple(part.cpu() for part in parts) for parts in gathered]


def load_layers(buffers: list[torch.Tensor], rows: torch.Tensor, page_size: int, layers: Rows) -> None:
    """Write a result of ``copy_layers`` into other ``rows``."""
    if len(layers) != len(buffers) or any(len(part) != len(rows) for triple in layers for part in triple):
        raise CopyMismatch(f"a copy of {len(layers)} layers does not fit {len(buffers)} layers of {len(rows)} rows")
    for buffer, (nope, rope, scale) in zip(buffers, layers, strict=True):
        device = buffer.device
        put_k_and_s(buffer, rows, nope.to(device), rope.to(device), scale.to(device), page_size)


class SingleKVPool(DeepSeekV4SingleKVPool):
    """Adds host copies to the stock pool; indices are locations in THIS pool, no full-pool slots."""

    def _require_v4_rows(self) -> None:
        """Refuse rows of V4.1: they have other parts and would be cut in the wrong places, both ways."""
        layout = getattr(self, "kv_layout", None)
        if layout is not None and layout.value != "v4":
            raise LayoutRefused(f"{layout.value} rows have no k_nope, k_rope and scale; copy whole requests instead")

    def get_cpu_copy(self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None) -> Rows:
        """Copy rows to the CPU as ``copy_layers``. Raises LayoutRefused for rows of V4.1."""
        self._require_v4_rows()
        return copy_layers(self.kv_buffer, indices, self.page_size)

    def load_cpu_copy(
        self,
        kv_cache_cpu: Rows,
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Write a copy to other rows. Raises CopyMismatch when the sizes differ."""
        self._require_v4_rows()
        load_layers(self.kv_buffer, indices, self.page_size, kv_cache_cpu)


class IndexerPool(DeepSeekV4IndexerPool):
    """Adds host copies to the stock pool; indices are locations in this pool."""

    def _value_bytes(self) -> int:
        if self.index_k_with_scale_buffer is None:
            raise LayoutRefused("split indexer buffers have no host copy")
        return self.get_bytes_per_token() - INDEX_SCALE_BYTES

    def get_cpu_copy(self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None) -> Rows:
        """Copy rows to the CPU: (key uint8 [n, 128 or 64], scale uint8 [n, 4]) for each layer."""
        width = self._value_bytes()
        pairs = [get_index_k_and_s(buffer, indices, self.page_size, width) for buffer in self.index_k_with_scale_buffer]
        return [(key.cpu(), scale.cpu()) for key, scale in pairs]

    def load_cpu_copy(
        self,
        kv_cache_cpu: Rows,
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Write a copy to other rows. Raises CopyMismatch when the sizes differ."""
        width = self._value_bytes()
        buffers = self.index_k_with_scale_buffer
        if len(kv_cache_cpu) != len(buffers) or any(
            len(part) != len(indices) or key.shape[1] != width for key, scale in kv_cache_cpu for part in (key, scale)
        ):
            raise CopyMismatch(f"this copy does not fit {len(buffers)} layers of {len(indices)} rows of {width} bytes")
        for buffer, (key, scale) in zip(buffers, kv_cache_cpu, strict=True):
            put_index_k_and_s(buffer, indices, key.to(buffer.device), scale.to(buffer.device), self.page_size, width)


class CompressStatePool(StockCompressStatePool):
    """Adds host copies to the stock pool; indices are state rows of this pool.

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
        """Copy rows to the CPU: ``[n, last_dim]`` in the pool's dtype."""
        self._check(indices)
        return self.kv_score_buffer.kv_score[indices.long()].cpu()

    def load_cpu_copy(
        self,
        kv_cache_cpu: torch.Tensor,
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Write a copy to other rows. Raises CopyMismatch when shape or dtype differ."""
        self._check(indices)
        state = self.kv_score_buffer.kv_score
        if kv_cache_cpu.shape != (len(indices), state.shape[1]) or kv_cache_cpu.dtype != state.dtype:
            raise CopyMismatch(f"rows {tuple(kv_cache_cpu.shape)} of {kv_cache_cpu.dtype} do not fit this pool")
        state[indices.long()] = kv_cache_cpu.to(state.device)
