"""Admits a retracted request with the pages of its copy, so that one token is left to compute.

The prefix tree may still hold the first m of its n saved tokens. Pages for the others are taken here, before the
engine looks at the request, and it finds a prefix of n tokens. It need not be page aligned: the engine runs such rows
already, as mixed batches. The engine's memory checks for the whole prefill are made here; only then it is asked for
one token. If it turns the request away after all, the pages go back, and the copy waits for the next pass.

    |<- m: the tree's, locked ->|<- n - m: taken here, loaded ->| 1 |<- max_new ->|
                                         |<- SWA: from the page of the window's first row on ->|

Where the pool has no room and other requests run, the request waits for them. Where none runs it is the engine's:
its own rules may still let it in, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dsv4.cache.families import window_start
from sglang_dsv4.engine.hisparse import rows
from sglang_dsv4.engine.plain import hicache, room, sessions
from sglang_dsv4.engine.plain.serving import PlainServing, Saved, plain_of
from sglang_dsv4.engine.releases import engine_release

Original = Callable[..., Any]


@dataclass(frozen=True)
class Need:
    """Counts the memory to take.

    tokens: saved ones, n. full, swa: tokens of whole pages. cursor: no SWA page before it.
    """

    tokens: int
    full: int
    swa: int
    cursor: int


def add_one_req(
    original: Original, adder: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None
) -> Any:
    """Runs AROUND PrefillAdder.add_one_req."""
    plain = plain_of(adder.token_to_kv_pool_allocator)
    saved = plain.saved_of(req) if plain is not None else None
    if plain is None or saved is None:
        if plain is not None and rows.would_mix(plain, adder, restored=False):
            return _results().OTHER
        if plain is not None and plain.sessions is not None and not _pass_is_full(adder):
            sessions.go_on(plain, plain.sessions, adder, req)
        return original(adder, req, has_chunked_req, truncation_align_size)
    reason = _reason_against(plain, saved)
    if reason is None:
        if _pass_is_full(adder) or rows.would_mix(plain, adder, restored=True):
            return _results().OTHER
        if rows.lacks_hot_rows(plain, adder):
            return _results().OTHER
        admission = _Admission(plain, saved, adder)
        with adder._lock_node(req.last_node):
            if admission.take():
                result = original(adder, req, has_chunked_req, truncation_align_size)
                admission.commit_or_undo(_was_added(adder, req))
                return result
        if _others_run(adder):
            return _results().NO_TOKEN
        req.init_next_round_input(adder.tree_cache)  # to make room, HiCache may have dropped its host hit
        reason = "NoRoom", "does not fit the pool with its reserve"
    if rows.would_mix(plain, adder, restored=False):
        return _results().OTHER
    result = original(adder, req, has_chunked_req, truncation_align_size)
    if _was_added(adder, req):
        plain.drop(saved, *reason)
    return result


def _reason_against(plain: PlainServing, saved: Saved) -> tuple[str, str] | None:
    """Returns (reason, message) against loading the copy at this admission, if any."""
    tokens, matched = saved.copy.tokens, int(saved.req.prefix_len)
    if len(saved.req.full_untruncated_fill_ids) - 1 != tokens:
        return "LengthChanged", f"was saved with {tokens} tokens, and has another length now"
    if window_start(plain.host.buffers.geometry, tokens) < matched:  # the window is loaded, and would write there
        return "FewTokens", f"has {tokens - matched} tokens more than the prefix tree holds"
    return None


class _Admission:
    """Tries once to give a request the pages of its copy."""

    def __init__(self, plain: PlainServing, saved: Saved, adder: Any) -> None:
        self.release, self.saved, self.adder = engine_release(), saved, adder
        self.tree = adder.tree_cache
        self.allocator = adder.token_to_kv_pool_allocator
        self.prefix = self.release.prefix(self.tree, saved.req).to(self.allocator.device, torch.int64)
        self.need = self._need(plain.host.buffers.geometry)
        self.slots: torch.Tensor | None = None
        self.host_hit: dict[str, int] = {}

    def _need(self, geometry: Any) -> Need:
        tokens, page = self.saved.copy.tokens, geometry.page_size
        cursor = window_start(geometry, tokens) // page * page
        full, swa = (-(-(tokens - start) // page) * page for start in (len(self.prefix), cursor))
        return Need(tokens, full, swa, cursor)

    def take(self) -> bool:
        """Takes pages and prefix, if the pool has room for the request and for the engine's reserve beside it."""
        if not room.fits(self.adder, self.saved.req, self.need.full, self.need.swa, extend=1):
            return False
        room.make_room(self.tree, self.allocator, self.need.full, self.need.swa)
        self.slots = room.take_slots(self.allocator, self.prefix, self.need.tokens, self.need.cursor)
        if self.slots is None:
            return False
        rows.forget_places(self.allocator, self.slots)
        whole = torch.cat([self.prefix, self.slots.to(torch.int64)])
        if self.release.occupy(self.tree, self.saved.req, whole, self.need.cursor):
            self.host_hit = hicache.put_aside(self.saved.req)
            return True
        self.allocator.free(self.slots)
        return False

    def commit_or_undo(self, added: bool) -> None:
        """Keeps the pages if the engine has added the request to its batch; else all is as before ``take``."""
        if added:
            self.saved.matched = len(self.prefix)
            return
        hicache.give_back(self.saved.req, self.host_hit)
        self.release.vacate(self.tree, self.saved.req, self.prefix)
        assert self.slots is not None
        self.allocator.free(self.slots)


def _pass_is_full(adder: Any) -> bool:
    """Returns whether the engine would turn any request away in this pass: nothing is evicted for it."""
    most, chunk, taken = adder.prefill_max_requests, adder.rem_chunk_tokens, len(adder.can_run_list)
    if most is not None and taken >= most:
        return True
    if chunk is not None:
        return bool(chunk < engine_release().smallest_chunk(adder))
    return bool(taken and adder.page_size >= adder.rem_input_tokens)


def _others_run(adder: Any) -> bool:
    """Returns whether memory will come back by itself."""
    return bool(adder.can_run_list or (adder.running_batch is not None and adder.running_batch.reqs))


def _was_added(adder: Any, req: Any) -> bool:
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def _results() -> Any:
    from sglang.srt.managers.schedule_policy import AddReqResult  # noqa: PLC0415

    return AddReqResult
