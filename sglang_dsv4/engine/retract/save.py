"""Saves the cache of a retracted request, on every rank or on none.

The engine declares that no DeepSeek-V4 pool keeps a host copy, and recomputes each retracted request. The copy is kept
where the engine keeps those of other pools, ``req.kv.retraction_backup.cpu_tensors``, and takes their path. Only for
the backup choice ``cpu_tensor``: ``none`` keeps meaning abort and ``host_pool`` is the engine's own.

The scheduler does not wait for the save. The device's findings on a request are read in the first pass after
its retract, before the copy is used; the forward that the search may have been behind is over then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sglang_dsv4.engine.memory import host_of
from sglang_dsv4.engine.retract.choices import are_recorded
from sglang_dsv4.errors import HostCopyError, IndexMismatch, WindowNotMapped
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.pools.copy_service import CopyService
from sglang_dsv4.pools.token_to_kv import TokenToKVPool

Original = Callable[..., Any]


def saved_tokens(req: Any) -> int:
    """Counts the tokens of ``req`` that a copy holds: all but the last, whose step has not run.

    Not ``kv_committed_len``: with overlap that one already counts the token in flight.
    """
    return int(req.seqlen) - 1


def saved_slots(req: Any, table: Any) -> torch.Tensor:
    """Returns the full slots of these tokens. table: the server's req_to_token_pool."""
    slots: torch.Tensor = table.req_to_token[int(req.kv.req_pool_idx), : saved_tokens(req)]
    return slots


def save(pool: TokenToKVPool, req: Any, indices: torch.Tensor, slot: int) -> HostCopy | None:
    """Saves ``req``, whose full slots are ``indices``; returns its copy, or None, counted and logged.

    Either way its pages are given away: the forward in flight may still write them. See ``pages_in_use``.
    """
    host = pool.host
    if host is None:
        wait_for_the_device(pool)
        return None
    try:
        return copy_on_every_rank(pool, host, indices, slot) if _fits_again(host, req) else None
    finally:
        host.pages_in_use.record_writers()


def copy_on_every_rank(
    pool: TokenToKVPool, host: CopyService, indices: torch.Tensor, slot: int, saved: Sequence[int] = ()
) -> HostCopy | None:
    """Saves as ``save`` does, for a request that may be saved, and without giving its pages away.

    saved: units that hold its first pages already.
    """
    try:
        return pool.get_cpu_copy(indices, req_pool_index=slot, wait=False, saved=saved)
    except HostCopyError as error:
        host.counters.fallback(type(error).__name__, str(error))
    return None


def turned_out_wrong(host: CopyService, req: Any, copy: HostCopy) -> bool:
    """Returns whether the device found later, on any rank, that ``req`` did not lie as the engine said. Counted.

    Asked in the first pass after the retract, which all ranks of a group have in common.
    """
    if copy.search is None:
        return False
    right = True
    try:
        host.check_search(copy)
    except (IndexMismatch, WindowNotMapped) as error:
        right = False
        host.counters.fallback(type(error).__name__, f"request {req.rid!r}: {error}")
    if host.true_on_every_rank(right):
        return False
    if right:
        host.counters.fallback("AnotherRank", f"request {req.rid!r} was not saved by another rank")
    return True


def copy_of(req: Any) -> HostCopy | None:
    """Returns the request's host copy."""
    backup = req.kv.retraction_backup
    copy = backup.cpu_tensors if backup is not None else None
    return copy if isinstance(copy, HostCopy) else None


def drop_copy(req: Any) -> None:
    """Releases and forgets the request's host copy."""
    copy = copy_of(req)
    if copy is not None:
        copy.release()
        req.kv.retraction_backup = None


def backup_kv_cache(
    original: Original,
    req: Any,
    tree_cache: Any,
    req_to_token_pool: Any,
    token_to_kv_pool_allocator: Any,
    backend: str,
) -> bool:
    """Runs AROUND mem_cache.common.backup_kv_cache."""
    if backend == "cpu_tensor" and host_of(token_to_kv_pool_allocator) is not None:
        from sglang.srt.mem_cache.common import RetractionBackup  # noqa: PLC0415

        drop_copy(req)
        pool, slots = token_to_kv_pool_allocator.get_kvcache(), saved_slots(req, req_to_token_pool)
        copy = save(pool, req, slots, int(req.kv.req_pool_idx))
        if copy is not None:
            req.kv.retraction_backup = RetractionBackup(cpu_tensors=copy)
            # The prefill server's digest was checked when the request began to decode; its last page has grown since.
            # An engine that keeps the digest would compare again at the resume, and abort.
            req.expected_kv_checksum = 0
            return True
    return bool(original(req, tree_cache, req_to_token_pool, token_to_kv_pool_allocator, backend))


def keeps_its_tokens(req: Any) -> bool:
    """Returns whether its tokens outlast a retract.

    False for a request given as embeddings: the engine drops its outputs and starts it over.
    """
    return req.input_embeds is None


def reasons_of_request(host: CopyService, req: Any) -> Iterator[tuple[str, str]]:
    """Returns (reason, message) against saving ``req`` on any server; the same on every rank."""
    if host.buffers.folded and host.context.steps_in_flight(req):
        yield "StepInFlight", f"request {req.rid!r}: the step in flight writes the one state row that a copy needs"
    if not keeps_its_tokens(req):
        yield "InputEmbeds", f"request {req.rid!r} starts over after a retract"
    if are_recorded() and not host.context.host_rows and (req.return_routed_experts or req.return_indexer_topk):
        yield (
            "ChoicesBySlot",
            f"request {req.rid!r} returns expert or indexer choices, which the copies of a pipeline do not have",
        )


def _fits_again(host: CopyService, req: Any) -> bool:
    """Returns whether a copy of ``req`` would fit it again after the resume; counted when not."""
    reason = next(reasons_of_request(host, req), None)
    if reason is not None:
        host.counters.fallback(*reason)
    return reason is None


def wait_for_the_device(pool: TokenToKVPool) -> None:
    """Waits for the forward in flight where its stream is not known: there is no host memory."""
    device = torch.device(pool.device)
    torch.get_device_module(device).synchronize(device)


def wait_for_given_pages(scheduler: Any) -> None:
    """Waits before the device's memory is released: a save or a load may still be in it."""
    allocator = getattr(scheduler, "token_to_kv_pool_allocator", None)
    host = host_of(allocator) if allocator is not None else None
    if host is not None:
        host.pages_in_use.wait()
