"""Asks the store for the prompts that come, and keeps those back that wait for it.

A request that waits stays in the engine's queue, where aborts and limits find it; only the pass that admits requests
does not see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_dsv4.engine.plain.serving import PlainServing, may_share, namespace
from sglang_dsv4.engine.releases import engine_release
from sglang_dsv4.engine.state import request_state
from sglang_dsv4.sessions.store import FEWEST_TOKENS


def ask(plain: PlainServing, scheduler: Any, req: Any) -> None:
    """Asks the store for a prompt that just came, unless enough of it is here."""
    tier, sessions = plain.tier, plain.sessions
    if tier is None or sessions is None or not tier.is_on or req.finished() or req.output_ids or not may_share(req):
        return
    if req.to_finish is not None or len(req.origin_input_ids) < FEWEST_TOKENS:
        return
    tree, tokens = scheduler.tree_cache, req.origin_input_ids
    waits = any(waiting is req for waiting in scheduler.waiting_queue[-1:])
    if waits:  # else it comes to a prefill server, and is not there yet
        engine_release().match(tree, req)
    limit = engine_release().match_limit(tree, req, len(tokens))
    found = sessions.longest(namespace(req), tokens, limit, req.last_node if waits else None)
    have = max(int(req.prefix_len) if waits else 0, 0 if found.point is None else found.point.tokens)
    request_state(req).ask = tier.ask(namespace(req), tokens, limit, have)
    if request_state(req).ask is not None:
        plain.asking.append(req)


@contextmanager
def kept_back(plain: PlainServing, scheduler: Any) -> Iterator[None]:
    """Takes the requests that wait for the store out of the engine's queue while it admits others."""
    plain.asking = [req for req in plain.asking if request_state(req).ask.waits]
    waiting = set(map(id, plain.asking))
    if not waiting:
        yield
        return
    before = list(scheduler.waiting_queue)
    scheduler.waiting_queue = [req for req in before if id(req) not in waiting]
    try:
        yield
    finally:
        scheduler.waiting_queue = _merged(before, scheduler.waiting_queue, waiting)


def _merged(before: list[Any], left: list[Any], waiting: set[int]) -> list[Any]:
    """Returns the queue with those that waited at their places, and the others in the order that they have now."""
    here, others, merged = set(map(id, left)), iter(left), []
    for req in before:
        if id(req) in waiting:
            merged.append(req)
        elif id(req) in here:
            merged.append(next(others))
    return [*merged, *others]
