"""Saves the retracted requests of a plain server, and keeps their copies until they are loaded or useless.

A request is saved on entry of its release, which frees its cache at once. Nothing waits for the forward in flight, or
for the save. That forward writes only position n and, with drafts, those behind it: their rows are not saved, and the
next owner of the pages is behind both in the streams.

Some requests are left to the engine, which prefills them again. While a prefill is in flight the compression state at
n = seqlen - 1 was never written: the planner keeps the state at the prefill's end, which is seqlen. Its result is
dropped, too, and with it the prompt's log probabilities. A streaming session keeps its cache across a retract.
Embeddings start over.

A waiting request may leave the engine's queue by an abort, the queue's limit, its timeout or a rejection. None of these
is hooked: before each pass ``sweep`` looks up those that are still in the queue, at no cost while no copy waits.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_dsv4.engine.plain import hicache
from sglang_dsv4.engine.retract.save import (
    copy_on_every_rank,
    keeps_its_tokens,
    reasons_of_request,
    saved_slots,
    saved_tokens,
    turned_out_wrong,
)
from sglang_dsv4.engine.state import request_state
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.pools.copy_service import CopyService
from sglang_dsv4.pools.token_to_kv import TokenToKVPool
from sglang_dsv4.sessions.store import SessionStore

if TYPE_CHECKING:
    from sglang_dsv4.store.tier import Tier

LONGEST_KEY = 256  # characters
NAME = "dsv4_plain"  # attribute of the pool


@dataclass(eq=False)
class Saved:
    """Pairs a request with its copy, from its retract on.

    matched: tokens that the tree held at its admission, None before: a copy with them has its pages and a batch, and is
    loaded before that batch runs. adopted: the sessions keep its whole pages, too.
    """

    req: Any
    copy: HostCopy
    matched: int | None = None
    adopted: bool = False


class PlainServing:
    """Keeps this package's state of one plain server. The scheduler thread owns it."""

    def __init__(self, pool: TokenToKVPool, host: CopyService, joins_decode: bool) -> None:
        """Starts with no copy.

        joins_decode: restored requests may join the decode batch without a forward of their own.
        sessions: the cache of requests that ended.
        """
        self.pool, self.host, self.joins_decode = pool, host, joins_decode
        self.sessions: SessionStore | None = None
        self.tier: Tier | None = None  # of the sessions, beyond this server
        self.asking: list[tuple[Any, Any]] = []  # requests that wait for it, and their questions
        self.kept_back: list[Any] | None = None  # those that came to wait in the pass that is under way; None: none is
        self.pass_began = 0.0  # of a server with a tier
        self.to_prefetch: deque[Any] = deque()  # requests whose sessions are to be loaded before their admission
        self._saved: dict[int, Saved] = {}  # by identity of the request, which is held here

    @property
    def count(self) -> int:
        """Counts the requests with a copy that is not loaded yet."""
        return len(self._saved)

    def keep(self, req: Any, copy: HostCopy) -> None:
        """Keeps the copy of a request that was just retracted."""
        self._saved[id(req)] = Saved(req, copy)

    def saved_of(self, req: Any) -> Saved | None:
        """Returns the request's copy, if it waits with one."""
        return self._saved.get(id(req))

    def admitted(self, reqs: Iterable[Any]) -> list[Saved]:
        """Returns the copies of those of ``reqs`` that were given their pages, and are not loaded yet."""
        found = [saved for req in reqs if (saved := self.saved_of(req)) is not None] if self.count else []
        return [saved for saved in found if saved.matched is not None]

    def all(self) -> list[Saved]:
        """Returns every copy."""
        return list(self._saved.values())

    def drop(self, saved: Saved, reason: str | None = None, message: str = "") -> None:
        """Forgets and releases a copy, loaded or not. reason: why its request is prefilled again, if it is."""
        del self._saved[id(saved.req)]
        saved.copy.release()
        if reason is not None:
            self.host.counters.fallback(reason, f"request {saved.req.rid!r} {message}")

    def end(self) -> None:
        """Releases every copy and all sessions: the server takes another role."""
        for saved in self.all():
            self.drop(saved)
        if self.sessions is not None:
            self.sessions.clear("role")
            if self.tier is not None:
                self.tier.close()
            self.host.memory.cache = None


