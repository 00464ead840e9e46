"""Copies single rows of the engine's sub-pools to the host and back: kv rows, indexer rows, states.

Pageable copies, one gather a layer. Whole requests go through the aggregate pool, ``token_to_kv``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool as StockCompressStatePool
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4IndexerPool, DeepSeekV4SingleKVPool

from sglang_dsv4.cache.families import INDEX_SCALE_BYTES
from sglang_dsv4.errors import CopyMismatch, IndexMismatch, LayoutRefused
from triton_ops.planar_rows import get_index_k_and_s, get_k_and_s, put_index_k_and_s, put_k_and_s

NOPE_BYTES = 448  # the first part of a kv row
Rows = list[tuple[torch.Tensor, ...]]  # the parts of the rows, for each layer


def require_inside(rows: torch.Tensor, end: int, what: str) -> None:
    """Raises IndexMismatch for the first of ``rows`` that is not in 0..``end`` - 1; waits for their device."""
    bad = torch.nonzero((rows < 0) | (rows.long() >= end))
    if len(bad):
        raise IndexMismatch(f"{what} {int(rows[bad[0, 0]])} is outside 0..{end - 1}")


class _RowCopies:
    """Adds host copies of rows to a stock pool; indices are locations in THIS pool, no full-pool slots.

    A pool gives the buffers of its layers, the ops on rows of one, and the bytes of a row's first part.
    """

    page_size: int
    _read: Callable[..., tuple[torch.Tensor, ...]]
    _write: Callable[..., None]

    def _layers(self) -> tuple[list[torch.Tensor], int]:
        """Returns the layers' buffers, and the bytes of a row's first part. Raises LayoutRefused."""
        raise NotImplementedError

    def _sizes(self, width: int) -> tuple[int, ...]:
        """Returns the arguments of the ops behind their tensors."""
        return (self.page_size,)

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns the rows of the buffers at ``indices``. Raises IndexMismatch."""
        require_inside(indices, len(self._layers()[0][0]) * self.page_size, "row")
        return indices.contiguous()

    def get_cpu_copy(self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None) -> Rows:
        """Copies rows to the CPU: their parts for each layer. Raises IndexMismatch, LayoutRefused for other parts."""
        buffers, width = self._layers()
        rows, sizes = self._rows(indices), self._sizes(width)
        gathered = [self._read(buffer, rows, *sizes) for buffer in buffers]
        return [tuple(part.cpu() for part in parts) for parts in gathered]

    def load_cpu_copy(
        self,
        kv_cache_cpu: Rows,
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Writes a copy to other rows. Raises IndexMismatch, or CopyMismatch when the parts differ; nothing is written.

        Of rows that are named twice either may stay.
        """
        buffers, width = self._layers()
        rows, sizes = self._rows(indices), self._sizes(width)
        wanted = [(part.dtype, (len(rows), *part.shape[1:])) for part in self._read(buffers[0], rows[:0], *sizes)]
        if [[(part.dtype, part.shape) for part in parts] for parts in kv_cache_cpu] != [wanted] * len(buffers):
            raise CopyMismatch(f"this copy does not fit {len(buffers)} layers of {len(rows)} rows of {width} bytes")
        for buffer, parts in zip(buffers, kv_cache_cpu, strict=True):
            self._write(buffer, rows, *(part.to(buffer.device) for part in parts), *sizes)


class SingleKVPool(_RowCopies, DeepSeekV4SingleKVPool):
    """Copies kv rows: (k_nope fp8 [n, 448], k_rope bf16 [n, 64], scale uint8 [n, 8]) for each layer."""

    _read, _write = staticmethod(get_k_and_s), staticmethod(put_k_and_s)

    def _layers(self) -> tuple[list[torch.Tensor], int]:
        """Refuses rows of V4.1: they have other parts and would be cut in the wrong places, both ways."""
        layout = getattr(self, "kv_layout", None)
        if layout is not None and layout.value != "v4":
            raise LayoutRefused(f"{layout.value} rows have no k_nope, k_rope and scale; copy whole requests instead")
        return self.kv_buffer, NOPE_BYTES


class IndexerPool(_RowCopies, DeepSeekV4IndexerPool):
    """Copies indexer rows: (key uint8 [n, 128 or 64], scale uint8 [n, 4]) for each layer."""

    _read, _write = staticmethod(get_index_k_and_s), staticmethod(put_index_k_and_s)

    def _layers(self) -> tuple[list[torch.Tensor], int]:
        if self.index_k_with_scale_buffer is None:
            raise LayoutRefused("split indexer buffers have no host copy")
        return self.index_k_with_scale_buffer, self.get_bytes_per_token() - INDEX_SCALE_BYTES

    def _sizes(self, width: int) -> tuple[int, ...]:
        return self.page_size, width


class CompressStatePool(StockCompressStatePool):
    """Adds host copies to the stock pool; indices are state rows of this pool.

    Rows must be distinct: a ring row written twice with different values would keep either. The last row is
    the engine's empty sentinel and is never copied.
    """

    def _check(self, indices: torch.Tensor) -> None:
        rows = indices.to("cpu", torch.int64)
        require_inside(rows, self.kv_score_buffer.kv_score.shape[0] - 1, "state row")  # the last is the sentinel
        if len(torch.unique(rows)) != len(rows):
            raise IndexMismatch("duplicate state rows: copy live rows only, each once")

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> torch.Tensor:
        """Copies rows to the CPU: ``[n, last_dim]`` in the pool's dtype."""
        self._check(indices)
        return self.kv_score_buffer.kv_score[indices.long()].cpu()

    def load_cpu_copy(
        self,
        kv_cache_cpu: torch.Tensor,
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Writes a copy to other rows. Raises CopyMismatch when shape or dtype differ."""
        self._check(indices)
        state = self.kv_score_buffer.kv_score
        if kv_cache_cpu.shape != (len(indices), state.shape[1]) or kv_cache_cpu.dtype != state.dtype:
            raise CopyMismatch(f"rows {tuple(kv_cache_cpu.shape)} of {kv_cache_cpu.dtype} do not fit this pool")
        state[indices.long()] = kv_cache_cpu.to(state.device)
