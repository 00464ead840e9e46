"""Loads the copies of admitted requests, and lets them join the decode batch without a forward of their own.

The engine would launch an eager forward for one token, as slow as a prefill of hundreds, and all others would wait.

On the shape of DeepSeek-V4-Flash it takes 160 ms and more, a decode step 11. A decode step computes the same. So when
only restored requests were admitted, no prefill is launched. They join the decode batch, as requests do whose prefill
was done on another server (PREBUILT), and their token comes out of its next step. Beside a real prefill they stay
extends of one token, as admitted, which then cost nothing more.

Where a prefill takes the decode batch with it (mixed chunks), hands a state to the drafts of the next step, or gives a
row the context of its watermark, they are always extends.

Either way the copy is loaded here, when the row is known and nothing launched: behind every forward that may still
write the pages, and before the next forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_dsv4.engine.hisparse import rows
from sglang_dsv4.engine.plain import sessions
from sglang_dsv4.engine.plain.publish import keep_from_tree
from sglang_dsv4.engine.plain.serving import PlainServing, Saved, plain_of, sweep
from sglang_dsv4.engine.plain.store import glance, kept_back
from sglang_dsv4.engine.releases import engine_release

Original = Callable[..., Any]


def prepare_for_extend(original: Original, batch: Any) -> Any:
    """Runs AROUND ScheduleBatch.prepare_for_extend."""
    plain = plain_of(batch.token_to_kv_pool_allocator)
    if plain is None:
        return original(batch)
    restored = plain.admitted(batch.reqs)
    if restored and plain.joins_decode and len(restored) == len(batch.reqs):
        for req in batch.reqs:
            req.extend_end = req.prefix_len
        result = batch.prepare_for_prebuilt()
    else:
        result = original(batch)
    if plain.sessions is not None:
        sessions.tell_tiers(batch.reqs)
    for saved in restored:
        _load(plain, saved, batch.req_to_token_pool)
    return result


def _load(plain: PlainServing, saved: Saved, table: Any) -> None:
    req, tokens, matched = saved.req, saved.copy.tokens, saved.matched
    assert matched is not None
    row = int(req.kv.req_pool_idx)
    # Pages below the match are the tree's, and others read them: computed again meanwhile, perhaps in other batches,
    # they need not even be equal.
    first_page = matched // plain.host.buffers.geometry.page_size
    slots, kept = table.req_to_token[row, :tokens], plain.pool.kept_rows
    if kept is not None:
        kept.put_back(saved.copy, row)
    plain.host.load(saved.copy, slots, plain.pool.full_to_swa_index_mapping, row, first_page)
    plain.drop(saved)
    if kept is not None:
        kept.admit(req, row)
    plain.host.counters.add("spared_tokens", tokens - matched)
    keep_from_tree(req, tokens)


def get_new_batch_prefill(original: Original, scheduler: Any, running_batch: Any) -> Any:
    """Runs AROUND Scheduler.get_new_batch_prefill."""
    plain = plain_of(scheduler.token_to_kv_pool_allocator)
    if plain is None:
        return original(scheduler, running_batch)
    if plain.count:  # a pass is a decode step: what has nothing to do is not called
        sweep(plain, scheduler.waiting_queue)
    if plain.sessions is not None:
        plain.sessions.end_pass(launched=scheduler.last_batch is not None)
        if plain.tier is not None:
            plain.tier.end_pass(glance(plain, scheduler, running_batch))
        if plain.to_prefetch:
            sessions.prefetch(plain, plain.sessions, scheduler)
    if plain.tier is not None:
        with kept_back(plain, scheduler):
            plan = original(scheduler, running_batch)
    else:
        plan = original(scheduler, running_batch)
    if plan.batch_to_run is not None and plan.batch_to_run.forward_mode.is_prebuilt():
        plan.running_batch = _joined(plain, scheduler, plan.batch_to_run, plan.running_batch)
        plan.batch_to_run = None
    return plan


def _joined(plain: PlainServing, scheduler: Any, batch: Any, running: Any) -> Any:
    """Returns the decode batch with the requests of ``batch`` in it.

    The earlier owner of a row may still be in a forward, which writes the state kept by row. The writes here come
    after it: their copies were loaded in this pass, and a load puts the current stream behind the forwards.
    """
    engine_release().recall(batch, scheduler)
    # Not process_prebuilt: a grammar has accepted this token before the retract.
    tokens = torch.tensor([req.output_ids[-1] for req in batch.reqs], pin_memory=torch.cuda.is_available())
    tokens = tokens.to(batch.device, non_blocking=True)  # else the host would wait for load and forward
    scheduler.future_map.stash(batch.req_pool_indices, _payload(tokens))
    batch.input_ids = None  # they come from there
    if plain.pool.kept_rows is not None:
        rows.make_like_staged(batch, scheduler.hisparse_coordinator)
    if running.is_empty():
        return batch
    running.merge_batch(batch)
    return running


def _payload(tokens: torch.Tensor) -> Any:
    from sglang.srt.managers.overlap_utils import RelayPayload  # noqa: PLC0415

    return RelayPayload(bonus_tokens=tokens)