def plain_of(allocator: Any) -> PlainServing | None:
    """Returns the state of the allocator's server; None unless its retracts go our way."""
    found: PlainServing | None = getattr(allocator.get_kvcache(), NAME, None)
    return found


def save_retracted(batch: Any, idx: int) -> None:
    """Saves a request of a plain server that is about to be released.

    A request that is to finish, as the last one, which the engine aborts when memory is out, needs no copy.
    """
    plain = plain_of(batch.token_to_kv_pool_allocator)
    req = batch.reqs[idx]
    if plain is None or req.finished() or req.to_finish is not None:
        return
    reason = next(_reasons(plain.host, req, batch.tree_cache), None)
    if reason is not None:
        plain.host.counters.fallback(*reason)
        return
    hicache.wait_for_loads(batch.tree_cache)
    slots, slot = saved_slots(req, batch.req_to_token_pool), int(req.kv.req_pool_idx)
    if plain.sessions is not None and may_share(req):
        tokens = req.origin_input_ids + req.output_ids
        with plain.sessions.pages_of(namespace(req), tokens, len(slots)) as known:
            copy = copy_on_every_rank(plain.pool, plain.host, slots, slot, known)
            plain.sessions.add_checksums(copy, known)
    else:
        copy = copy_on_every_rank(plain.pool, plain.host, slots, slot)
    if copy is not None:
        plain.keep(req, copy)
    plain.host.pages_in_use.record_writers()


def _reasons(host: CopyService, req: Any, tree: Any) -> Iterator[tuple[str, str]]:
    """Returns (reason, message) against saving a request; the same on every rank."""
    tokens = saved_tokens(req)
    yield from reasons_of_request(host, req)
    if req.session is not None and req.session.streaming:
        yield "StreamingSession", f"request {req.rid!r}: its session keeps the cache"
    restored = req.prefix_len == tokens and bool(req.output_ids)  # a chunk of one token may end a first prefill, too
    if hicache.has_storage(tree):
        yield "StorageAttached", f"request {req.rid!r}: a storage backend was attached to the hierarchical cache"
    if not (req.decode_batch_idx >= 1 or req.extend_end <= tokens or restored):
        yield "PrefillInFlight", f"request {req.rid!r} was retracted before its first step"


def sweep(plain: PlainServing, queue: Iterable[Any]) -> None:
    """Releases the copies of requests that are no longer in ``queue``, those that turned out wrong, and stale ones."""
    waiting = {id(req) for req in queue}
    for saved in plain.all():
        if id(saved.req) not in waiting or turned_out_wrong(plain.host, saved.req, saved.copy):
            plain.drop(saved)
        elif plain.host.is_stale(saved.copy):
            plain.drop(saved, "StaleWeights", "was saved under other weights")
        elif plain.sessions is not None and not saved.adopted and may_share(saved.req):
            saved.adopted = True
            tokens = saved.req.origin_input_ids + saved.req.output_ids
            plain.sessions.adopt(namespace(saved.req), tokens, saved.copy)


def may_share(req: Any) -> bool:
    """Returns whether other requests may have the cache of ``req``."""
    kept_out = req.skip_radix_cache_insert and request_state(req).restored is None  # a restored one is, while it runs
    streams = req.session is not None and req.session.streaming
    return not (kept_out or streams or req.positional_embed_overrides is not None) and keeps_its_tokens(req)


def tokens_between(req: Any, start: int, stop: int) -> Any:
    """Returns the tokens of ``req`` from position ``start`` to ``stop`` - 1, of its prompt and its answer."""
    prompt = len(req.origin_input_ids)
    return req.origin_input_ids[start:stop] + req.output_ids[max(0, start - prompt) : max(0, stop - prompt)]


def namespace(req: Any) -> tuple[str | bytes | None, str | bytes | None]:
    """Returns the name of the requests that may have each other's cache.

    The engine's tree has the keys themselves. Here a name outlives it, in memory that nobody counts: a long key, which
    is a client's, is known by its hash.
    """
    given, state = (req.extra_key, req.cache_salt), request_state(req)
    if state.namespace is None or state.namespace[0] != given:
        state.namespace = given, (_short(req.extra_key), _short(req.cache_salt))
    return state.namespace[1]


def _short(key: str | None) -> str | bytes | None:
    if key is None or len(key) <= LONGEST_KEY:
        return key
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
