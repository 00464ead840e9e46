"""A request that is computed again: in a transfer room and under an id of its own, and without saying a token twice.

Room and id. The engine asks the prefill server in the room and under the id that the request had. Right after an
admission that server may still have both open: it then forgets the second handshake when it closes the first room, and
both servers wait for each other until the client gives up; or it refuses the id as a duplicate. The engine retracts the
newest request first, so this is no rare case. Nothing is open in a room that nobody has used.

Tokens. The engine takes the last token off the request until its cache is back. The step in flight still streams the
request, one token short, and marks that much as sent: the token would be sent again, to clients and into the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# Rooms are dealt out to data-parallel ranks by their remainder: a multiple of any usual number of ranks keeps the rank.
ROOMS_APART = 8 * math.lcm(*range(1, 33))
ROOMS = 1 << 63  # they travel as int64
NAME = "dsv4_sent_back"  # attribute of a request
SENT = ("send_token_offset", "send_output_token_logprobs_offset", "cur_decode_ids_len")  # of a request: what was sent


@dataclass(frozen=True)
class SentBack:
    """What a request was before its last recompute. first_room: before the first. sent: the fields of SENT."""

    first_room: int
    times: int
    sent: tuple[int | None, ...]


def send_back(queue: Any, req: Any) -> None:
    """Before ``req`` loses its last token and is queued for its recompute. All ranks of a server choose the same room.

    Where the prefill server must be asked which of its ranks has a room, the room stays: it does not know another yet.
    """
    last = getattr(req, NAME, None)
    first_room, times = (req.bootstrap_room, 1) if last is None else (last.first_room, last.times + 1)
    setattr(req, NAME, SentBack(first_room, times, tuple(getattr(req, name, None) for name in SENT)))
    if first_room is None:
        return
    before = req.bootstrap_room
    up = first_room + ROOMS_APART * times
    req.bootstrap_room = up if up < ROOMS else first_room - ROOMS_APART * times
    if queue._resolve_prefill_dp_rank(req) is None:
        req.bootstrap_room = before


def rename(payload: dict[str, Any], req: Any) -> None:
    """AFTER Req.build_rebootstrap_payload. The engine aborts every id that begins with the one it is told."""
    last = getattr(req, NAME, None)
    if last is not None:
        payload["rid"] = f"{payload['rid']}-{last.times}"


def keep_as_sent(result: Any, queue: Any, decode_req: Any) -> None:
    """AFTER DecodeTransferQueue._commit_transfer_to_req: the token is back, and what was sent is sent."""
    last = getattr(decode_req.req, NAME, None)
    if last is None or not decode_req.is_rebootstrap:
        return
    for name, sent in zip(SENT, last.sent, strict=True):
        if sent is not None:
            setattr(decode_req.req, name, max(getattr(decode_req.req, name), sent))
