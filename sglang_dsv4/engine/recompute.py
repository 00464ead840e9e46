"""A request without a copy is computed again by its prefill server: not too early, and in a transfer room of its own.

When. The engine takes the last token off the request and sends it back at once. The step in flight still streams the
request then, one token short, and marks that much as sent: the token is sent again later, to the client and into the
text. Here it is held until the queue's next pass, when that step has been streamed.

Room and id. The engine asks the prefill server in the room and under the id that the request had. Right after an
admission that server may still have both open: it then forgets the second handshake when it closes the first room, and
both servers wait for each other until the client gives up; or it refuses the id as a duplicate. The engine retracts the
newest request first, so this is no rare case. Nothing is open in a room that nobody has used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.engine.aborting import answer_without_copy
from sglang_dsv4.engine.attach import host_of

logger = logging.getLogger(__name__)
ROOMS_APART = 1 << 40
ROOMS = 1 << 63  # they travel as int64
HELD, SENT_BACK, RANK = "dsv4_held", "dsv4_sent_back", "dsv4_prefill_rank"  # attributes of a request


@dataclass(frozen=True)
class SentBack:
    """first_room: the one that the request came with. times: how often it was sent back."""

    first_room: int
    times: int


def hold_for_recompute(queue: Any, req: Any) -> None:
    """Keep ``req``, which was just retracted and has no copy, until ``send_held``."""
    setattr(req, HELD, True)
    req.time_stats.set_retract_time()
    queue.hold_rebootstrap(req)


def is_held(req: Any) -> bool:
    """Whether ``hold_for_recompute`` keeps ``req``; a pause of the operator holds requests in the same place."""
    return getattr(req, HELD, False)


def send_held(queue: Any) -> None:
    """Queue what is held, at the queue's next pass: all results but the newest batch's have been streamed.

    Paused, the queue stays empty for a flush, and the engine queues what is held when generation continues. A request
    whose next token exceeds even an empty pool would be computed for nothing, or stop the queue; it is answered.
    """
    if queue.scheduler._engine_paused:
        return
    for req in queue.pop_held():
        if req.seqlen > queue.room[0]:
            answer_without_copy(queue.scheduler, req)
        else:
            queue.add(req, is_rebootstrap=True)


def prepare_recompute(req: Any) -> None:
    """What the queue must find in a request that it gets for a recompute: one that was held, or one of the operator's.

    Only where the prefill server's rank is known does the room change: that server knows by the room alone, and only
    for rooms that it has seen, which of its ranks has it. All ranks of a server come to the same room.
    """
    if is_held(req):
        setattr(req, HELD, False)
        if req.output_ids:
            req.pd_rebootstrap_forced_output_id = req.output_ids.pop()
        req.pd_rebootstrap_in_progress = True
    rank = getattr(req, RANK, None)
    if rank is None:
        return
    req.disagg_prefill_dp_rank = rank
    last = getattr(req, SENT_BACK, SentBack(req.bootstrap_room, 0))
    now = SentBack(last.first_room, last.times + 1)
    setattr(req, SENT_BACK, now)
    up = now.first_room + ROOMS_APART * now.times
    req.bootstrap_room = up if up < ROOMS else now.first_room - ROOMS_APART * now.times


def set_recompute_id(payload: dict[str, Any], req: Any) -> None:
    """AFTER Req.build_rebootstrap_payload: a new id, and the rank."""
    sent_back = getattr(req, SENT_BACK, None)
    if sent_back is not None:
        payload["rid"] = f"{payload['rid']}-{sent_back.times}"
        payload["routed_dp_rank"] = req.disagg_prefill_dp_rank


def remember_rank(queue: Any, decode_req: Any) -> None:
    """BEFORE DecodeTransferQueue._commit_transfer_to_req: which rank of its prefill server computed the request.

    The same on all ranks; a fake transfer has none.
    """
    rank = getattr(decode_req.kv_receiver, "prefill_dp_rank", None)
    if rank is not None:
        setattr(decode_req.req, RANK, rank)


def handle_pd_role_switch(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND Scheduler.handle_pd_role_switch: not while a request is held for its recompute.

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
