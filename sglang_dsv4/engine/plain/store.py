"""Asks the store for the prompts that come, and keeps those back that wait for it.

A request that waits stays in the engine's queue, where aborts and limits find it; only the pass that admits requests
does not see it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_dsv4.engine.plain.serving import PlainServing, may_share, namespace
from sglang_dsv4.engine.releases import engine_release
from sglang_dsv4.engine.state import request_state
from sglang_dsv4.sessions.store import FEWEST_TOKENS

GLANCE = 0.004  # seconds; most answers take 2 ms
SHARE, MOST = 0.2, 0.1  # of the pass before, where nothing runs beside the prefill; seconds


def ask(plain: PlainServing, scheduler: Any, req: Any) -> None:
    """Asks the store for a prompt that just came, unless enough of it is here.

    Where it comes in the midst of a pass, as with a grammar that is ready, it is kept back from this pass, too.
    """
    tier, sessions, state = plain.tier, plain.sessions, request_state(req)
    if tier is None or sessions is None or not _may_ask(scheduler, req) or not tier.is_on:
        return
    tree, tokens = scheduler.tree_cache, req.origin_input_ids
    limit = engine_release().match_limit(tree, req, len(tokens))
    found = state.found = sessions.lookup.longest(namespace(req), tokens, limit)
    have = 0 if found.point is None else found.point.tokens
    if not tier.spared(limit, have):
        return  # before the engine's match, which takes some times as long
    req.init_next_round_input(tree)
    state.ask = tier.ask(namespace(req), tokens, limit, max(have, int(req.prefix_len)))
    if state.ask is None:
        return
    plain.asking.append((req, state.ask))
    if plain.kept_back is not None and any(one is req for one in scheduler.waiting_queue[-1:]):
        plain.kept_back.append(scheduler.waiting_queue.pop())


def _may_ask(scheduler: Any, req: Any) -> bool:
    """Returns whether ``req`` is queued, for the first time; one that was rejected is not."""
    before = request_state(req).ask
    if req.finished() or req.to_finish is not None or req.output_ids or (before is not None and before.waits):
        return False
    bootstrap = getattr(scheduler.disagg_prefill_bootstrap_queue, "queue", ())
    queued = any(one is req for one in (*scheduler.waiting_queue[-1:], *bootstrap[-1:]))
    return queued and len(req.origin_input_ids) >= FEWEST_TOKENS and may_share(req)


def glance(plain: PlainServing, scheduler: Any, running: Any) -> float:
    """Returns how many seconds of this pass may go by for answers: none without a prefill in flight.

    Else an answer comes a moment after this pass, which has nothing to launch then, and waits for that prefill. A
    prefill server, or one between the chunks of a lone prompt, gives a fifth of the pass before, which may have
    launched many layers one by one: prompts whose reads end together are launched together.
    """
    now = time.monotonic()
    took, plain.pass_began = now - plain.pass_began, now
    batch = scheduler.last_batch
    if not scheduler.enable_overlap or batch is None or not batch.forward_mode.is_extend():
        return 0.0
    least = GLANCE if (batch.extend_num_tokens or 0) >= FEWEST_TOKENS else 0.0
    decodes = not running.is_empty() or scheduler.require_mlp_sync  # others, whose steps are in time with these
    return least if decodes else max(least, min(MOST, SHARE * took))


@contextmanager
def kept_back(plain: PlainServing, scheduler: Any) -> Iterator[None]:
    """Takes the requests that wait for the store out of the engine's queue while it admits others."""
    plain.asking = [(req, ask) for req, ask in plain.asking if ask.waits]
    queue = scheduler.waiting_queue
    here = {id(req) for req in queue} if plain.asking else set()
    places = sorted(((queue.index(req), req) for req, _ in plain.asking if id(req) in here), key=lambda one: one[0])
    for place, _ in reversed(places):
        del queue[place]
    visible, plain.kept_back = len(queue), []
    try:
        yield
    finally:
        left, late = scheduler.waiting_queue, plain.kept_back
        gone, plain.kept_back = max(0, visible - len(left)), None
        for least, (place, req) in enumerate(places):  # they keep their places before those that came behind them
            left.insert(max(least, place - gone), req)
        left += late
