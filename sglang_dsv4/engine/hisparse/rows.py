"""Keeps a HiSparse request's host rows over a retract, and gives it rows on the device when it comes back.

A retract detaches the rows on entry, and a copy takes them: the engine would free them before. A finish, an
abort and a pause free them the same way, and must: only what ScheduleBatch.release_req gives away is kept, and of that
only what a copy was made of.

The engine gives hot rows (those on the device) to requests whose transfer has arrived, and asserts that each request of
a decode batch has some. A retracted one comes back another way, and so do, while one waits, arrivals: they get theirs
here. Of a history longer than the hot rows, the engine reads the newest row in a place of its own, and leaves that
empty at an admission: until the next row is made the step would read stale bytes. Here the row is loaded into it.

On a plain server a restored request has no forward of its own, as a prefill looks for the rows on the device: it joins
the decode batch, as a request does whose prompt was staged. A pass admits restored requests alone, or others alone, and
only as many as there are hot rows for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from sglang_dsv4.engine.retract.save import saved_tokens
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.pools.kept_rows import KeptRows
from sglang_dsv4.pools.token_to_kv import TokenToKVPool

if TYPE_CHECKING:
    from sglang_dsv4.engine.plain.serving import PlainServing


def detached(batch: Any, idx: int) -> AbstractContextManager[None]:
    """Detaches the host rows of a request that is released within this context; a copy of it may take them.

    A request whose rows are still being staged has none to keep.
    """
    kept, req = kept_rows_of(batch.token_to_kv_pool_allocator), batch.reqs[idx]
    if kept is None or batch.hisparse_coordinator is None or req.hisparse_staging or req.finished():
        return nullcontext()
    tokens, slot = saved_tokens(req), int(req.kv.req_pool_idx)
    stepped = not batch.hisparse_coordinator._skip_first_backup[slot]  # since it was admitted with all its rows
    return kept.detaching(slot, tokens, computed=stepped and req.kv.kv_committed_len == tokens)


def kept_rows_of(allocator: Any) -> KeptRows | None:
    """Returns the keeper of the rows of the allocator's pool; None on a server that keeps none."""
    pool = allocator.get_kvcache()
    return pool.kept_rows if isinstance(pool, TokenToKVPool) else None


def adopting(allocator: Any, copy: HostCopy | None) -> AbstractContextManager[None]:
    """Gives the request that gets pages within this context the host rows of ``copy`` again."""
    kept = kept_rows_of(allocator)
    return nullcontext() if kept is None or copy is None else kept.adopting(copy)


@contextmanager
def within_hot_rows(queue: Any, rids: Iterable[str] | None) -> Iterator[None]:
    """Hides retracted requests of ``rids`` (None: all) that have no hot rows, beside those for transfers, meanwhile.

    Not by their ids: two requests may have one, where several processes take requests.
    """
    kept = kept_rows_of(queue.token_to_kv_pool_allocator)
    if kept is None:
        yield
        return
    free = queue.token_to_kv_pool_allocator.hisparse_attn_allocator.available_size()
    count = max(0, free // kept.hot_rows - len(queue.transfer_queue.queue))
    before = queue.retracted_queue
    wanted = [req for req in before if rids is None or req.rid in rids]
    hidden = {id(req) for req in wanted[count:]}
    queue.retracted_queue = [req for req in before if id(req) not in hidden]
    try:
        yield
    finally:
        left = hidden | {id(req) for req in queue.retracted_queue}
        queue.retracted_queue = [req for req in before if id(req) in left]


def admit(queue: Any, reqs: Iterable[Any]) -> None:
    """Allocates hot rows for requests whose history lies in the host pool, and loads the newest row in its place."""
    kept = kept_rows_of(queue.token_to_kv_pool_allocator)
    if kept is None:
        return
    for req in reqs:
        kept.admit(req, int(req.kv.req_pool_idx))


def load_cpu_copy(
    original: Callable[..., Any], allocator: Any, kv_cache_cpu: Any, indices: torch.Tensor, mamba_indices: Any = None,
    req_pool_index: int | None = None,
) -> None:  # fmt: skip
    """Runs AROUND DeepSeekV4HiSparseTokenToKVPoolAllocator.load_cpu_copy.

    The engine's raises; the pool can load a copy.
    """
    if not isinstance(kv_cache_cpu, HostCopy):
        original(allocator, kv_cache_cpu, indices, mamba_indices, req_pool_index)
        return
    allocator.get_kvcache().load_cpu_copy(kv_cache_cpu, indices, req_pool_index=req_pool_index)


def would_mix(plain: PlainServing, adder: Any, restored: bool) -> bool:
    """Returns whether the pass has admitted the other kind of request already."""
    if plain.pool.kept_rows is None:
        return False
    return len(plain.admitted(adder.can_run_list)) != (len(adder.can_run_list) if restored else 0)


def lacks_hot_rows(plain: PlainServing, adder: Any) -> bool:
    """Returns whether there are no hot rows for one more restored request, beside all that have theirs to come."""
    kept = plain.pool.kept_rows
    if kept is None:
        return False
    table = adder.tree_cache.req_to_token_pool
    waiting = table.size - table.available_size() - kept.with_hot_rows
    restored = len(plain.admitted(adder.can_run_list))  # counted twice where they have their rows already
    free = adder.token_to_kv_pool_allocator.hisparse_attn_allocator.available_size()
    return bool(free < kept.hot_rows * (1 + waiting + restored))


def forget_places(allocator: Any, slots: torch.Tensor) -> None:
    """Clears the device places of ``slots``, which were just taken and have no rows on the device.

    The engine leaves some places behind where a prompt's request ends before it decodes, and takes what it finds there
    for the request's own. By then they may be another request's.
    """
    if kept_rows_of(allocator) is None:
        return
    rows = allocator.hisparse_kvcache.translate_loc_from_full_to_compressed(slots)
    allocator.full_to_hisparse_device_index_mapping[rows] = 0


def make_like_staged(batch: Any, coordinator: Any) -> None:
    """Makes a decode batch of restored requests as the engine makes one of staged requests: it merges both."""
    batch.hisparse_coordinator, batch.multimodal_inputs = coordinator, None
