"""A plain server's restored request has its c4 rows on the host, and a prefill looks for them on the device.

So it has no forward of its own: it joins the decode batch, as a request does whose prompt was staged. A pass admits
restored requests alone, or others alone; and only as many as there are hot rows for. Those who are being prefilled or
staged get theirs later, and the engine asserts then that there are some.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dsv4.engine.hisparse.retract import kept_rows_of
from sglang_dsv4.engine.plain.waiting import PlainServing


def would_mix(plain: PlainServing, adder: Any, restored: bool) -> bool:
    """Whether the pass has admitted the other kind of request already."""
    if plain.pool.kept_rows is None:
        return False
    return len(plain.admitted(adder.can_run_list)) != (len(adder.can_run_list) if restored else 0)


def lacks_hot_rows(plain: PlainServing, adder: Any) -> bool:
    """Whether there are no hot rows for one more restored request, beside all that have theirs to come."""
    kept = plain.pool.kept_rows
    if kept is None:
        return False
    table = adder.tree_cache.req_to_token_pool
    waiting = table.size - table.available_size() - kept.with_hot_rows
    restored = len(plain.admitted(adder.can_run_list))  # counted twice where they have their rows already
    free = adder.token_to_kv_pool_allocator.hisparse_attn_allocator.available_size()
    return bool(free < kept.hot_rows * (1 + waiting + restored))


def forget_places(allocator: Any, slots: torch.Tensor) -> None:
    """``slots`` were just taken, and have no rows on the device.

    The engine leaves some places behind where a prompt's request ends before it decodes, and takes what it finds there
    for the request's own. By then it may be anybody's.
    """
    if kept_rows_of(allocator) is None:
        return
    rows = allocator.hisparse_kvcache.translate_loc_from_full_to_compressed(slots)
    allocator.full_to_hisparse_device_index_mapping[rows] = 0


def make_like_staged(batch: Any, coordinator: Any) -> None:
    """A decode batch of restored requests, as the engine makes one of staged requests: it merges both, either way."""
    batch.hisparse_coordinator, batch.multimodal_inputs = coordinator, None
