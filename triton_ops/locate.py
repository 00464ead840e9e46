"""Locates a request and checks its slots on the device, in one launch.

    page_numbers[0:3]   the request's slot, and the SWA page of the window's first and second full page; -1: none
    report[..]          one entry a program: NOTHING, or 4 * position + fault of the first position at fault in its tile

A request lies *page by page* when every slot is at its position's place in its page, in the full pool and, for
the window, in the SWA pool: then these few numbers say everything. The engine's paged allocator gives no other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops._launch import Launcher
from triton_ops.copy_rows import PAGE_NUMBERS

TILE = 1024
NOTHING = 2**62
OFF_PAGE, NOT_MAPPED, OFF_SWA_PAGE = 1, 2, 3


@triton.jit(
    do_not_specialize=["tokens", "mapped", "start", "full_pages", "swa_pages", "slot"],
    do_not_specialize_on_alignment=["indices"],
)
def _locate_kernel(
    indices, swa_map, page_numbers, report, tokens, mapped, start, full_pages, swa_pages, slot,
    PAGE: tl.constexpr, TILE: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = position < tokens
    in_page = position % PAGE
    found = tl.load(indices + position, mask=live, other=0).to(tl.int64)
    base = tl.load(indices + (position - in_page), mask=live, other=0).to(tl.int64)
    known = (found >= 0) & (found < mapped - 1)  # the mapping's last entry belongs to slot -1
    good = known & (base >= 0) & (base % PAGE == 0) & (base // PAGE < full_pages) & (found == base + in_page)

    window = live & (position >= start)
    first = tl.maximum(position - in_page, start)  # the first position of the window in this page
    first_slot = tl.load(indices + first, mask=window, other=0).to(tl.int64)
    first_known = (first_slot >= 0) & (first_slot < mapped - 1)
    swa = tl.load(swa_map + tl.where(known, found, 0), mask=window & known, other=0).to(tl.int64)
    first_swa = tl.load(swa_map + tl.where(first_known, first_slot, 0), mask=window & first_known, other=0)
    first_swa = first_swa.to(tl.int64)
    aligned = (swa % PAGE == in_page) & (swa // PAGE == first_swa // PAGE) & (swa // PAGE < swa_pages)
    number = 1 + position // PAGE - start // PAGE
    tl.store(page_numbers + number, swa // PAGE, mask=window & (position == first))
    if tl.program_id(0) == 0:
        tl.store(page_numbers, slot.to(tl.int64))
        none = tl.full((), -1, tl.int64)
        tl.store(page_numbers + 1, none, mask=start >= tokens)
        tl.store(page_numbers + 2, none, mask=(start >= tokens) | ((tokens - 1) // PAGE == start // PAGE))

    fault = tl.where(window & (swa <= 0), 2, tl.where(window & (aligned == 0), 3, 0))
    fault = tl.where(good, fault, 1)
    first_fault = tl.where(live & (fault > 0), position.to(tl.int64) * 4 + fault, NOTHING)
    tl.store(report + tl.program_id(0), tl.min(first_fault, axis=0))


_locate = Launcher(_locate_kernel, num_warps=8)


def report_size(tokens: int) -> int:
    """Counts the entries of ``report``."""
    return max(1, -(-tokens // TILE))


def locate(
    indices: torch.Tensor,
    swa_map: torch.Tensor,
    slot: int,
    page: int,
    start: int,
    limits: tuple[int, int],
    page_numbers: torch.Tensor,
    report: torch.Tensor,
    stream: int | None = None,
) -> None:
    """Fills ``page_numbers`` and ``report`` for the request at ``indices``; one launch.

    indices: 1-D int32 or int64, full slots of positions 0..n-1, contiguous. swa_map: int64, its last entry -1. slot:
    the request's, below 2**31. page: tokens a page. start: first position of the window, which spans at most two pages.
    limits: full and SWA pages that requests may use, the dummy page 0 included. page_numbers: int64 [3]. report: int64
    of at least ``report_size`` entries. Both are writable by the device (pinned host memory will do).
    stream: a handle; None: the current stream.
    """
    tokens = check_locate(indices, swa_map, page, start, page_numbers, report)
    key = (indices.dtype, page, indices.device.index)
    _locate(
        key, (report_size(tokens), 1, 1), indices, swa_map, page_numbers, report, tokens, swa_map.shape[0], start,
        *limits, slot, page, TILE, NOTHING, stream=stream,
    )  # fmt: skip


def check_locate(
    indices: torch.Tensor,
    swa_map: torch.Tensor,
    page: int,
    start: int,
    page_numbers: torch.Tensor,
    report: torch.Tensor,
) -> int:
    """Raises on arguments that the kernel cannot take; returns the number of tokens."""
    for name, tensor in (
        ("indices", indices), ("swa_map", swa_map), ("page_numbers", page_numbers), ("report", report),
    ):  # fmt: skip
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise TypeError(f"{name} must be 1-D and contiguous")
        if tensor.dtype != torch.int64 and (tensor is not indices or tensor.dtype != torch.int32):
            raise TypeError(f"{name} must be int64{' or int32' if tensor is indices else ''}, not {tensor.dtype}")
    tokens = indices.shape[0]
    if not 0 <= start <= tokens or (tokens and (tokens - 1) // page - start // page > 1):
        raise ValueError(f"a window from {start} of {tokens} tokens spans more than two pages of {page}")
    if page_numbers.shape[0] != PAGE_NUMBERS or report.shape[0] < report_size(tokens):
        raise ValueError(
            f"{len(page_numbers)} page numbers and a report of {len(report)} entries are too few for {tokens} tokens"
        )
    return tokens


def locate_torch(
    indices: torch.Tensor,
    swa_map: torch.Tensor,
    slot: int,
    page: int,
    start: int,
    limits: tuple[int, int],
    page_numbers: torch.Tensor,
    report: torch.Tensor,
) -> None:
    """Does as ``locate`` in plain torch on any device."""
    tokens = check_locate(indices, swa_map, page, start, page_numbers, report)
    page_numbers[:] = torch.tensor([slot, -1, -1], dtype=torch.int64)
    report[: report_size(tokens)] = NOTHING
    if not tokens:
        return
    slots = indices.to(torch.int64)
    position = torch.arange(tokens, device=indices.device)
    base = slots[position // page * page]
    known = (slots >= 0) & (slots < len(swa_map) - 1)
    good = known & (base >= 0) & (base % page == 0) & (base // page < limits[0]) & (slots == base + position % page)
    fault = torch.where(good, 0, OFF_PAGE)

    window, inside = position[start:], known[start:]
    swa = torch.where(inside, swa_map[torch.where(inside, slots[start:], 0)], 0)
    first = torch.clamp(window // page * page, min=start) - start
    aligned = (swa % page == window % page) & (swa // page == swa[first] // page) & (swa // page < limits[1])
    of_window = torch.where(swa <= 0, NOT_MAPPED, torch.where(aligned, 0, OFF_SWA_PAGE))
    fault[start:] = torch.where(good[start:], of_window, OFF_PAGE)
    heads = swa[torch.unique(first)] // page
    page_numbers[1 : 1 + len(heads)] = heads.to(page_numbers.device)

    found = torch.where(fault > 0, position * 4 + fault, NOTHING)
    tiles = -(-tokens // TILE)
    padded = torch.full((tiles * TILE,), NOTHING, dtype=torch.int64, device=indices.device)
    padded[:tokens] = found
    report[:tiles] = padded.view(tiles, TILE).amin(1).to(report.device)
