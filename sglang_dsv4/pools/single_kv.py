"""The engine's SingleKV pool (swa, c4 and c128 kv) cannot copy its own rows to the host: here it can."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4SingleKVPool

from sglang_dsv4.errors import CopyMismatch, LayoutRefused
from triton_ops.get_k_and_s import get_k_and_s, put_k_and_s

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def copy_layers(buffers: list[torch.Tensor], rows: torch.Tensor, page_size: int) -> list[Triple]:
    """(k_nope fp8 [n, 448], k_rope bf16 [n, 64], scale uint8 [n, 8]) of ``rows``, a triple a layer, on the CPU."""
    triples = [get_k_and_s(buffer, rows, page_size) for buffer in buffers]
    return [(nope.cpu(), rope.cpu(), scale.cpu()) for nope, rope, scale in triples]


def load_layers(buffers: list[torch.Tensor], rows: torch.Tensor, page_size: int, layers: list[Triple]) -> None:
    """Write what ``copy_layers`` returned into other ``rows``."""
    if len(layers) != len(buffers) or any(len(part) != len(rows) for triple in layers for part in triple):
        raise CopyMismatch(f"a copy of {len(layers)} layers does not fit {len(buffers)} layers of {len(rows)} rows")
    for buffer, (nope, rope, scale) in zip(buffers, layers, strict=True):
        device = buffer.device
        put_k_and_s(buffer, rows, nope.to(device), rope.to(device), scale.to(device), page_size)


class SingleKVPool(DeepSeekV4SingleKVPool):
    """Stock pool plus ``get_cpu_copy`` / ``load_cpu_copy`` over rows of this pool.

    indices are locations in THIS pool (not full-pool slots). Pageable copies, one gather a layer: for whole
    requests use the aggregate pool.
    """

    def _require_v4_rows(self) -> None:
        """Other rows have no such parts: they would be cut in the wrong places, and loaded so too."""
        layout = getattr(self, "kv_layout", None)
        if layout is not None and layout.value != "v4":
            raise LayoutRefused(f"{layout.value} rows have no k_nope, k_rope and scale; copy whole requests instead")

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> list[Triple]:
        """A (k_nope, k_rope, scale) triple for each layer; see ``copy_layers``. Raises LayoutRefused for other rows."""
        self._require_v4_rows()
        return copy_layers(self.kv_buffer, indices, self.page_size)

    def load_cpu_copy(
        self,
        kv_cache_cpu: list[Triple],
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Write such a copy to other rows. Raises CopyMismatch when the sizes differ."""
        self._require_v4_rows()
        load_layers(self.kv_buffer, indices, self.page_size, kv_cache_cpu)
