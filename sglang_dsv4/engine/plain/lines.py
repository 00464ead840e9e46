"""Plain serving meets both lines of the engine: where each keeps a request's row, its cursor and its budget.

0.5.17 holds a request's prefix as a tensor and gives it a row when its batch is made. 0.5.22 reads the prefix off the
row, which a request may have before. *Cursor* is the engine's own: below it, behind what the prefix tree owns, a
request's SWA slots are free.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sglang_dsv4.engine.releases import line_of


class PlainLine(Protocol):
    """What plain serving asks of one engine line."""

    def refusal(self) -> str | None:
        """What only this line can have, and a restore cannot do."""

    def row(self, req: Any) -> int:
        """The request's row of req_to_token."""

    def matched(self, req: Any) -> int:
        """Tokens that the prefix tree holds of a request that waits."""

    def prefix(self, tree: Any, req: Any) -> torch.Tensor:
        """Their full slots."""

    def extended(self, req: Any) -> tuple[int, int]:
        """First and past-last position of the request's last extend."""

    def committed(self, req: Any) -> int:
        """Tokens whose cache a release may publish."""

    def remaining_swa(self, adder: Any) -> int:
        """SWA tokens that the pass has left."""

    def swa_asked(self, adder: Any, req: Any) -> int:
        """SWA tokens that the engine wants to see free before it admits an extend of one token."""

    def smallest_chunk(self, adder: Any) -> int:
        """Tokens of the pass's chunk without which the engine takes no extend of one token."""

    def evict(self, tree: Any, full: int, swa: int) -> None:
        """Make the tree give back that many full and SWA tokens."""

    def occupy(self, tree: Any, req: Any, slots: torch.Tensor, cursor: int) -> bool:
        """Make ``slots`` (full slots of all the request's tokens but the last) its prefix; False: there is no row."""

    def vacate(self, tree: Any, req: Any, prefix: torch.Tensor) -> None:
        """Undo ``occupy``: ``prefix`` is what the tree holds."""

    def take_rows(self, batch: Any) -> None:
        """Give the requests that were occupied their rows; no token is left to extend."""

    def recall(self, batch: Any, scheduler: Any) -> None:
        """Write anew what a model remembers by row of a request's last tokens, and no copy holds (Engram)."""

    def cursor(self, req: Any) -> int:
        """The request's SWA cursor."""

    def free_swa_page(self, tree: Any, req: Any, start: int) -> None:
        """Free the SWA page of the positions from ``start`` on, and move the cursor behind it."""

    def draft_pool(self, scheduler: Any) -> Any:
        """The pool of the server's draft model; None where its rows are not in one of their own."""

    def publishes(self, *given: Any, **named: Any) -> bool:
        """Whether release_kv_cache, with those arguments behind request and tree, inserts into the tree."""


class _Old:
    """0.5.17."""

    def refusal(self) -> str | None:
        return None

    def row(self, req: Any) -> int:
        return int(req.req_pool_idx)

    def matched(self, req: Any) -> int:
        return len(req.prefix_indices)

    def prefix(self, tree: Any, req: Any) -> torch.Tensor:
        slots: torch.Tensor = req.prefix_indices
        return slots

    def extended(self, req: Any) -> tuple[int, int]:
        return req.extend_range.start, req.extend_range.end

    def committed(self, req: Any) -> int:
        return int(req.effective_kv_committed_len())

    def remaining_swa(self, adder: Any) -> int:
        return int(adder.rem_swa_tokens)

    def swa_asked(self, adder: Any, req: Any) -> int:
        return int(adder._swa_budget_for_req(adder.page_size, adder._swa_new_tokens(req)))

    def smallest_chunk(self, adder: Any) -> int:
        return int(adder.page_size)

    def evict(self, tree: Any, full: int, swa: int) -> None:
        tree.evict(_shortfalls(full, swa))

    def occupy(self, tree: Any, req: Any, slots: torch.Tensor, cursor: int) -> bool:
        from sglang.srt.managers.schedule_batch import ReqKvInfo  # noqa: PLC0415

        # No row yet: the scheduler would count it as one of the pass's and one of the free ones.
        req.prefix_indices = slots
        req.kv = ReqKvInfo(kv_allocated_len=len(slots), swa_evicted_seqlen=cursor)
        return True

    def vacate(self, tree: Any, req: Any, prefix: torch.Tensor) -> None:
        req.prefix_indices = prefix
        req.kv = None

    def take_rows(self, batch: Any) -> None:
        from sglang.srt.mem_cache.allocation import alloc_req_slots  # noqa: PLC0415

        alloc_req_slots(batch.req_to_token_pool, batch.reqs, batch.tree_cache)
        for req in batch.reqs:
            tokens = len(req.prefix_indices)
            batch.req_to_token_pool.write((req.req_pool_idx, slice(0, tokens)), req.prefix_indices.to(torch.int32))
            req.kv_committed_len = tokens
            req.set_extend_range(tokens, tokens)

    def recall(self, batch: Any, scheduler: Any) -> None:
        """No model of this line has such a memory and this cache."""

    def cursor(self, req: Any) -> int:
        return int(req.kv.swa_evicted_seqlen)

    def free_swa_page(self, tree: Any, req: Any, start: int) -> None:
        end = start + tree.page_size
        slots = tree.req_to_token_pool.req_to_token[self.row(req), start:end]
        tree.token_to_kv_pool_allocator.free_swa(slots.to(torch.int64))
        req.kv.swa_evicted_seqlen = end

    def draft_pool(self, scheduler: Any) -> Any:
        from sglang.srt.mem_cache.kv_cache_builder import get_draft_kv_pool  # noqa: PLC0415

        return get_draft_kv_pool(
            draft_worker=scheduler.draft_worker,
            spec_algorithm=scheduler.spec_algorithm,
            server_args=scheduler.server_args,
        )

    def publishes(self, is_insert: bool = True) -> bool:
        return is_insert


