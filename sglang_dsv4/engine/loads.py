"""A request may end right after its resume, with its load still queued: its pages must not go elsewhere before that.

A transfer from a prefill server is in no stream. Into pages given away too early it would write first, and the load
would overwrite it.
"""

from __future__ import annotations

from typing import Any

from sglang_dsv4.engine.attach import host_of


def wait_for_loads(allocator: Any) -> None:
    """Return when every load into the allocator's pool has been written."""
    host = host_of(allocator)
    if host is not None:
        host.wait_for_loads()


def before_prebuilt_result(processor: Any, batch: Any) -> None:
    """BEFORE SchedulerBatchResultProcessor.process_batch_result_prebuilt: what ends in it has only just resumed.

    It was aborted in the pass that retracted it, and its pages are given away here.
    """
    if any(req.to_finish is not None for req in batch.reqs):
        wait_for_loads(processor.token_to_kv_pool_allocator)


def before_pause(scheduler: Any, recv_req: Any) -> None:
    """BEFORE Scheduler.pause_generation, which may retract what has just resumed."""
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    if queue is not None:
        wait_for_loads(queue.token_to_kv_pool_allocator)
