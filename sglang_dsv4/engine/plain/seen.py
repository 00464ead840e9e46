"""Whoever watches a plain server from outside meets its lines, too: who holds KV, what is free, what a retract takes.

Used by the miniature and by tests; no server imports it.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker

from sglang_dsv4.engine.plain.lines import plain_line
from sglang_dsv4.engine.releases import LINES, engine_version, line_of

LINE = plain_line(engine_version())
_ON_0517 = line_of(engine_version()) is LINES[0]


def holds_kv(req: Any) -> bool:
    """Whether ``req`` has a row in the request table."""
    return bool(req.req_pool_idx is not None if _ON_0517 else req.kv.holds_kv)


def protected(req: Any) -> int:
    """Tokens of ``req`` whose slots are the tree's."""
    return int(req.cache_protected_len if _ON_0517 else req.kv.cache_protected_len)


def free_pages(allocator: Any) -> list[int]:
    """Page numbers that a paged allocator has to give."""
    if _ON_0517:
        return [*allocator.free_pages.tolist(), *allocator.release_pages.tolist()]
    return list(allocator.get_all_free_pages().tolist())


def token_ratio(server_args: Any) -> Any:
    """The tracker of how much of its ``max_new_tokens`` a request is expected to use."""
    if _ON_0517:
        return NewTokenRatioTracker.from_server_args(server_args)
    return NewTokenRatioTracker.from_config()


def released(batch: Any, index: int, remaining: int, server_args: Any) -> Any:
    """Release request ``index`` of ``batch`` as a retract does."""
    if _ON_0517:
        return batch.release_req(index, remaining, server_args)
    return batch.release_req(index, remaining)