class _New:
    """0.5.22 and later."""

    def refusal(self) -> str | None:
        from sglang.srt.runtime_context import get_exec, get_memory  # noqa: PLC0415

        features = get_exec().features
        if features.enable_encoder_swa_bounded_replay or features.enable_decoder_swa_bounded_replay:
            return "SWA bounded replay computes a retracted request's window again"
        return "an external cache linker" if get_memory().enable_unified_cache_external_linker else None

    def row(self, req: Any) -> int:
        return int(req.kv.req_pool_idx)

    def matched(self, req: Any) -> int:
        return int(req.prefix_len)

    def prefix(self, tree: Any, req: Any) -> torch.Tensor:
        if not req.prefix_len:
            return torch.empty(0, dtype=torch.int64)
        slots: torch.Tensor = tree.prefix_device_indices(req)
        return slots

    def extended(self, req: Any) -> tuple[int, int]:
        return req.prefix_len, req.extend_end

    def committed(self, req: Any) -> int:
        return int(req.owned_kv_len())

    def remaining_swa(self, adder: Any) -> int:
        return int(adder.memory_budget.remaining_swa)

    def swa_asked(self, adder: Any, req: Any) -> int:
        tokens = adder.memory_budget.swa_tokens(
            adder.page_size, adder._swa_new_tokens(req), chunk_limit=adder.rem_chunk_tokens
        )
        return int(tokens)

    def smallest_chunk(self, adder: Any) -> int:
        return 1 if adder.exact_chunk_fill else int(adder.page_size)

    def evict(self, tree: Any, full: int, swa: int) -> None:
        tree.evict_for_alloc(_shortfalls(full, swa))

    def occupy(self, tree: Any, req: Any, slots: torch.Tensor, cursor: int) -> bool:
        table, kv = tree.req_to_token_pool, req.kv
        if table.alloc([req]) is None:
            return False
        table.write((kv.req_pool_idx, slice(0, len(slots))), slots.to(torch.int32))
        kv.kv_allocated_len = kv.kv_committed_len = req.prefix_len = len(slots)
        kv.set_evicted_seqlen(_swa(), cursor)
        req.swa_branching_seqlen = None  # where a prefill would have computed a window for the tree
        return True

    def vacate(self, tree: Any, req: Any, prefix: torch.Tensor) -> None:
        tree.req_to_token_pool.free(req)
        req.kv.mark_kv_released()
        req.kv.kv_committed_len, req.prefix_len = 0, len(prefix)

    def take_rows(self, batch: Any) -> None:
        for req in batch.reqs:
            req.extend_end = req.prefix_len

    def recall(self, batch: Any, scheduler: Any) -> None:
        scheduler.ngram_embedding_manager.prepare_for_forward(batch, chunked_req=None)

    def cursor(self, req: Any) -> int:
        return int(req.kv.get_evicted_seqlen(_swa()))

    def free_swa_page(self, tree: Any, req: Any, start: int) -> None:
        end = start + tree.page_size
        slots = tree.req_to_token_pool.req_to_token[self.row(req), start:end]
        tree.token_to_kv_pool_allocator.free_swa_segment(slots.to(torch.int64), start_pos=start)
        req.kv.set_evicted_seqlen(_swa(), end)

    def draft_pool(self, scheduler: Any) -> Any:
        return None if scheduler.draft_worker is None else scheduler.draft_worker.primary_draft_kv_pool

    def publishes(self, *, checkpoint: bool) -> bool:
        return checkpoint


def _shortfalls(full: int, swa: int) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: PLC0415

    return EvictParams(num_tokens=full, swa_num_tokens=swa)


def _swa() -> Any:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: PLC0415

    return ComponentType.SWA


_LINES: dict[str, PlainLine] = {"0.5.17": _Old(), "0.5.22": _New()}


def plain_line(version: str) -> PlainLine:
    """What an engine version needs. Raises KeyError for a version without a line."""
    line = line_of(version)
    return _LINES[line.first if line else ""]
