"""Whoever enters a decode batch of a HiSparse server needs hot rows on the device; the engine asserts that it has.

It gives them to requests whose transfer has arrived. A retracted one comes back another way, and so do, while one
waits, arrivals (see ``prealloc_queue``): they get theirs here.

Of a history longer than the hot rows, the engine reads the newest row in a place of its own, and leaves that empty at
an admission: until the next row is made the step would read what lay there. Here the row is loaded into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sglang_dsv4.engine.hisparse.retract import kept_rows_of
from sglang_dsv4.hostmem.memory import HostCopy


def adopting(allocator: Any, copy: HostCopy | None) -> AbstractContextManager[None]:
    """Within this, the request that gets pages has the host rows of ``copy`` again."""
    kept = kept_rows_of(allocator)
    return nullcontext() if kept is None or copy is None else kept.adopting(copy)


def within_hot_rows(queue: Any, rids: Iterable[str] | None) -> Any:
    """The ids of ``rids`` (None: all) that may resume now: for each there are hot rows, beside those for transfers."""
    kept = kept_rows_of(queue.token_to_kv_pool_allocator)
    if kept is None:
        return rids
    free = queue.token_to_kv_pool_allocator.hisparse_attn_allocator.available_size()
    count = free // kept.hot_rows - len(queue.transfer_queue.queue)
    wanted = [req.rid for req in queue.retracted_queue if rids is None or req.rid in rids]
    return wanted[: max(0, count)]


def admit(queue: Any, reqs: Iterable[Any]) -> None:
    """Hot rows for requests whose history lies in the host pool, and the newest row in its place."""
    kept = kept_rows_of(queue.token_to_kv_pool_allocator)
    if kept is None:
        return
    for req in reqs:
        kept.admit(req, int(req.kv.req_pool_idx))


def load_cpu_copy(
    original: Callable[..., Any], allocator: Any, kv_cache_cpu: Any, indices: torch.Tensor, mamba_indices: Any = None,
    req_pool_index: int | None = None,
) -> None:  # fmt: skip
    """AROUND DeepSeekV4HiSparseTokenToKVPoolAllocator.load_cpu_copy, which raises: the pool can load a copy."""
    if not isinstance(kv_cache_cpu, HostCopy):
        original(allocator, kv_cache_cpu, indices, mamba_indices, req_pool_index)
        return
    allocator.get_kvcache().load_cpu_copy(kv_cache_cpu, indices, req_pool_index=req_pool_index)
