"""A retract frees a request's host rows before the copy is made: they are detached on entry, and a copy takes them.

A finish, an abort and a pause free them the same way, and must: only what ScheduleBatch.release_req gives away is kept,
and of that only what a copy was made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dsv4.pools.kept_rows import KeptRows
from sglang_dsv4.pools.token_to_kv import TokenToKVPool


def release_req(
    original: Callable[..., Any], batch: Any, idx: int, remaing_req_count: int, *args: Any, **kwargs: Any
) -> Any:
    """AROUND ScheduleBatch.release_req. A request whose rows are still being staged has none to keep."""
    kept, req = kept_rows_of(batch.token_to_kv_pool_allocator), batch.reqs[idx]
    if kept is None or batch.hisparse_coordinator is None or req.hisparse_staging or req.finished():
        return original(batch, idx, remaing_req_count, *args, **kwargs)
    # seqlen - 1 and not the committed length: with overlap that one already counts the token in flight.
    tokens, slot = req.seqlen - 1, int(req.kv.req_pool_idx)
    stepped = not batch.hisparse_coordinator._skip_first_backup[slot]  # since it was admitted with all its rows
    with kept.detaching(slot, tokens, computed=stepped and req.kv.kv_committed_len == tokens):
        return original(batch, idx, remaing_req_count, *args, **kwargs)


def kept_rows_of(allocator: Any) -> KeptRows | None:
    """Who keeps rows for the allocator's pool; None on a server that keeps none."""
    pool = allocator.get_kvcache()
    return pool.kept_rows if isinstance(pool, TokenToKVPool) else None
