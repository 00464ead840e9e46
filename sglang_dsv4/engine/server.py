"""What the adapters of both lines share: attaching a server's pool, saving, and dropping stale copies."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import torch

from sglang_dsv4.cache.families import Group
from sglang_dsv4.errors import HostCopyError
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.metrics import make_exporter
from sglang_dsv4.pools.copy_service import CopyService, Counts, ServerContext
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.settings import read_settings

logger = logging.getLogger(__name__)

_weight_updates = itertools.count(1)
_weights = 0


def weights_changed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND every weight update of this process. Failed ones count too: they may have written a part."""
    global _weights  # noqa: PLW0603  # one model a process
    try:
        return original(*args, **kwargs)
    finally:
        _weights = next(_weight_updates)


def weight_version() -> int:
    """Weight updates this process has seen."""
    return _weights


def attach(result: Any, queue: Any, *_: Any, **__: Any) -> None:
    """AFTER DecodePreallocQueue.__init__: reserve and pin the host memory of the target pool."""
    pool = queue.token_to_kv_pool
    if not isinstance(pool, TokenToKVPool):
        return
    scheduler = queue.scheduler
    context = ServerContext(
        min_over_ranks=min_over_ranks,
        ranks=ranks_a_machine(scheduler.server_args),
        writer_streams=lambda: forward_streams(scheduler),
        weight_version=weight_version,
    )
    host = pool.attach_host(read_settings(), context)
    if host is not None:
        export(host, getattr(scheduler, "metrics_collector", None))


RANKS = ("tp_rank", "pp_rank", "dp_rank")


def export(host: CopyService, collector: Any) -> None:
    """Give the host's counters series beside those of the engine's ``collector``, with the same ranks.

    The engine has a collector where it runs with --enable-metrics. (0.5.23 keeps the flag's resolved value
    elsewhere than in its server arguments.)
    """
    if collector is None or host.counters.listener is not None:
        return
    host.counters.listener = make_exporter(ranks_of(collector), host.memory.arena.nbytes)


def ranks_of(collector: Any) -> dict[str, str]:
    """The labels of this rank's series."""
    return {name: str(collector.labels[name]) for name in RANKS if name in collector.labels}


