"""A request that waits with a copy, or for its recompute, may be aborted: found wherever it is, its copy released."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from sglang_dsv4.engine.saving import copy_of

logger = logging.getLogger(__name__)

NO_COPY = (
    "Retracted under decode memory pressure without a host copy of its cache, and it cannot be recomputed. "
    "Retry later; the operator can raise DSV4_HOST_GB."
)


def abort_request(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND Scheduler.abort_request. The engine drops copies; they are released at once, not when collected."""
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    if queue is None:
        return original(scheduler, recv_req)

    def named(req: Any) -> bool:
        return bool(recv_req.abort_all or req.rid.startswith(recv_req.rid))

    for req in queue.pop_held(named):
        finish_aborted(scheduler, req, "Aborted by AbortReq.")
    copies = [(req, copy_of(req)) for req in queue.retracted_queue]
    result = original(scheduler, recv_req)
    for req, copy in copies:
        if copy is not None and not contains(queue.retracted_queue, req):
            copy.release()
    return result


def answer_without_copy(scheduler: Any, req: Any) -> None:
    """Answer 503 to a request that waits in no queue and holds nothing."""
    logger.warning("request %r: %s", req.rid, NO_COPY)
    finish_aborted(scheduler, req, NO_COPY, HTTPStatus.SERVICE_UNAVAILABLE)


def finish_aborted(scheduler: Any, req: Any, message: str, status: HTTPStatus | None = None) -> None:
    """Answer a request that is in no queue and holds nothing: it was aborted."""
    from sglang.srt.disaggregation.utils import prepare_abort  # noqa: PLC0415

    prepare_abort(req, message, status_code=status)
    scheduler.output_streamer.stream_output([req], req.return_logprob)


def without(reqs: Iterable[Any], removed: Iterable[Any]) -> list[Any]:
    """``reqs`` without ``removed``, by identity."""
    gone = {id(req) for req in removed}
    return [req for req in reqs if id(req) not in gone]


def contains(reqs: Iterable[Any], req: Any) -> bool:
    """Whether ``req`` itself is among ``reqs``."""
    return any(other is req for other in reqs)
