"""Answers every question whose answer may differ between releases of the engine.

The answers here are those of the newest release; a file beside this one overrides the ones in which an older release
differs. *Cursor* is the engine's own: below it, behind the tokens that the prefix cache owns, a request's SWA slots
are free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_dsv4.engine.coverage import Part, launch, refusal
from sglang_dsv4.prep.metadata import CompressPlan, StepMetadata
from sglang_dsv4.prep.step import Tables


class Release:
    """Answers for the newest release."""

    # ------------------------------------------------------------------------------------------------ layouts

    def layout_refusal(self, pool: Any) -> str | None:
        """Returns why the row layout of ``pool``, which only some releases have, is not covered, or None."""
        if pool.uniform_fp8:
            return "uniform fp8 rows (trtllm attention)"
        if pool.request_window is not None:
            return "request_window keeps the SWA rows by request"
        # swa_valid_from is copied: paged DSpark drafts have it too.
        return "draft SWA ring" if pool.swa_req_ring_size is not None else refusal(launch(), Part.COPIES)

    # ---------------------------------------------------------------------------------------------- transfers

    nixl_gets_the_event = True  # whether NIXL's manager is given the event behind which the pages of an early send are

    def keep_early_send(self, original: Any, scheduler: Any, req: Any) -> Any:
        """Lets a prefill server pass over the early send of a request's cached prefix."""
        return original(scheduler, req, allow_send=False)

    # ------------------------------------------------------------------------------------------ plain serving

    # Decoder SWA bounded replay: the late layers of an extend see a window that ends with it. One that begins with the
    # extend lacks 127 rows of a restored request, whose extend is of one token.
    replay_cuts_windows = False

    def prefix(self, tree: Any, req: Any) -> torch.Tensor:
        """Returns the full slots of the tokens that the prefix cache holds of a waiting request."""
        if not req.prefix_len:
            return torch.empty(0, dtype=torch.int64)
        slots: torch.Tensor = tree.prefix_device_indices(req)
        return slots

    def swa_asked(self, adder: Any, req: Any) -> int:
        """Returns the SWA tokens that must be free before the engine admits an extend of one token."""
        tokens = adder.memory_budget.swa_tokens(
            adder.page_size, adder._swa_new_tokens(req), chunk_limit=adder.rem_chunk_tokens
        )
        return int(tokens)

    def smallest_chunk(self, adder: Any) -> int:
        """Returns the tokens of the pass's chunk without which the engine takes no extend of one token."""
        return 1 if adder.exact_chunk_fill else int(adder.page_size)

    def evict(self, tree: Any, full: int, swa: int) -> None:
        """Evicts that many full and SWA tokens from the prefix cache."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: PLC0415

        tree.evict_for_alloc(EvictParams(num_tokens=full, swa_num_tokens=swa))

    def occupy(self, tree: Any, req: Any, slots: torch.Tensor, cursor: int) -> bool:
        """Makes ``slots`` (full slots of all the request's tokens but the last) its prefix; False: there is no row."""
        table, kv = tree.req_to_token_pool, req.kv
        if table.alloc([req]) is None:
            return False
        table.write((kv.req_pool_idx, slice(0, len(slots))), slots.to(torch.int32))
        kv.kv_allocated_len = kv.kv_committed_len = req.prefix_len = len(slots)
        kv.set_evicted_seqlen(_swa(), cursor)
        req.swa_branching_seqlen = None  # where a prefill would have computed a window for the tree
        return True

    def vacate(self, tree: Any, req: Any, prefix: torch.Tensor) -> None:
        """Undoes ``occupy``; ``prefix`` holds the slots of the prefix cache."""
        tree.req_to_token_pool.free(req)
        req.kv.mark_kv_released()
        req.kv.kv_committed_len, req.prefix_len = 0, len(prefix)

    def match_limit(self, tree: Any, req: Any, tokens: int) -> int:
        """Returns the most of the first ``tokens`` tokens of ``req`` that the prefix cache may give it."""
        return min(int(req._compute_max_prefix_len(tokens)), tokens - self.replayed_tail(tree, req))

    def replayed_tail(self, tree: Any, req: Any) -> int:
        """Returns the tokens at the end of ``req`` whose windows are computed in any case."""
        return int(tree.swa_reprefill_tail_tokens(req))

    @contextmanager
    def full_pages(self, tree: Any, req: Any, end: int) -> Iterator[torch.Tensor]:
        """Gives the full slots that the prefix cache has of the first ``end`` tokens, their windows there or not.

        Within the context they are not evicted.
        """
        core = tree.tree_core
        held, node, _ = core.match_full_device_prefix(self._key(tree, req, end))
        core.inc_full_pin(node)
        try:
            yield core.collect_full_device_indices(node, core.root_node_handle())[:held].to(torch.int64)
        finally:
            core.dec_full_pin(node)

    def insert(self, tree: Any, req: Any, slots: torch.Tensor, held: int, cursor: int) -> None:
        """Gives the prefix cache the full slots of the first tokens of ``req``, of which it has ``held``.

        cursor: no window before it.
        """
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams  # noqa: PLC0415

        params = InsertParams(key=self._key(tree, req, len(slots)), value=slots, prev_prefix_len=held)
        params.set_evicted_seqlen(_swa(), cursor)
        tree.insert(params)

    def _key(self, tree: Any, req: Any, end: int) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: PLC0415

        pairs = tree.tree_core.is_eagle
        tokens = req.full_untruncated_fill_ids[: end + int(pairs)]
        key = RadixKey(tokens, req.extra_key, is_bigram=False, cache_salt=req.cache_salt)
        return key.maybe_to_bigram_view(pairs)[0]

    def has_window(self, tree: Any, req: Any, first: int, end: int) -> bool:
        """Returns whether the row of a running ``req`` has its SWA slots of positions ``first`` to ``end`` - 1.

        They lie on one page, which is the request's own or the prefix cache's.
        """
        if end > req.kv.cache_protected_len:
            return first >= self.cursor(req)
        if end == req.kv.cache_protected_len:  # the request's node ends there: a walk to it compares all tokens
            return tree.tree_core.get_component_device_value(req.last_node, _swa()) is not None
        return not tree.tree_core.swa_tombstone_ranges(self._key(tree, req, end), first, end)

    def recall(self, batch: Any, scheduler: Any) -> None:
        """Writes anew the memory that a model (Engram) keeps by row of a request's last tokens; no copy holds it."""
        scheduler.ngram_embedding_manager.prepare_for_forward(batch, chunked_req=None)

    def cursor(self, req: Any) -> int:
        """Returns the request's SWA cursor."""
        return int(req.kv.get_evicted_seqlen(_swa()))

    def free_swa_page(self, tree: Any, req: Any, start: int) -> None:
        """Frees the SWA page of the positions from ``start`` on, and moves the cursor behind it."""
        end = start + tree.page_size
        slots = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start:end]
        tree.token_to_kv_pool_allocator.free_swa_segment(slots.to(torch.int64), start_pos=start)
        req.kv.set_evicted_seqlen(_swa(), end)

    def draft_pool(self, scheduler: Any) -> Any:
        """Returns the pool of the server's draft model; None where its rows are not in one of their own."""
        return None if scheduler.draft_worker is None else scheduler.draft_worker.primary_draft_kv_pool

    # ------------------------------------------------------------------------------------ metadata of a step

    read_done = "shared_read_done_event"  # attribute of the model runner whose event the scheduler's barrier waits for

    def tables(self, backend: Any) -> Tables:
        """Returns the engine's tables as they are now; the map is held by a proxy."""
        return Tables(backend.req_to_token, backend.token_to_kv_pool.full_to_swa_index_mapping.detach())

    def kept_states(self, ratio: int, ring: int) -> int:
        """Counts the trailing tokens that a verified step writes to a ring of ``ring`` rows in any case."""
        window = 8 if ratio == 4 else 128
        return ring - window + 2 if ring > window else 0

    def row_floor(self, forward_batch: Any) -> Any:
        """Returns the first row of an encoder's window that is being replayed, or None."""
        return forward_batch.encoder_swa_row_floor

    def own_reason(self, forward_batch: Any) -> str | None:
        """Returns why the engine's own builder must make the metadata of this step, or None."""
        replays = forward_batch.encoder_swa_replay or self.row_floor(forward_batch) is not None
        return "the SWA window is being replayed" if replays else None

    def install(self, backend: Any, made: StepMetadata, forward_batch: Any) -> None:
        """Makes ``made`` the metadata of the backend's next forward."""
        backend.online_c128_mtp.clear()
        backend.encoder_replay = forward_batch.encoder_swa_replay
        backend.encoder_row_floor = self.row_floor(forward_batch)
        backend.forward_metadata = self.compose(backend, made, forward_batch.out_cache_loc)
        backend.tail_forward_metadata = None

    def compose(self, backend: Any, made: StepMetadata, out_locs: torch.Tensor) -> Any:
        """Makes the engine's metadata object of ``made``, with the engine's own planners."""
        from sglang.srt.layers.attention import deepseek_v4_backend as engine  # noqa: PLC0415

        c4, c128 = backend.has_c4, backend.has_c128
        fields = _window_fields(backend, made, out_locs)
        core = engine.DSV4AttnMetadata(
            **fields | (_c4_fields(made) if c4 else {}) | (_c128_fields(made) if c128 else {})
        )
        core.c4_sparse_topk_lengths = made.c4_sparse_lengths if c4 else None
        core.c4_sparse_page_indices = made.c4_sparse_indices if c4 else None
        for name, present in (("c0", True), ("c4", c4), ("c128", c128)):
            setattr(core, f"{name}_flashmla_metadata", engine._create_flashmla_metadata() if present else None)
        return engine.DSV4Metadata(
            core,
            backend.init_forward_metadata_indexer(core) if c4 else None,
            c4_compress_metadata=_compress(4, made.c4) if c4 else None,
            c128_compress_metadata=_compress(128, made.c128) if c128 else None,
        )

    def compose_window(self, backend: Any, made: StepMetadata, out_locs: torch.Tensor) -> Any:
        """Makes the object of ``compose`` for a step whose layers have the SWA window alone."""
        from sglang.srt.layers.attention import deepseek_v4_backend as engine  # noqa: PLC0415

        fields = _window_fields(backend, made, out_locs)
        kept = backend._fill_cuda_graph_swa_out_cache_loc(out_locs)  # a captured graph reads them there
        core = engine.DSV4AttnMetadata(**fields | ({} if kept is None else {"swa_out_cache_loc": kept}))
        core.c4_sparse_topk_lengths = core.c4_sparse_page_indices = core.c4_sparse_raw_indices = None
        core.c0_flashmla_metadata = engine._create_flashmla_metadata()
        core.c4_flashmla_metadata = core.c128_flashmla_metadata = None
        return engine.DSV4Metadata(core_attn_metadata=core, indexer_metadata=None)


