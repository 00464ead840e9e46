"""Adds host pages, so that kept rows never starve running requests: the stock pool has those of the cache alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool
from typing_extensions import override

from sglang_dsv4.pools.kept_rows import Rows

_more: ContextVar[int] = ContextVar("pages more than the engine asks for", default=0)


@contextmanager
def larger_by(pages: int) -> Iterator[None]:
    """Builds host pools with ``pages`` more pages within ``with``."""
    token = _more.set(pages)
    try:
        yield
    finally:
        _more.reset(token)


class PagedHostPool(DeepSeekV4PagedHostPool):
    """Extends the stock pool: it may be larger, and gives pages back to a resumed request."""

    adopts: Rows | None = None  # by the next request that gets pages
    by_rows = False  # whether a backup is of scattered rows, in any number

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if more := _more.get():
            kwargs["num_host_pages"] += more
        super().__init__(*args, **kwargs)

    @override
    def alloc_paged_token_slots(
        self,
        req_to_host_pool: torch.Tensor,
        req_to_host_pool_allocated_len: torch.Tensor,
        req_pool_idx: int,
        start_pos: int,
        num_tokens: int,
    ) -> torch.Tensor:
        """Allocates as the engine does; a resumed request gets its own pages again, and no others."""
        if self.adopts is not None:
            rows, self.adopts = self.adopts, None
            slots = rows.adopt()
            req_to_host_pool[req_pool_idx, : len(slots)] = slots.to(req_to_host_pool.device, non_blocking=True)
            req_to_host_pool_allocated_len[req_pool_idx] = len(slots)
        found: torch.Tensor = super().alloc_paged_token_slots(
            req_to_host_pool, req_to_host_pool_allocated_len, req_pool_idx, start_pos, num_tokens
        )
        return found

    @override
    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """Backs rows up as the engine does. It takes a page's count of rows for a page, so they are split."""
        if self.by_rows and len(host_indices) > 1 and len(host_indices) % self.page_size == 0:
            super().backup_from_device_all_layer(device_pool, host_indices[:1], device_indices[:1], io_backend)
            host_indices, device_indices = host_indices[1:], device_indices[1:]
        super().backup_from_device_all_layer(device_pool, host_indices, device_indices, io_backend)
