"""Keeps points of the requests that end, and loads them into the prefix tree before a next turn is admitted.

Nothing but the prefix tree gives a request its prefix. A request that waits, with a point behind the tokens that the
tree holds, has the pages and the window of the point loaded into the tree before the engine looks at it. Then the
engine's own match, admission, chunks and publishing do as for any prefix.

    |<- f: full pages that the tree has, their windows may be gone ->|<- taken, loaded, inserted ->| a: the point
                                                   |<- one SWA page ->|

At a page end nothing of a request's slot lives, and a window page that was loaded in part is safe there: a match at its
end reads the loaded rows alone. Points are kept where a next prompt can meet this one:

    the last page end of all that is computed    the next turn, when the request ends
    the last one before the prompt's last token  another answer; a chat that turns its reasoning off
    where the engine finds a branch of the tree  another prompt with the same beginning

Of a prompt of many chunks the pages are kept chunk by chunk, so that none of these saves moves a gigabyte at once.
Nothing is kept of a request that was aborted. Where very many requests end in one pass, as in a benchmark of fixed
lengths, of some only the prompt's point is kept: the pass would take as long as their saves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sglang_dsv4.cache.families import window_start
from sglang_dsv4.engine.early_send import send_what_was_loaded
from sglang_dsv4.engine.plain import room
from sglang_dsv4.engine.plain.serving import PlainServing, may_share, namespace, plain_of, tokens_between
from sglang_dsv4.engine.plain.store import ask
from sglang_dsv4.engine.releases import engine_release
from sglang_dsv4.engine.state import request_state
from sglang_dsv4.errors import AnotherRank, IndexMismatch, WindowNotMapped
from sglang_dsv4.sessions.hints import HELD, Hints, hints_of
from sglang_dsv4.sessions.order import PLAIN
from sglang_dsv4.sessions.store import FEWEST_TOKENS, SessionStore
from sglang_dsv4.sessions.trie import Point

Original = Callable[..., Any]
MOST_SAVES = 24  # of one pass, beyond which no answer is kept: 7 ms of the scheduler
MOST_PAGES = 128  # new ones of a prompt that are kept between two of its chunks: 2 ms of the link

logger = logging.getLogger(__name__)


def checkpoint_kv_cache(original: Original, req: Any, tree_cache: Any) -> Any:
    """Runs AROUND mem_cache.common.checkpoint_kv_cache: at the end of a prefill its points are kept."""
    branch = req.swa_branching_seqlen  # gone when the tree has the window there
    start = int(req.prefix_len)  # of the chunk
    result = original(req, tree_cache)
    plain = plain_of(tree_cache.token_to_kv_pool_allocator)
    # A request that came back from a copy has a window that was loaded in part.
    if plain is None or plain.sessions is None or request_state(req).restored is not None:
        return result
    # The last chunk's forward is over here. Another may be in flight, and no save is ordered behind it; where a request
    # is prefilled again with its output, there are such chunks behind its prompt, too.
    if req.extend_end >= len(req.full_untruncated_fill_ids):
        if branch is not None:
            point = _keep(plain, plain.sessions, req, tree_cache, branch)
            if point is not None and plain.tier is not None:
                plain.tier.write(point)
        _keep_own(plain, plain.sessions, req, tree_cache, req.extend_end - 1)
        if _hints(plain.sessions, req).share:
            write_final(plain, req)
        tell_node(plain.sessions, req)
        end_prompt(plain.sessions, req)
    elif start < req.extend_end:  # else it is asked again about the same chunk, for its transfer
        request_state(req).chunks.append(start)
        _keep_pages(plain, plain.sessions, req, tree_cache)
    return result


def end_prompt(store: SessionStore, req: Any) -> None:
    """Lets the pages go that were kept of the prompt of ``req``, unless its end was kept, too."""
    partial = request_state(req).partial
    if partial is not None and partial.tail is None:
        store.let_go(partial, "unfinished")
    request_state(req).chunks, request_state(req).partial, request_state(req).too_long = [], None, False


def _keep_pages(plain: PlainServing, store: SessionStore, req: Any, tree: Any) -> None:
    """Keeps the pages of the chunks of ``req`` whose forwards are over, at most MOST_PAGES new ones.

    The chunks in flight, and all behind them, are still being written. A prompt that finds no room as a whole takes
    none from others.
    """
    if request_state(req).too_long or not may_share(req):
        return
    chunks, in_flight = request_state(req).chunks, plain.host.context.steps_in_flight(req)
    computed = int(req.extend_end)
    if in_flight:
        computed = chunks[-in_flight] if in_flight <= len(chunks) else 0
    last = _last(store, req)
    kept = 0 if last is None else last.tokens
    end = min(store.last_end(computed), kept + MOST_PAGES * tree.page_size)
    if end <= kept:
        return
    missing = store.last_end(len(req.full_untruncated_fill_ids) - 1) - kept
    request_state(req).too_long = not store.make_room_for(missing // tree.page_size, _hints_of_part(store, req), last)
    if not request_state(req).too_long:
        request_state(req).partial = _keep(plain, store, req, tree, end, window=False) or request_state(req).partial


def _last(store: SessionStore, req: Any) -> Point | None:
    """Returns the last point of ``req`` that is still here: its own, or the one that it was looked up at."""
    found = request_state(req).found
    points = (request_state(req).point, request_state(req).partial, found and found.point)
    here = (point for point in points if point is not None and store.stands(point))
    return max(here, key=lambda point: point.tokens, default=None)


def keep_finished(plain: PlainServing, req: Any, tree: Any) -> None:
    """Keeps the last page end of a request that ends, unless it was aborted; before its cache is released."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415

    store = plain.sessions
    if store is None or not req.finished() or isinstance(req.finished_reason, FINISH_ABORT):
        return
    computed = min(req.seqlen - 1, int(req.owned_kv_len()))
    if store.saves_of_pass >= MOST_SAVES and _needs_a_save(store, req, store.last_end(computed)):
        store.counters.add("crowded")
        write_final(plain, req)
        return
    _keep_own(plain, store, req, tree, computed)
    write_final(plain, req)


