"""A request that is computed again gets a transfer room and a request id of its own.

The engine asks the prefill server in the room and under the id that the request had. Right after an admission that
server may still have both open: it then forgets the second handshake when it closes the first room, and both servers
wait for each other until the client gives up; or it refuses the id as a duplicate. The engine retracts the newest
request first, so this is no rare case. Nothing is open in a room that nobody has used.
"""

from __future__ import annotations

import math
from typing import Any

# Rooms are dealt out to data-parallel ranks by their remainder: a multiple of any usual number of ranks keeps the rank.
ROOMS_APART = 8 * math.lcm(*range(1, 33))
ROOMS = 1 << 63  # they travel as int64
NAME = "dsv4_recomputes"  # attribute of a request: its first room, how often it was sent back


def take_fresh_room(queue: Any, req: Any) -> None:
    """Before ``req`` is queued for its recompute. Every rank of a server comes to the same room.

    Where the prefill server must be asked which of its ranks has a room, the room stays: it does not know another yet.
    """
    if req.bootstrap_room is None:
        return
    first, sent = getattr(req, NAME, (req.bootstrap_room, 0))
    setattr(req, NAME, (first, sent + 1))
    before = req.bootstrap_room
    up = first + ROOMS_APART * (sent + 1)
    req.bootstrap_room = up if up < ROOMS else first - ROOMS_APART * (sent + 1)
    if queue._resolve_prefill_dp_rank(req) is None:
        req.bootstrap_room = before


def rename(payload: dict[str, Any], req: Any) -> None:
    """AFTER Req.build_rebootstrap_payload. The engine aborts every id that begins with the one it is told."""
    _, sent = getattr(req, NAME, (None, 0))
    if sent:
        payload["rid"] = f"{payload['rid']}-{sent}"
