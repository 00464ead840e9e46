"""Writes the answers of a decode server to the store, where the prefill server finds them with the next turn.

A point is kept at each page end that a running request passes; the last one is written when it finishes:

    |<- pages that the prefill server writes ->|<- pages of the answer: kept and written here ->|<- the rest ->|
    0                                        first                                     the last page end       n

Once a request is 128 tokens behind a page end, the engine frees the window before it: every second request ends without
that of its last page end. So a point is kept when its window is about to be freed, in place of the one before it. It
goes when all its units were lent to its write. Pages before ``first`` are not copied here: their keys follow from the
prompt's tokens.

Nothing is looked up or loaded: prompts come computed. Where the request was placed last, by its transfer or behind a
retract, the row has the window of the step at ``placed`` tokens alone, so no earlier page end is kept from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dsv4.cache.families import window_start
from sglang_dsv4.engine.coverage import IN_SLOTS, Part, launch, leave_store, refusal
from sglang_dsv4.engine.memory import ranks_of
from sglang_dsv4.engine.plain.serving import may_share, namespace, tokens_between
from sglang_dsv4.engine.releases import engine_release
from sglang_dsv4.engine.state import request_state
from sglang_dsv4.pools.copy_service import CopyService, whole_every
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.sessions.store import FEWEST_TOKENS, SessionStore
from sglang_dsv4.sessions.trie import Point
from sglang_dsv4.settings import read_settings

if TYPE_CHECKING:
    from sglang_dsv4.store.keys import Behind
    from sglang_dsv4.store.tier import Tier

Original = Callable[..., Any]
NAME = "dsv4_points"  # attribute of the pool
MOST_SAVES = 16  # of one pass, 5 ms of the scheduler; requests of a benchmark pass their page ends together
HASHED = 128 * 256  # prompt tokens that are hashed ahead in a pass: 0.5 ms

logger = logging.getLogger(__name__)


class DecodePoints:
    """Keeps the points of one decode server's running requests. The scheduler thread owns it."""

    def __init__(self, pool: TokenToKVPool, host: CopyService, sessions: SessionStore) -> None:
        """Starts with none. tier: to be set; it writes them."""
        self.pool, self.host, self.sessions = pool, host, sessions
        self.tier: Tier | None = None
        self._to_hash: dict[Behind, None] = {}  # in their order

    def keep(self, req: Any, table: Any, end: int, ends: bool = False) -> None:
        """Keeps the point of ``req`` at the page end ``end``, if its window is there; an earlier one of it goes.

        table: the server's req_to_token_pool. ends: the request does. Else nothing more is kept where an earlier point
        was evicted: memory is short, and all pages of the answer would be copied again.
        """
        state = request_state(req)
        if self.tier is None or not self.tier.is_on or state.placed is None or not _may_write(req):
            return
        first = self._first(req)
        if end < max(state.placed, FEWEST_TOKENS) or end <= first:
            return
        before = state.point if state.point is not None and self.sessions.stands(state.point) else None
        if (before is not None and before.tokens >= end - first) or (state.point is not before and not ends):
            return
        if engine_release().cursor(req) > window_start(self.host.buffers.geometry, end):
            return
        if self.sessions.saves_of_pass >= MOST_SAVES:
            self.sessions.counters.add("crowded")
            return
        slots = table.req_to_token[int(req.kv.req_pool_idx), first:end]
        point = self.sessions.keep(
            self._behind(req, first), lambda behind: tokens_between(req, first + behind, end + 1), slots, behind=before
        )
        self.host.pages_in_use.wait_on_the_stream()  # its pages may be evicted before they are copied
        if point is not None:
            state.point = point
            if before is not None and point is not before:
                self.let_go(before)

    def finish(self, req: Any, table: Any) -> None:
        """Has the last point of ``req``, which ends, written, unless it was aborted."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415

        if req.finished() and not isinstance(req.finished_reason, FINISH_ABORT):
            computed = min(req.seqlen - 1, int(req.owned_kv_len()))
            self.keep(req, table, self.sessions.last_end(computed), ends=True)
            point = request_state(req).point
            if self.tier is not None and point is not None and self._first(req) + point.tokens <= computed:
                self._to_hash.pop(request_state(req).behind, None)  # its write hashes what is missing
                self.tier.write(point)
                return
        self.leave(req)

    def leave(self, req: Any) -> None:
        """Lets the point of ``req`` go: nothing of it is written."""
        state = request_state(req)
        if state.point is not None:
            self.let_go(state.point)
        self._to_hash.pop(state.behind, None)
        state.point = state.behind = None

    def let_go(self, point: Point) -> None:
        """Lets ``point`` go: a later one is kept, its units were lent to its write, or nothing of it is written."""
        self.sessions.let_go(point, "superseded")

    def end_pass(self) -> None:
        """Checks the saves of the last pass, and lets the tier write; once a pass, on every rank."""
        self.sessions.end_pass()
        if self.tier is None:
            return
        self.tier.end_pass()
        left = HASHED
        while self._to_hash and left > 0:
            behind = next(iter(self._to_hash))
            before = behind.hashed
            self.tier.keys.hash_ahead(behind, left)
            left -= behind.hashed - before
            if behind.hashed >= behind.end:
                del self._to_hash[behind]

    def end(self) -> None:
        """Lets everything go: the server takes another role."""
        self.sessions.clear("role")
        if self.tier is not None:
            self.tier.close()
        self.host.memory.cache = None

    def _first(self, req: Any) -> int:
        """Returns the last page end that the prefill server writes of the prompt of ``req``; short ones it does not."""
        first = self.sessions.last_end(len(req.origin_input_ids) - 1)
        return first if first >= FEWEST_TOKENS else 0

    def _behind(self, req: Any, first: int) -> Behind:
        from sglang_dsv4.store.keys import Behind  # noqa: PLC0415 - a server without a store has nothing of it

        state = request_state(req)
        if state.behind is None:
            state.behind = Behind(namespace(req), req.origin_input_ids, first)
            if self.host.memory.rank == 0:  # the others name no objects
                self._to_hash[state.behind] = None
        found: Behind = state.behind
        return found


def points_of(allocator: Any) -> DecodePoints | None:
    """Returns the points of the allocator's server; None unless it is a decode server with a store."""
    found: DecodePoints | None = getattr(allocator.get_kvcache(), NAME, None)
    return found