def ranks_a_machine(args: Any) -> int:
    """Scheduler processes that share one machine's RAM."""
    replicas = 1 if args.enable_dp_attention else args.dp_size
    return max(1, args.tp_size * args.pp_size * replicas // args.nnodes)


def forward_streams(scheduler: Any) -> tuple[torch.cuda.Stream, ...]:
    """The stream on which a finished or retracted request's last forward may still run."""
    stream = getattr(scheduler, "forward_stream", None)
    return (stream,) if scheduler.enable_overlap and isinstance(stream, torch.cuda.Stream) else ()


_NO_SUCH_GROUP = 1 << 40  # a stage without a group never limits the others


def min_over_ranks(counts: Counts | None) -> Counts | None:
    """Smallest block counts over all ranks; None when any rank has none.

    Ranks schedule in lockstep: "is there room?" must have the same answer on each, or the server hangs.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return counts
    from sglang.srt.distributed.parallel_state import get_world_group  # noqa: PLC0415

    return smallest_counts(counts, get_world_group().cpu_group)


def smallest_counts(counts: Counts | None, group: Any) -> Counts | None:
    """``min_over_ranks`` over an explicit CPU process group."""
    order = list(Group)
    mine = [0] * (len(order) + 1) if counts is None else [1, *(counts[g] or _NO_SUCH_GROUP for g in order)]
    values = torch.tensor(mine, dtype=torch.int64)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MIN, group=group)
    ok, *smallest = values.tolist()
    if not ok or counts is None:
        return None
    return {g: n if counts[g] else 0 for g, n in zip(order, smallest, strict=True)}


def host_of(allocator: Any) -> CopyService | None:
    """The attached host cache of the allocator's pool, or None: then the engine's own behaviour follows."""
    pool = allocator.get_kvcache()
    return pool.host if isinstance(pool, TokenToKVPool) else None


def save_or_fall_back(host: CopyService, save: Callable[[], None]) -> bool:
    """Run ``save``; False, counted and logged, when the copy cannot be made.

    Either way the forward in flight is drained: it may still write this request's slots, which are free from
    now on and may be filled from outside any stream.
    """
    try:
        save()
    except HostCopyError as error:
        host.counters.fallback(type(error).__name__, str(error))
        return False
    finally:
        drain(host)
    return True


def keeps_its_tokens(req: Any) -> bool:
    """False for a request given as embeddings: the engine drops its outputs at a retract and starts it over."""
    return req.input_embeds is None


def may_copy(host: CopyService, req: Any) -> bool:
    """Whether a copy of ``req`` would fit it again after the resume; counted when not."""
    if keeps_its_tokens(req):
        return True
    host.counters.fallback("InputEmbeds", f"request {req.rid} starts over after a retract")
    return False


def drain(host: CopyService) -> None:
    """Wait for what is queued on the forward stream now; no device-wide synchronize."""
    for stream in host.context.writer_streams():
        event = torch.cuda.Event()
        event.record(stream)
        event.synchronize()


def room_of(allocator: Any) -> tuple[int, int]:
    """(full, SWA) tokens of the whole pages that an empty pool has."""
    page = allocator.page_size
    return allocator.size_full // page * page, allocator.size_swa // page * page


def take_stale(queue: Any, copy_of: Callable[[Any], HostCopy | None]) -> list[Any]:
    """Remove the requests whose copy was saved under other weights from the retracted queue, and return them."""
    host = host_of(queue.token_to_kv_pool_allocator)
    if host is None:
        return []
    stale = [r for r in queue.retracted_queue if (copy := copy_of(r)) is not None and host.is_stale(copy)]
    if stale:
        queue.retracted_queue = without(queue.retracted_queue, stale)
    for req in stale:
        host.counters.fallback("StaleWeights", f"request {req.rid} was saved under other weights")
    return stale


def take_arrived(queue: Any) -> None:
    """What has arrived runs, though a copy waits.

    While a retracted request waits, the engine does not look at its transfers, so that nothing new gets memory. But
    what has arrived has its pages, and the request may wait for just these: nothing would ever move.
    """
    if not queue.retracted_queue or host_of(queue.token_to_kv_pool_allocator) is None:
        return
    scheduler = queue.scheduler
    # HiSparse servers, whose arrivals need a device buffer too, have no host memory of ours.
    scheduler.waiting_queue.extend(scheduler.disagg_decode_transfer_queue.pop_transferred())


def settle_loads(scheduler: Any, *_: Any, **__: Any) -> None:
    """BEFORE Scheduler.abort_request and pause_generation: they may take the pages of a request that has just resumed.

    Its load may still be queued, and a transfer from a prefill server, in no stream, would come before it.
    """
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    if queue is not None:
        settle(queue.token_to_kv_pool_allocator)


def settle_ending(processor: Any, batch: Any) -> None:
    """BEFORE SchedulerBatchResultProcessor.process_batch_result_prebuilt: what ends in it has only just resumed.

    It was aborted in the pass that retracted it, and its pages are given away here.
    """
    if any(req.to_finish is not None for req in batch.reqs):
        settle(processor.token_to_kv_pool_allocator)


def settle(allocator: Any) -> None:
    """Return when every load into the allocator's pool has been written."""
    host = host_of(allocator)
    if host is not None:
        host.wait_for_loads()


def without(reqs: Iterable[Any], removed: Iterable[Any]) -> list[Any]:
    """``reqs`` without ``removed``, by identity."""
    gone = {id(req) for req in removed}
    return [req for req in reqs if id(req) not in gone]


def contains(reqs: Iterable[Any], req: Any) -> bool:
    """Whether ``req`` itself is among ``reqs``."""
    return any(other is req for other in reqs)


NO_COPY = (
    "Retracted under decode memory pressure without a host copy of its cache, and it cannot be recomputed. "
    "Retry later; the operator can raise DSV4_HOST_GB."
)


def abort_waiting(queue: Any, req: Any) -> None:
    """Answer 503 to a request that waits in no queue and holds nothing."""
    logger.warning("request %s: %s", req.rid, NO_COPY)
    end(queue.scheduler, req, NO_COPY, HTTPStatus.SERVICE_UNAVAILABLE)


def end(scheduler: Any, req: Any, message: str, status: HTTPStatus | None = None) -> None:
    """Answer a request that is in no queue and holds nothing: it was aborted."""
    from sglang.srt.disaggregation.utils import prepare_abort  # noqa: PLC0415

    prepare_abort(req, message, status_code=status)
    scheduler.output_streamer.stream_output([req], req.return_logprob)