def _swa() -> Any:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: PLC0415

    return ComponentType.SWA


def _window_fields(backend: Any, made: StepMetadata, out_locs: torch.Tensor) -> dict[str, Any]:
    """Returns the constructor arguments that every step has."""
    return {
        "page_size": backend.page_size,
        "page_table": made.page_table,
        "raw_out_loc": out_locs,
        "cuda_int32_kwargs": backend.cuda_int32_kwargs,
        "seq_lens_casual": made.lengths,
        "positions_casual": made.positions,
        "swa_page_indices": made.swa_indices,
        "swa_topk_lengths": made.swa_lengths,
        "swa_out_cache_loc": made.swa_out_locs,
        "index_topk": backend.index_topk,
        "present_ratios": backend.present_ratios,
        "low_ratios": backend.low_ratios,
    }


def _c4_fields(made: StepMetadata) -> dict[str, Any]:
    return {
        "c4_out_loc": made.c4_out_locs,
        "c4_topk_lengths_raw": made.c4_lengths,
        "c4_topk_lengths_clamp1": made.c4_clamped,
    }


def _c128_fields(made: StepMetadata) -> dict[str, Any]:
    return {
        "c128_out_loc": made.c128_out_locs,
        "c128_page_indices": made.c128_indices,
        "c128_topk_lengths_clamp1": made.c128_clamped,
    }


def _compress(ratio: int, plan: CompressPlan) -> Any:
    from sglang.srt.layers.attention.dsv4 import compressor_v2 as engine  # noqa: PLC0415

    if plan.write is None:
        return engine.CompressorDecodePlan(ratio, plan.plan)
    return engine.CompressorPrefillPlan(ratio, plan.plan, plan.write)
