"""A request that is computed again: not before its last step was streamed, and in a transfer room of its own.

When. The engine takes the last token off the request and sends it back at once. The step in flight still streams the
request then, one token short, and marks that much as sent: the token is sent again later, to the client and into the
text. Here it waits until the queue's next pass, when that step has been streamed.

Room and id. The engine asks the prefill server in the room and under the id that the request had. Right after an
admission that server may still have both open: it then forgets the second handshake when it closes the first room, and
both servers wait for each other until the client gives up; or it refuses the id as a duplicate. The engine retracts the
newest request first, so this is no rare case. Nothing is open in a room that nobody has used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_dsv4.engine.server import abort_waiting, end, room_of, settle_loads, without

ROOMS_APART = 1 << 40
ROOMS = 1 << 63  # they travel as int64
WAITS, SENT_BACK, RANK = "dsv4_waits", "dsv4_sent_back", "dsv4_prefill_rank"  # attributes of a request


@dataclass(frozen=True)
class SentBack:
    """first_room: the one that the request came with. times: how often it was sent back."""

    first_room: int
    times: int


def hold(queue: Any, req: Any) -> None:
    """Keep ``req``, which was just retracted and has no copy, until ``send_waiting``."""
    setattr(req, WAITS, True)
    queue.hold_rebootstrap(req)


def send_waiting(queue: Any) -> None:
    """Queue what ``hold`` kept, at the queue's next pass: all results but the newest batch's have been streamed.

    Paused, the queue stays empty for a flush, and the engine queues what is held when generation continues. One that
    the pool never has room for, with the engine's reserve for decoding, would stop the queue for ever; it is answered.
    """
    waiting = _waiting(queue)
    if not waiting or queue.scheduler._engine_paused:
        return
    queue.held_rebootstrap_reqs = without(queue.held_rebootstrap_reqs, waiting)
    room, _ = room_of(queue.token_to_kv_pool_allocator)
    for req in waiting:
        if queue._prealloc_required_tokens(req)[0] > room:
            abort_waiting(queue, req)
        else:
            queue.add(req, is_rebootstrap=True)


def before_abort(scheduler: Any, recv_req: Any) -> None:
    """BEFORE Scheduler.abort_request, which looks for requests in every queue but where they are held."""
    settle_loads(scheduler)
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    if queue is None:
        return
    gone = [req for req in _waiting(queue) if recv_req.abort_all or req.rid.startswith(recv_req.rid)]
    queue.held_rebootstrap_reqs = without(queue.held_rebootstrap_reqs, gone)
    for req in gone:
        end(scheduler, req, "Aborted by AbortReq.")


def _waiting(queue: Any) -> list[Any]:
    return [req for req in queue.held_rebootstrap_reqs if getattr(req, WAITS, False)]


def send_back(req: Any) -> None:
    """What the queue must find in a request that it gets for a recompute: one that waited, or one of the operator's.

    Only where the prefill server's rank is known does the room change: that server knows by the room alone, and only
    for rooms that it has seen, which of its ranks has it. All ranks of a server come to the same room.
    """
    if getattr(req, WAITS, False):
        setattr(req, WAITS, False)
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


def rename(payload: dict[str, Any], req: Any) -> None:
    """AFTER Req.build_rebootstrap_payload: a new id, and the rank, which 0.5.17 leaves out."""
    sent_back = getattr(req, SENT_BACK, None)
    if sent_back is not None:
        payload["rid"] = f"{payload['rid']}-{sent_back.times}"
        payload["routed_dp_rank"] = req.disagg_prefill_dp_rank


def remember_rank(queue: Any, decode_req: Any) -> None:
    """BEFORE DecodeTransferQueue._commit_transfer_to_req: which rank of its prefill server computed the request.

    The same on all ranks of this server. A fake transfer has none.
    """
    rank = getattr(decode_req.kv_receiver, "prefill_dp_rank", None)
    if rank is not None:
        setattr(decode_req.req, RANK, rank)
