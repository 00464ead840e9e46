"""A waiting request leaves by an abort, the queue's limit, its timeout, a rejection: its copy must not outlive it.

The engine has a place for each of these, and more will come. So none is hooked: before each pass, who is still in the
queue is looked up, which costs nothing while no copy waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_dsv4.engine.plain.waiting import PlainServing
from sglang_dsv4.engine.saving import turned_out_wrong


def sweep(plain: PlainServing, queue: Iterable[Any]) -> None:
    """Release the copies of requests that are no longer in ``queue``, those that turned out wrong, and stale ones."""
    if not plain.count:
        return
    waiting = {id(req) for req in queue}
    for saved in plain.all():
        if id(saved.req) not in waiting or turned_out_wrong(plain.host, saved.req, saved.copy):
            plain.drop(saved)
        elif plain.host.is_stale(saved.copy):
            plain.drop(saved, "StaleWeights", "was saved under other weights")
