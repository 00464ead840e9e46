"""A plain server's retract frees a request's cache at once, and the engine keeps nothing: it is saved on entry.

Nothing waits for the forward in flight, or for the save. That forward writes only position n and, with drafts, those
behind it: their rows are not saved, and whoever gets the pages next is behind both in the streams.

Some requests are left to the engine, which prefills them again. While a prefill is in flight the compression state at
n = seqlen - 1 was never written: the planner keeps the state at the prefill's end, which is seqlen. Its result is
dropped, too, and with it what only a prefill tells the client, such as the prompt's log probabilities. A streaming
session keeps its cache across a retract. Expert and indexer choices are recorded by cache slot. Embeddings start over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_dsv4.engine.plain.waiting import PlainServing, plain_of
from sglang_dsv4.engine.saving import copy_on_every_rank, reasons_of_request


def before_release_req(batch: Any, idx: int, remaing_req_count: int, *_: Any, **__: Any) -> None:
    """BEFORE ScheduleBatch.release_req: a retract, or a preemption by priority. A pause does not come by here.

    A request that is to finish, such as the last one, which the engine aborts when memory is out, needs no copy.
    """
    plain = plain_of(batch.token_to_kv_pool_allocator)
    req = batch.reqs[idx]
    if plain is None or req.finished() or req.to_finish is not None:
        return
    reason = next(_reasons(req), None)
    if reason is not None:
        plain.left_to_engine(*reason)
        return
    _save(plain, req, batch.req_to_token_pool)


def _save(plain: PlainServing, req: Any, table: Any) -> None:
    # seqlen - 1 and not kv_committed_len: with overlap that one already counts the token in flight.
    row = int(req.kv.req_pool_idx)
    slots = table.req_to_token[row, : req.seqlen - 1]
    copy = copy_on_every_rank(plain.host, plain.pool, req, slots, row)
    if copy is not None:
        plain.keep(req, copy)
    plain.host.given_away.pages()


def _reasons(req: Any) -> Iterator[tuple[str, str]]:
    """(reason, message) of what keeps a request from being saved; the same on every rank."""
    tokens = req.seqlen - 1
    yield from reasons_of_request(req)
    if req.session is not None and req.session.streaming:
        yield "StreamingSession", f"request {req.rid!r}: its session keeps the cache"
    restored = req.prefix_len == tokens and bool(req.output_ids)  # a chunk of one token may end a first prefill, too
    if not (req.decode_batch_idx >= 1 or req.extend_end <= tokens or restored):
        yield "PrefillInFlight", f"request {req.rid!r} was retracted before its first step"
