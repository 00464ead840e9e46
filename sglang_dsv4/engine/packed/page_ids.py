"""A page-major pool wants page ids that are multiples of its layers: the engine's allocator counts 1, 2, 3.

Slots, page tables and the rows of each family follow from the ids. The map from full slots to window slots is made as
long as the ids reach; what counts pages or tokens keeps its numbers.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_dsv4.engine.packed.refusals import refuse
from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.pools.token_to_kv import TokenToKVPool

logger = logging.getLogger(__name__)
_process = {"page_stride": 1}  # of the pool whose pages this process sends or receives


def after_init(result: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER SWATokenToKVPoolAllocator.__init__: ids are multiples of the pool's page stride."""
    pool = allocator.get_kvcache()
    _process["page_stride"] = stride = pool.page_stride if isinstance(pool, TokenToKVPool) else 1
    if stride == 1:
        return
    refuse(pool)
    full, page = allocator.full_attn_allocator, allocator.page_size
    full.page_stride = full.step = stride  # step: what neighbours differ by, of who hands out runs of pages
    slots = (full.num_pages * stride + 1) * page
    window = allocator.full_to_swa_index_mapping
    allocator.full_to_swa_index_mapping = window.new_zeros(slots + 1)
    allocator.full_to_swa_index_mapping[-1] = -1  # it belongs to slot -1, as in the engine's own map
    allocator.clear()
    pool.register_mapping(allocator.full_to_swa_index_mapping)
    logger.info(
        "page-major pools: %d regions, page ids in steps of %d, the map to window slots takes %.2f GiB",
        len(pool.get_contiguous_buf_infos()[0]), stride, allocator.full_to_swa_index_mapping.nbytes / 2**30,
    )  # fmt: skip


def after_clear(result: Any, allocator: Any) -> None:
    """AFTER PagedTokenToKVPoolAllocator.clear: the same pages, by their ids."""
    allocator.free_pages = allocator.free_pages * getattr(allocator, "page_stride", 1)


def pages_sent(original: Any, kv_indices: torch.Tensor, page_size: int) -> Any:
    """AROUND kv_to_page_indices, on 0.5.17: pages as they are registered, which are numbered 1, 2, 3.

    Slots of the request table are full slots, int32; those that the map gave are window slots, int64, and stay.
    """
    pages, stride = original(kv_indices, page_size), _process["page_stride"]
    if stride == 1 or kv_indices.dtype == torch.int64:
        return pages
    if (pages % stride).any():
        raise IndexMismatch(f"full pages {pages[pages % stride != 0][:4]} are no multiples of {stride}")
    return pages // stride


def slots_sent(result: torch.Tensor, allocator: Any, kv_indices: torch.Tensor) -> torch.Tensor:
    """AFTER translate_kv_indices_for_transfer: full slots as their pages are registered; the same within a page."""
    stride = getattr(getattr(allocator, "full_attn_allocator", None), "page_stride", 1)
    page = allocator.page_size
    return result // (page * stride) * page + result % page if stride > 1 else result