def _may_write(req: Any) -> bool:
    """Returns whether the prefill server may have the cache of ``req``; a warm-up's was never computed."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST  # noqa: PLC0415

    # The ids of an image's place say nothing of the image here.
    return req.bootstrap_host != FAKE_BOOTSTRAP_HOST and req.multimodal_inputs is None and may_share(req)


# ---------------------------------------------------------------------------------------------------------- hooks


def start_points(pool: TokenToKVPool, scheduler: Any) -> None:
    """Starts to write answers, at the start of a decode server with a store."""
    from sglang_dsv4.engine.store_start import join_store  # noqa: PLC0415

    host, algorithm = pool.host, scheduler.spec_algorithm
    reason = refusal(launch(drafts=algorithm), Part.COPIES, Part.DECODE, Part.STORE, Part.ANSWERS)
    if reason is None and host is None:
        reason = "there is no host memory for copies"
    if reason is None and host is not None and whole_every(host.buffers) != host.buffers.geometry.page_size:
        reason = IN_SLOTS
    if reason is not None or host is None:
        leave_store(reason)
        return
    sessions = SessionStore(
        host, lambda: pool.full_to_swa_index_mapping, bool(algorithm.is_eagle()),
        read_settings().sessions.most_bytes, scheduler.server_args.log_requests,
    )  # fmt: skip
    points = DecodePoints(pool, host, sessions)
    points.tier = join_store(pool, scheduler, sessions, points.let_go)
    if points.tier is None:
        points.end()
        return
    if host.counters.series:
        sessions.counters.export(ranks_of(scheduler.metrics_collector))
    setattr(pool, NAME, points)
    logger.info("store: answers are written, for the next turn on the prefill server")


def free_swa_out_of_window_slots(
    original: Original, req: Any, pre_len: int, *, req_to_token_pool: Any, token_to_kv_pool_allocator: Any,
    **arguments: Any,
) -> None:  # fmt: skip
    """Runs AROUND mem_cache.common.free_swa_out_of_window_slots: the window that goes is kept first."""
    allocator = token_to_kv_pool_allocator
    points = points_of(allocator)
    if points is not None and arguments.get("free_segment") is None:  # else another kind of window goes

        def keep_and_free(slots: Any, start_pos: int) -> None:
            points.keep(req, req_to_token_pool, start_pos + len(slots))
            allocator.free_swa_segment(slots, start_pos=start_pos)

        arguments["free_segment"] = keep_and_free
    original(
        req, pre_len, req_to_token_pool=req_to_token_pool, token_to_kv_pool_allocator=allocator, **arguments
    )  # fmt: skip


def release_kv_cache(original: Original, req: Any, tree_cache: Any, *, checkpoint: bool) -> Any:
    """Runs AROUND mem_cache.common.release_kv_cache: the point of a request that ends is written."""
    points = points_of(tree_cache.token_to_kv_pool_allocator)
    if points is not None and (req.finished() or req.to_finish is not None) and req.kv.holds_kv:
        points.finish(req, tree_cache.req_to_token_pool)
    return original(req, tree_cache, checkpoint=checkpoint)


def leave(scheduler: Any, req: Any) -> None:
    """Lets the point of a request go that was aborted, and holds no row."""
    points = points_of(scheduler.token_to_kv_pool_allocator)
    if points is not None:
        points.leave(req)


def keep_retracted(batch: Any, idx: int) -> None:
    """Keeps the last page end of a request that is about to be retracted: it comes back without that window."""
    points, req = points_of(batch.token_to_kv_pool_allocator), batch.reqs[idx]
    if points is not None and not req.finished() and req.to_finish is None:
        points.keep(req, batch.req_to_token_pool, points.sessions.last_end(req.seqlen - 1))
