"""Takes the result of the step in flight before a retract, on servers with online compression.

There a request's open block of 128 tokens is one state row, which each step writes in place. With the overlap scheduler
a step is still in flight at a retract: its row would be one token late beside the n = seqlen - 1 tokens of a copy. Such
a copy is valid bytes, so that DSV4_VERIFY cannot see it. Once the step's result is taken, seqlen counts its token.
"""

from __future__ import annotations

from typing import Any

from sglang_dsv4.pools.copy_service import CopyService


def has_step(scheduler: Any, req: Any) -> bool:
    """Returns whether a step of ``req`` was launched whose result the scheduler has not taken."""
    return any(running is req for batch, _ in scheduler.result_queue for running in batch.reqs)


def take_results(scheduler: Any) -> None:
    """Takes the queued results as a pause does: the scheduler's loop must not look for them afterwards."""
    if not scheduler.result_queue:
        return
    while scheduler.result_queue:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
    scheduler.last_batch = None


def spares_the_retract(host: CopyService, batch: Any) -> bool:
    """Takes the step in flight where copies need it; whether the requests that it ended left memory enough.

    Ranks that retract together have the same queue and the same memory, so that each decides alike.
    """
    if not host.buffers.folded:
        return False
    short = not batch.check_decode_mem()
    host.context.take_results()
    batch.filter_batch()
    return batch.is_empty() or (short and bool(batch.check_decode_mem()))