def write_final(plain: PlainServing, req: Any) -> None:
    """Has the last point of ``req``, which ends or shares it already, written to the store."""
    point = request_state(req).point
    if plain.tier is not None and point is not None:
        plain.tier.write(point)


def _needs_a_save(store: SessionStore, req: Any, end: int) -> bool:
    """Returns whether the page end ``end`` of ``req`` would be saved, and nobody asked to keep it."""
    last = _last(store, req)
    is_there = last is not None and last.tokens >= end
    return end >= FEWEST_TOKENS and may_share(req) and not is_there and _hints(store, req).rank not in HELD


def tell_node(store: SessionStore, req: Any) -> None:
    """Tells ``store`` where ``req`` ends in the tree: its next turn is looked up from there on."""
    if request_state(req).point is not None:
        store.lookup.remember_node(request_state(req).point, req.last_node, int(req.kv.cache_protected_len))


def _keep_own(plain: PlainServing, store: SessionStore, req: Any, tree: Any, computed: int) -> None:
    """Keeps the last page end of the first ``computed`` tokens; an earlier one of ``req`` is wanted less then."""
    before, point = request_state(req).point, _keep(plain, store, req, tree, store.last_end(computed))
    if before is not None and point not in (None, before):
        store.supersede(before)
    request_state(req).point = point or before


def _keep(plain: PlainServing, store: SessionStore, req: Any, tree: Any, end: int, window: bool = True) -> Point | None:
    """Keeps the page end ``end``, if its window is still there; without ``window`` the pages before it alone."""
    if (window and end < FEWEST_TOKENS) or not may_share(req):
        return None
    known = _last(store, req)
    is_there = known is not None and known.tokens == end and (known.tail is not None or not window)
    if is_there and store.keep_again(known, _hints(store, req)):
        return known
    if window and not engine_release().has_window(tree, req, window_start(plain.host.buffers.geometry, end), end):
        return None
    slots = tree.req_to_token_pool.req_to_token[int(req.kv.req_pool_idx), :end]
    hints = _hints(store, req) if window else _hints_of_part(store, req)
    point = store.keep(namespace(req), lambda first: tokens_between(req, first, end + 1), slots, hints, known, window)
    plain.host.pages_in_use.wait_on_the_stream()  # its pages may be evicted before they are copied
    return point


