"""Finds and takes room in the engine's pools for pages that are loaded before a prefill."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dsv4.engine.releases import engine_release


def fits(adder: Any, req: Any, full: int, swa: int, extend: int) -> bool:
    """Returns whether the engine would admit ``req`` with its loaded pages, by its own inequalities.

    full, swa: tokens of the pages to take. extend: tokens left to compute.
    """
    page = adder.page_size
    if req.sampling_params.ignore_eos and getattr(adder.tree_cache, "disable", True):  # its way without a reserve
        room = min(adder.cur_rem_tokens, adder.rem_total_tokens) >= full + 2 * page
    else:
        room = adder.rem_total_tokens > full + extend + _answer_reserve(req) + page
    return bool(room) and int(adder.memory_budget.remaining_swa) > swa + engine_release().swa_asked(adder, req)


def can_be_freed(tree: Any, allocator: Any, full: int, swa: int) -> bool:
    """Returns whether so many full and SWA tokens are free, or the prefix tree's alone."""
    return bool(
        allocator.swa_available_size() + tree.swa_evictable_size() >= swa
        and allocator.full_available_size() + tree.full_evictable_size() >= full
    )


def make_room(tree: Any, allocator: Any, full: int, swa: int) -> None:
    """Evicts until so many full and SWA tokens are free.

    Each shortfall by itself: the engine's helper evicts as much SWA as full, and would empty the tree.
    """
    full, swa = full - allocator.full_available_size(), swa - allocator.swa_available_size()
    if full > 0 or swa > 0:
        engine_release().evict(tree, max(full, 0), max(swa, 0))


def take_slots(allocator: Any, prefix: torch.Tensor, tokens: int, cursor: int) -> torch.Tensor | None:
    """Takes the full slots of positions ``len(prefix)`` to ``tokens`` - 1, with SWA slots from ``cursor`` on.

    prefix: the slots before them. None: the allocator has not so many.
    """
    held, device = len(prefix), allocator.device
    ends = [torch.tensor([end], dtype=torch.int64) for end in (held, tokens)]
    (start, start_cpu), (end, end_cpu) = ((end.to(device), end) for end in ends)
    last = prefix[-1:] if held else torch.full((1,), -1, dtype=torch.int64, device=device)
    slots: torch.Tensor | None = allocator.alloc_extend_swa_tail(
        start, start_cpu, end, end_cpu, last, tokens - held, tokens - cursor
    )
    return slots


def _answer_reserve(req: Any) -> int:
    """Returns the tokens that the engine keeps free for the answer of a request that it admits."""
    from sglang.srt.managers import schedule_policy  # noqa: PLC0415

    return int(
        min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), schedule_policy.CLIP_MAX_NEW_TOKENS)
    )
