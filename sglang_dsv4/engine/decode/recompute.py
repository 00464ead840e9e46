"""Sends a request without a copy back to its prefill server, or answers it where that cannot compute it again.

When. The engine takes the last token off the request and sends it back at once. The step in flight still streams the
request then, one token short, and marks that much as sent: the token is sent again later, to the client and into the
text. Here it is held until the queue's next pass, when that step has been streamed.

Room and id. The engine asks the prefill server in the room and under the id that the request had. Right after an
admission that server may still have both open: it then forgets the second handshake when it closes the first room, and
both servers wait for each other until the client gives up; or it refuses the id as a duplicate. The engine retracts the
newest request first, so this is no rare case. Nothing is open in an unused room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from sglang_dsv4.engine.decode import points
from sglang_dsv4.engine.memory import host_of
from sglang_dsv4.engine.retract.save import copy_of
from sglang_dsv4.engine.state import SentBack, request_state

logger = logging.getLogger(__name__)
ROOMS_APART = 1 << 40
ROOMS = 1 << 63  # they travel as int64


def hold_for_recompute(queue: Any, req: Any) -> None:
    """Keeps ``req``, which was just retracted and has no copy, until ``send_held``."""
    request_state(req).held = True
    req.time_stats.set_retract_time()
    queue.hold_rebootstrap(req)


def is_held(req: Any) -> bool:
    """Returns whether ``hold_for_recompute`` keeps ``req``; an operator's pause holds requests in the same place."""
    return request_state(req).held


def send_held(queue: Any) -> None:
    """Queues the held requests at the queue's next pass: all results but the newest batch's have been streamed.

    Paused, the queue stays empty for a flush, and the engine queues the held ones when generation continues.
    """
    if queue.scheduler._engine_paused:
        return
    for req in queue.pop_held():
        queue.add(req, is_rebootstrap=True)


def prepare_recompute(req: Any) -> None:
    """Sets the attributes that the queue needs of a request for a recompute: held, or the operator's.

    Only where the prefill server's rank is known does the room change: that server knows by the room alone, and only
    for rooms that it has seen, which of its ranks has it. All ranks of a server come to the same room.
    """
    if is_held(req):
        request_state(req).held = False
        if req.output_ids:
            req.pd_rebootstrap_forced_output_id = req.output_ids.pop()
        req.pd_rebootstrap_in_progress = True
    rank = request_state(req).prefill_rank
    if rank is None:
        return
    req.disagg_prefill_dp_rank = rank
    last = request_state(req).sent_back or SentBack(req.bootstrap_room, 0)
    now = SentBack(last.first_room, last.times + 1)
    request_state(req).sent_back = now
    up = now.first_room + ROOMS_APART * now.times
    req.bootstrap_room = up if up < ROOMS else now.first_room - ROOMS_APART * now.times


def set_recompute_id(payload: dict[str, Any], req: Any) -> None:
    """Runs AFTER Req.build_rebootstrap_payload: sets a new id, and the rank."""
    sent_back = request_state(req).sent_back
    if sent_back is not None:
        payload["rid"] = f"{payload['rid']}-{sent_back.times}"
        payload["routed_dp_rank"] = req.disagg_prefill_dp_rank


def remember_rank(queue: Any, decode_req: Any) -> None:
    """Runs BEFORE DecodeTransferQueue._commit_transfer_to_req: keeps the prefill rank of the request.

    The same on all ranks; a fake transfer has none.
    """
    rank = getattr(decode_req.kv_receiver, "prefill_dp_rank", None)
    if rank is not None:
        request_state(decode_req.req).prefill_rank = rank


def handle_pd_role_switch(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Runs AROUND Scheduler.handle_pd_role_switch: refuses it while a request is held for its recompute.

    The engine asks whether it is idle, does not look there, and the queue ends with the role.
    """
    from sglang.srt.managers.io_struct import PdRoleSwitchReqOutput  # noqa: PLC0415

    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    role = scheduler.disaggregation_mode.value
    held = queue.held_rebootstrap_reqs if queue is not None else []
    if not held or recv_req.new_role.lower() == role or host_of(queue.token_to_kv_pool_allocator) is None:
        return original(scheduler, recv_req)
    message = f"instance is not idle; {len(held)} requests are held for their recompute"
    logger.warning("role switch rejected (%s to %s): %s", role, recv_req.new_role, message)
    return PdRoleSwitchReqOutput(
        success=False, message=message, old_role=role, new_role=recv_req.new_role, safe_to_restore=True
    )


logger = logging.getLogger(__name__)

NO_COPY = (
    "Retracted under decode memory pressure without a host copy of its cache, and it cannot be recomputed. "
    "Retry later; the operator can raise DSV4_HOST_GB."
)


def abort_request(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Runs AROUND Scheduler.abort_request. The engine drops copies; they are released at once, not when collected."""
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
            points.leave(scheduler, req)
    return result


def answer_without_copy(scheduler: Any, req: Any) -> None:
    """Answers 503 to a request that waits in no queue and holds nothing."""
    logger.warning("request %r: %s", req.rid, NO_COPY)
    finish_aborted(scheduler, req, NO_COPY, HTTPStatus.SERVICE_UNAVAILABLE)


def finish_aborted(scheduler: Any, req: Any, message: str, status: HTTPStatus | None = None) -> None:
    """Answers a request that is in no queue and holds nothing: it was aborted."""
    from sglang.srt.disaggregation.utils import prepare_abort  # noqa: PLC0415

    points.leave(scheduler, req)
    prepare_abort(req, message, status_code=status)
    scheduler.output_streamer.stream_output([req], req.return_logprob)


def without(reqs: Iterable[Any], removed: Iterable[Any]) -> list[Any]:
    """Returns ``reqs`` without ``removed``, by identity."""
    gone = {id(req) for req in removed}
    return [req for req in reqs if id(req) not in gone]


def contains(reqs: Iterable[Any], req: Any) -> bool:
    """Returns whether ``req`` itself is among ``reqs``."""
    return any(other is req for other in reqs)