def _hints_of_part(store: SessionStore, req: Any) -> Hints:
    """Returns the hints for the pages of a prompt before its end: never beyond a plain session's."""
    hints = _hints(store, req)
    return hints if hints.rank < PLAIN.rank else PLAIN


def _hints(store: SessionStore, req: Any) -> Hints:
    """Returns the hints of ``req``, read and counted at the first call."""
    state = request_state(req)
    if state.hints is None:
        state.hints = hints_of(req.kv_hints, req.sampling_params.custom_params, store.has_store)
        store.counters.hinted(state.hints.outcomes)
    return state.hints


# ------------------------------------------------------------------------------------------------------ admission


def go_on(plain: PlainServing, store: SessionStore, adder: Any, req: Any) -> None:
    """Loads the last point of a waiting request into the tree, where that is more than the tree has of it.

    Only if the engine would admit the request then: by its own inequalities.
    """

    def fits(point: Point, full: int) -> bool:
        return room.fits(adder, req, full, adder.page_size, len(req.full_untruncated_fill_ids) - point.tokens)

    _load(plain, store, adder.tree_cache, req, fits)


def after_add_request(result: Any, scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    """Runs AFTER Scheduler._add_request_to_queue: a request that asks for it is loaded before its admission."""
    plain = plain_of(scheduler.token_to_kv_pool_allocator)
    if plain is None or plain.sessions is None:
        return
    if _hints(plain.sessions, req).prefetch:
        plain.to_prefetch.append(req)
    if plain.tier is not None:
        ask(plain, scheduler, req)


def prefetch(plain: PlainServing, store: SessionStore, scheduler: Any) -> None:
    """Loads the points of requests that ask for it, one a pass, though none may be admitted yet.

    More would hold up the batch that runs, and evict each other.
    """
    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator

    def fits(point: Point, full: int) -> bool:
        return room.can_be_freed(tree, allocator, full, tree.page_size)

    waiting = set(map(id, scheduler.waiting_queue))
    coming = set(map(id, getattr(scheduler.disagg_prefill_bootstrap_queue, "queue", ())))
    for _ in range(len(plain.to_prefetch)):
        req = plain.to_prefetch.popleft()
        if id(req) in coming:
            plain.to_prefetch.append(req)
            continue
        if id(req) not in waiting or plain.saved_of(req) is not None:
            continue  # it was admitted, or has left
        req.init_next_round_input(tree)
        if _load(plain, store, tree, req, fits):
            return


def maybe_send_cached_prefix_chunk(original: Original, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs AROUND Scheduler.maybe_send_cached_prefix_chunk of a prefill server."""
    plain = plain_of(scheduler.token_to_kv_pool_allocator)
    if plain is not None and plain.sessions is not None and plain.sessions.loaded:
        return send_what_was_loaded(original, scheduler, req, *args, **kwargs)
    return original(scheduler, req, *args, **kwargs)


def _load(plain: PlainServing, store: SessionStore, tree: Any, req: Any, fits: Callable[[Point, int], bool]) -> bool:
    """Returns whether there was a point to load; whether it was loaded is logged."""
    if req.kv.holds_kv or not may_share(req):
        return False
    point = _longest(store, req, tree)
    if point is None or point.tokens <= req.prefix_len:
        return False
    _Loading(plain, store, tree, req, point).run(fits)
    return True


def _longest(store: SessionStore, req: Any, tree: Any) -> Point | None:
    """Returns the last point of ``req``; it is looked up again only where there may be another."""
    known, tokens = request_state(req).found, req.full_untruncated_fill_ids
    limit = engine_release().match_limit(tree, req, len(tokens))
    if known is None or not store.lookup.is_current(namespace(req), known, limit):
        known = request_state(req).found = store.lookup.longest(namespace(req), tokens, limit, req.last_node, known)
        if known.point is not None:
            store.lookup.remember_node(known.point, req.last_node, int(req.prefix_len))
    return known.point


def tell_tiers(reqs: Iterable[Any]) -> None:
    """Moves tokens that sessions brought back from the device's to the host's in ``cached_tokens_details``.

    The engine has counted them with a request's first chunk, and counts no later one.
    """
    for req in reqs:
        before, request_state(req).on_device = request_state(req).on_device, None
        if before is not None and not req.retracted_stain:
            host = max(0, req.cached_tokens_device - before)
            req.cached_tokens_device -= host
            if request_state(req).from_store:
                req.cached_tokens_storage += host
            else:
                req.cached_tokens_host += host


class _Loading:
    """Loads a point into the prefix tree, for one waiting request."""

    def __init__(self, plain: PlainServing, store: SessionStore, tree: Any, req: Any, point: Point) -> None:
        self.plain, self.store, self.tree, self.req, self.point = plain, store, tree, req, point
        self.allocator, self.page = tree.token_to_kv_pool_allocator, tree.page_size

    def run(self, fits: Callable[[Point, int], bool]) -> None:
        """Loads, where there is room. fits: of the point, and the full tokens to be taken."""
        before, end = int(self.req.prefix_len), self.point.tokens
        with engine_release().full_pages(self.tree, self.req, end) as known:
            first = min(known.shape[0] // self.page, end // self.page - 1)  # the last page brings its window
            held = known[: first * self.page]
            if not fits(self.point, end - len(held)):
                return
            room.make_room(self.tree, self.allocator, end - len(held), self.page)
            nbytes = self._into_new_pages(held, first)
        self.req.init_next_round_input(self.tree)  # without a load, too: to evict may have taken its window
        if nbytes is None:
            return
        if self.req.prefix_len < end:
            self._give_up("PointNotMatched", f"the prefix tree gives {self.req.prefix_len} of {end} tokens loaded")
            return
        self.store.lookup.remember_node(self.point, self.req.last_node, int(self.req.prefix_len))
        state = request_state(self.req)  # a load that was evicted before the admission is made again
        state.on_device = before if state.on_device is None else min(state.on_device, before)
        state.from_store = state.from_store or self.point.from_store
        self.store.record_hit(self.point, end - before, first, nbytes)
        if not self.store.log_saves:
            return
        logger.info(
            "request %r goes on at %d of %d tokens: the prefix tree had %d, %d pages and the window loaded, %.1f MB",
            self.req.rid, end, len(self.req.full_untruncated_fill_ids), before, end // self.page - first, nbytes / 1e6,
        )  # fmt: skip

    def _into_new_pages(self, held: torch.Tensor, first: int) -> int | None:
        """Loads pages from ``first`` on behind the slots ``held``, and gives them to the tree; None: it could not."""
        end = self.point.tokens
        taken = room.take_slots(self.allocator, held, end, end - self.page)
        if taken is None:
            self._give_up("NoRoom", f"no pages for {end} tokens of a session")
            return None
        slots = torch.cat([held, taken.to(torch.int64)])
        try:
            nbytes = self.store.load(self.point, slots, first)
        except (AnotherRank, IndexMismatch, WindowNotMapped) as error:
            self.allocator.free(taken)
            self._give_up(type(error).__name__, str(error))
            return None
        engine_release().insert(self.tree, self.req, slots, len(held), end - self.page)
        return nbytes

    def _give_up(self, reason: str, message: str) -> None:
        """Leaves the request to the engine, until another point comes; it would be loaded again in each pass."""
        request_state(self.req).found = request_state(self.req).found._replace(point=None)
        self.plain.host.counters.fallback(reason, f"request {self.req.rid!r}: {message}")
