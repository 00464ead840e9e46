"""Whoever watches a plain server from outside meets its lines, too: where each keeps what a request holds, and its
helpers.

Used by the miniature and by tests; no server imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_dsv4.engine.plain.lines import plain_line
from sglang_dsv4.engine.releases import LINES, engine_version, line_of

LINE = plain_line(engine_version())
ON_0517 = line_of(engine_version()) is LINES[0]

if ON_0517:
    from sglang.srt.mem_cache.chunk_cache import SWAChunkCache
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
else:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType


def holds_kv(req: Any) -> bool:
    """Whether ``req`` has a row in the request table."""
    return bool(req.req_pool_idx is not None if ON_0517 else req.kv.holds_kv)


def allocated(req: Any) -> int:
    """Tokens of ``req`` that have slots."""
    return 0 if req.kv is None else int(req.kv.kv_allocated_len)


def protected(req: Any) -> int:
    """Tokens of ``req`` whose slots are the tree's."""
    return int(req.cache_protected_len if ON_0517 else req.kv.cache_protected_len)


def matched_slots(tree: Any, req: Any) -> torch.Tensor:
    """Full slots that the last match found for ``req``."""
    return LINE.prefix(tree, req).to(torch.int64)


def components() -> tuple[Any, Any]:
    """The tree's components of a hybrid sliding-window model: full, window."""
    return ComponentType.FULL, ComponentType.SWA


def tree_of(params: Any) -> Any:
    """The tree cache that a plain server of this model builds."""
    return SWAChunkCache(params) if ON_0517 and params.disable else UnifiedRadixCache(params)


def free_pages(allocator: Any) -> list[int]:
    """Page numbers that a paged allocator has to give."""
    if ON_0517:
        return [*allocator.free_pages.tolist(), *allocator.release_pages.tolist()]
    return list(allocator.get_all_free_pages().tolist())


def token_ratio(server_args: Any) -> Any:
    """The tracker of how much of its ``max_new_tokens`` a request is expected to use."""
    if ON_0517:
        return NewTokenRatioTracker.from_server_args(server_args)
    return NewTokenRatioTracker.from_config()


def released(batch: Any, index: int, remaining: int, server_args: Any) -> Any:
    """Release request ``index`` of ``batch`` as a retract does."""
    if ON_0517:
        return batch.release_req(index, remaining, server_args)
    return batch.release_req(index, remaining)
