"""A restored request's batch is made: its row is known, its forward not yet launched. Its copy is loaded in between.

The load is ordered behind every forward that may still write the pages, and the next forward behind the load.
"""

from __future__ import annotations

from typing import Any

from sglang_dsv4.engine.plain.tree import keep_from_tree
from sglang_dsv4.engine.plain.waiting import PlainServing, Saved, plain_of


def after_prepare_for_extend(result: Any, batch: Any) -> None:
    """AFTER ScheduleBatch.prepare_for_extend."""
    plain = plain_of(batch.token_to_kv_pool_allocator)
    if plain is None or not plain.count:
        return
    for req in batch.reqs:
        saved = plain.saved_of(req)
        if saved is not None and saved.matched is not None:
            _load(plain, saved, saved.matched, batch.req_to_token_pool)


def _load(plain: PlainServing, saved: Saved, matched: int, table: Any) -> None:
    req, tokens = saved.req, saved.copy.tokens
    row = plain.line.row(req)
    # Pages below the match are the tree's, and others read them: computed again meanwhile, perhaps in other batches,
    # they need not even be equal.
    first_page = matched // plain.host.side.geometry.page_size
    slots = table.req_to_token[row, :tokens]
    plain.host.load(saved.copy, slots, plain.pool.full_to_swa_index_mapping, row, first_page)
    plain.drop(saved)
    plain.host.counters.spared(tokens - matched)
    keep_from_tree(req, tokens)
