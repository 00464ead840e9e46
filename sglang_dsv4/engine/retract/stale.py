"""Makes copies stale at each weight update, and keeps them over flushes and releases of the device's memory.

A copy holds the results of one set of weights: under other weights it must not be loaded, and its request is computed
again (see ``decode.queue``). So is one whose request ran on over an update, once the cache is flushed. A copy that
waits holds nothing of the device, so it stops no flush, update or release. The engine counts each retracted request as
work in progress: those with a copy are set aside while it asks itself whether it is idle. Trainers of reinforcement
learning pause a server, release its memory, write weights and go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.scheduler_components.flush_wrapper import SchedulerFlushWrapper
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from typing_extensions import override

from sglang_dsv4.engine.decode.recompute import without
from sglang_dsv4.engine.plain.serving import plain_of
from sglang_dsv4.engine.retract.save import copy_of, wait_for_given_pages
from sglang_dsv4.engine.state import server

_updates = itertools.count(1)


@contextmanager
def changing_weights() -> Iterator[None]:
    """Marks copies stale at a possible write of weights within. A failure counts too: it may have written a part.

    Before the write: a flush that comes with it is one of the new weights'. An empty cache stays clean.
    """
    server.wait_on_the_host()
    server.weight_version = next(_updates)
    if server.is_empty():
        server.clean_version = server.weight_version
    yield


@contextmanager
def set_aside(scheduler: Any) -> Iterator[None]:
    """Sets aside the requests with a copy within this context.

    The retracted queue of ``scheduler`` (None: there is none) then has none of them.
    """
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    aside = [req for req in queue.retracted_queue if copy_of(req) is not None] if queue is not None else []
    if not aside:
        yield
        return
    queue.retracted_queue = without(queue.retracted_queue, aside)
    try:
        yield
    finally:
        queue.retracted_queue = [*aside, *queue.retracted_queue]


def flush_cache(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs AROUND Scheduler.flush_cache, which weight updates call too; sessions go with the prefix cache."""
    with set_aside(scheduler):
        flushed = original(scheduler, *args, **kwargs)
    if not flushed:
        return flushed
    if not server.is_clean:  # nor are the copies
        server.clean_version = server.weight_version = next(_updates)
    launched = scheduler.forward_ct
    server.is_empty = lambda: bool(scheduler.forward_ct == launched)
    plain = plain_of(scheduler.token_to_kv_pool_allocator)
    if plain is not None and plain.sessions is not None:
        plain.sessions.clear("flush")
    return flushed


class FlushWrapper(SchedulerFlushWrapper):
    """Extends the stock flush with a time limit: copies that wait do not hold it up."""

    @override
    def __init__(self, *, is_fully_idle: Callable[..., bool], **callbacks: Any) -> None:
        """Takes the scheduler's own method, of which the stock wrapper asks before it flushes."""
        scheduler = is_fully_idle.__self__  # type: ignore[attr-defined]

        def is_idle_but_for_copies() -> bool:
            with set_aside(scheduler):
                return is_fully_idle()

        super().__init__(is_fully_idle=is_idle_but_for_copies, **callbacks)


class WeightUpdater(SchedulerWeightUpdaterManager):
    """Extends the stock updater: the version of the weights changes around its writes."""

    @override
    def update_weights_from_disk(self, recv_req: Any) -> Any:
        with changing_weights():
            return super().update_weights_from_disk(recv_req)

    @override
    def update_weights_from_distributed(self, recv_req: Any) -> Any:
        with changing_weights():
            return super().update_weights_from_distributed(recv_req)

    @override
    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        with changing_weights():
            return super().update_weights_from_tensor(recv_req)

    @override
    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        with changing_weights():
            return super().update_weights_from_ipc(recv_req)

    @override
    def release_memory_occupation(self, recv_req: Any) -> Any:
        """Prepares the release of the device's memory.

        The engine asserts that nothing waits, forgets the rest, and unmaps the cache before it synchronizes. Weights
        that were released are gone.
        """
        wait_for_given_pages(self.scheduler)
        with ExitStack() as stack:
            stack.enter_context(set_aside(self.scheduler))
            if not recv_req.tags or GPU_MEMORY_TYPE_WEIGHTS in recv_req.tags:
                stack.enter_context(changing_weights())
            return super().release_memory_occupation(recv_req)

    # Weights can also be written from outside, between these two calls.
    @override
    def begin_weight_update(self, recv_req: Any) -> Any:
        with changing_weights():
            return super().begin_weight_update(recv_req)

    @override
    def end_weight_update(self, recv_req: Any) -> Any:
        with changing_weights():
            return super().end_weight_update(recv_req)
