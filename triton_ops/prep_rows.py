"""Fills a decode step's metadata from the engine's tables, in one launch.

A row is one query token; request i has rows i*queries .. i*queries + queries - 1, its last tokens in order. Program
(row, 0) fills the fields with one entry a row and the window; programs (row, 1..) page_table and c128_indices, a tile
each. For a row of causal length n at slot s of req_to_token, with L = req_to_token[s] and M = full_to_swa:

    page_table[p]     L[p * page] // page where p * page < n, else 0: the table may be many times as long as the row
    swa_indices[k]    M[L[n-1-k]], or -1 behind the start
    swa_out_locs      M[out_loc]
    c4_out_locs       out_loc // 4 where n % 4 == 0, else 0;  c128_out_locs alike
    c128_indices[c]   the C128 slot of rows 128c .. 128c+127 where c < n // 128, else -1
    plans             see ``_store_plan``; state rows of C4 lie in the ring of the token's SWA page, those of C128 in
                      the ring of the request

Where the host knows the lengths, it fills ``vectors`` before the launch; where only the device does, the kernel reads
``lengths`` and fills ``vectors`` itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triton_ops._launch import Launcher
from triton_ops.prep_args import LENGTHS, Inputs, Outputs, Sizes, check_prep_rows, fill_vectors_torch

TILE_PAGES = 256


@triton.jit
def _translate(full_to_swa, mapped, slot, mask):
    """Maps a full slot to its SWA slot; -1 outside the mapping, whose last entry stands for slot -1."""
    known = (slot >= 0) & (slot < mapped - 1) & mask
    return tl.load(full_to_swa + tl.where(known, slot, 0), mask=known, other=-1).to(tl.int32)


@triton.jit
def _store_plan(
    plan, write, row, request, query, length, last, position, place, before, after, keep,
    RATIO: tl.constexpr, GROUPS: tl.constexpr, SWA_PAGE: tl.constexpr, VERIFY: tl.constexpr,
):  # fmt: skip
    """Stores one row's plan. place: state row of the token. before, after: state groups that a compression reads."""
    if VERIFY:
        completes = (length > 0) & (length % RATIO == 0)
        taken = tl.maximum(GROUPS * RATIO - query - 1, 0)  # rows of the window that are not of this step
        tl.store(plan, tl.where(completes, length, -1))
        tl.store(plan + 1, tl.where(completes, row | (taken << 16), 0))
        tl.store(plan + 2, tl.where(completes & (taken > 0), before, -1))
        tl.store(plan + 3, tl.where(completes, tl.where(taken > 0, after, request), -1))
        start = tl.minimum(last // RATIO * RATIO - (GROUPS - 1) * RATIO, last - keep)
        writes = position >= start
        if GROUPS == 2:
            writes = writes | (position % SWA_PAGE >= SWA_PAGE - RATIO)
        tl.store(write, tl.where(writes, row, -1))
        tl.store(write + 1, tl.where(writes, place, -1))
    else:
        tl.store(plan, length)
        tl.store(plan + 1, place)
        tl.store(plan + 2, before)
        tl.store(plan + 3, after)


@triton.jit(
    do_not_specialize=[
        "pitch", "slot_stride", "mapped", "rows", "queries", "length_offset", "width", "columns",
        "c4_keep", "c128_keep",
    ]
)  # fmt: skip
def _prep_rows_kernel(
    slots, out_locs, lengths, req_to_token, full_to_swa,
    vectors, query_starts, page_table, swa_indices, swa_out_locs, c4_out_locs, c4_sparse, c128_out_locs, c128_indices,
    c4_plan, c128_plan, c4_write, c128_write,
    pitch, slot_stride, mapped, rows, queries, length_offset, width, columns, c4_keep, c128_keep,
    DEVICE_LENGTHS: tl.constexpr, VERIFY: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SWA_PAGE: tl.constexpr, TOPK: tl.constexpr, C4_RING: tl.constexpr, C128_RING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    request = row // queries
    query = row % queries
    slot = tl.load(slots + request).to(tl.int64)
    if DEVICE_LENGTHS:
        length = tl.load(lengths + request).to(tl.int32) + length_offset + query
    else:
        length = tl.load(vectors + row)
    tokens = req_to_token + slot * slot_stride
    wide_row = row.to(tl.int64)

    if tl.program_id(1) > 0:
        first = (tl.program_id(1) - 1) * TILE
        page = first + tl.arange(0, TILE)
        exists = (page < width) & (page * PAGE < length)
        head = tl.load(tokens + page.to(tl.int64) * PAGE, mask=exists, other=0)
        tl.store(page_table + wide_row * width + page, head // PAGE, mask=page < width)
        ROWS: tl.constexpr = PAGE // 128  # C128 rows a page
        column = first * ROWS + tl.arange(0, TILE * ROWS)
        exists = column < tl.minimum(length // 128, tl.minimum(width * ROWS, columns))
        heads = tl.load(tokens + (column // ROWS).to(tl.int64) * PAGE, mask=exists, other=0)
        index = tl.where(exists, heads // PAGE * ROWS + column % ROWS, -1)
        tl.store(c128_indices + wide_row * columns + column, index, mask=column < columns)
    else:
        c4 = length // 4
        if DEVICE_LENGTHS:
            tl.store(vectors + row, length)
            tl.store(vectors + pitch + row, length - 1)
            tl.store(vectors + 2 * pitch + row, tl.minimum(length, WINDOW))
            tl.store(vectors + 3 * pitch + row, c4)
            tl.store(vectors + 4 * pitch + row, tl.maximum(c4, 1))
            tl.store(vectors + 5 * pitch + row, tl.minimum(tl.maximum(c4, 1), TOPK))
            tl.store(vectors + 6 * pitch + row, tl.maximum(length // 128, 1))
            tl.store(query_starts + request, row, mask=query == 0)
            tl.store(query_starts + request + 1, row + 1, mask=row == rows - 1)

        back = tl.arange(0, WINDOW)
        inside = back < length
        token = tl.load(tokens + tl.where(inside, length - 1 - back, 0), mask=inside, other=-1)
        tl.store(swa_indices + wide_row * WINDOW + back, _translate(full_to_swa, mapped, token, inside))
        tl.store(c4_sparse + wide_row * TOPK + tl.arange(0, TOPK), tl.full((TOPK,), -1, tl.int32))

        out_loc = tl.load(out_locs + row)
        tl.store(swa_out_locs + row, _translate(full_to_swa, mapped, out_loc, True))
        tl.store(c4_out_locs + row, tl.where(length % 4 == 0, out_loc // 4, 0))
        tl.store(c128_out_locs + row, tl.where(length % 128 == 0, out_loc // 128, 0))

        # A row of length 0 is padding: it is addressed as position 0.
        position = tl.maximum(length - 1, 0)
        last = length + queries - 1 - query
        four_before = tl.maximum(position - 4, 0)
        swa = tl.maximum(_translate(full_to_swa, mapped, tl.load(tokens + position), True), 0)
        place = swa // SWA_PAGE * C4_RING + swa % C4_RING
        swa = tl.maximum(_translate(full_to_swa, mapped, tl.load(tokens + four_before), True), 0)
        before = (swa // SWA_PAGE * C4_RING + swa % C4_RING) // 4
        _store_plan(
            c4_plan + wide_row * 4, c4_write + wide_row * 2, row, request, query, length, last, position,
            place, before, place // 4, c4_keep, 4, 2, SWA_PAGE, VERIFY,
        )  # fmt: skip
        base = slot.to(tl.int32) * C128_RING
        place = base + position % C128_RING
        before = (base + tl.maximum(position - 128, 0) % C128_RING) // 128
        _store_plan(
            c128_plan + wide_row * 4, c128_write + wide_row * 2, row, request, query, length, last, position,
            place, before, place // 128, c128_keep, 128, 1, SWA_PAGE, VERIFY,
        )  # fmt: skip


_prep_rows = Launcher(_prep_rows_kernel, num_warps=4)


def prep_rows(sizes: Sizes, inputs: Inputs, outputs: Outputs, stream: int | None = None) -> None:
    """Fills ``outputs`` in one launch.

    All tensors on one device, contiguous, all but slots, out_locs and lengths starting at multiples of 16 bytes; shapes
    and dtypes of ``Inputs`` and ``Outputs`` (see ``check_prep_rows``). A slot outside req_to_token, or a length outside
    its columns, is the caller's error. stream: a handle; None: the current stream.
    """
    verify = outputs.c4_write is not None
    rows, width = outputs.page_table.shape
    columns = outputs.c128_indices.shape[1]
    tiles = max(-(-width // TILE_PAGES), -(-columns // (TILE_PAGES * (sizes.page // 128))))
    lengths = outputs.vectors if inputs.lengths is None else inputs.lengths
    _prep_rows(
        (
            sizes[:6], inputs.slots.dtype, inputs.out_locs.dtype, lengths.dtype, inputs.lengths is None, verify,
            lengths.device.index,
        ),
        (rows, 1 + tiles, 1),
        inputs.slots, inputs.out_locs, lengths, inputs.req_to_token, inputs.full_to_swa,
        *outputs[:11], *(outputs[11:] if verify else outputs[9:11]),
        outputs.vectors.shape[1], inputs.req_to_token.stride(0), inputs.full_to_swa.shape[0], rows, inputs.queries,
        inputs.length_offset, width, columns, sizes.c4_keep, sizes.c128_keep,
        inputs.lengths is not None, verify, sizes.page, sizes.window, sizes.swa_page, sizes.topk, sizes.c4_ring,
        sizes.c128_ring, TILE_PAGES, stream=stream,
    )  # fmt: skip


def prep_rows_torch(sizes: Sizes, inputs: Inputs, outputs: Outputs) -> None:
    """Does as ``prep_rows`` in plain torch on any device."""
    check_prep_rows(sizes, inputs, outputs)
    rows, width = outputs.page_table.shape
    order = torch.arange(rows, device=inputs.slots.device)
    request, query = order // inputs.queries, order % inputs.queries
    if inputs.lengths is not None:
        lengths = inputs.lengths.to(torch.int64)[request] + inputs.length_offset + query
        fill_vectors_torch(sizes, lengths, outputs.vectors)
        outputs.query_starts.copy_(torch.arange(len(inputs.slots) + 1, device=order.device) * inputs.queries)
    lengths = outputs.vectors[LENGTHS, :rows].to(torch.int64)
    slots = inputs.slots.to(torch.int64)[request]

    def full(position: torch.Tensor) -> torch.Tensor:
        return inputs.req_to_token[slots.view(-1, *[1] * (position.dim() - 1)), position].to(torch.int64)

    def swa(slot: torch.Tensor) -> torch.Tensor:
        known = (slot >= 0) & (slot < len(inputs.full_to_swa) - 1)
        return torch.where(known, inputs.full_to_swa[torch.where(known, slot, 0)], -1).to(torch.int32)

    firsts = torch.arange(width, device=order.device).expand(rows, width) * sizes.page
    pages = torch.where(firsts < lengths[:, None], full(firsts) // sizes.page, 0)
    outputs.page_table.copy_(pages)
    a_page = sizes.page // 128
    column = torch.arange(outputs.c128_indices.shape[1], device=order.device)
    index = pages[:, (column // a_page).clamp(max=width - 1)] * a_page + column % a_page
    exists = column < torch.clamp(lengths // 128, max=width * a_page)[:, None]
    outputs.c128_indices.copy_(torch.where(exists, index, -1))
    back = lengths[:, None] - 1 - torch.arange(sizes.window, device=order.device)
    outputs.swa_indices.copy_(torch.where(back >= 0, swa(full(back.clamp(min=0))), -1))
    outputs.c4_sparse.fill_(-1)
    outputs.swa_out_locs.copy_(swa(inputs.out_locs.to(torch.int64)))
    outputs.c4_out_locs.copy_(torch.where(lengths % 4 == 0, inputs.out_locs // 4, 0))
    outputs.c128_out_locs.copy_(torch.where(lengths % 128 == 0, inputs.out_locs // 128, 0))

    position = torch.clamp(lengths - 1, min=0)
    rows_of = _Rows(order, request, query, lengths, lengths + inputs.queries - 1 - query, position)
    at = swa(full(position)).clamp(min=0).to(torch.int64)
    then = swa(full(torch.clamp(position - 4, min=0))).clamp(min=0).to(torch.int64)
    places = [slot // sizes.swa_page * sizes.c4_ring + slot % sizes.c4_ring for slot in (at, then)]
    _plan_torch(outputs.c4_plan, outputs.c4_write, rows_of, places, 4, 2, sizes.c4_keep, sizes.swa_page)
    places = [slots * sizes.c128_ring + p % sizes.c128_ring for p in (position, torch.clamp(position - 128, min=0))]
    _plan_torch(outputs.c128_plan, outputs.c128_write, rows_of, places, 128, 1, sizes.c128_keep, sizes.swa_page)


class _Rows(NamedTuple):
    row: torch.Tensor
    request: torch.Tensor
    query: torch.Tensor
    length: torch.Tensor
    last: torch.Tensor
    position: torch.Tensor


def _plan_torch(
    plan: torch.Tensor,
    write: torch.Tensor | None,
    rows: _Rows,
    places: list[torch.Tensor],
    ratio: int,
    groups: int,
    keep: int,
    swa_page: int,
) -> None:
    place, before = places[0], places[1] // ratio
    if write is None:
        plan.copy_(torch.stack((rows.length, place, before, place // ratio), 1))
        return
    completes = (rows.length > 0) & (rows.length % ratio == 0)
    taken = torch.clamp(groups * ratio - rows.query - 1, min=0)
    some = taken > 0
    words = (
        rows.length, rows.row | taken << 16, torch.where(some, before, -1),
        torch.where(some, place // ratio, rows.request),
    )  # fmt: skip
    nothing = torch.tensor([-1, 0, -1, -1], device=plan.device)
    plan.copy_(torch.where(completes[:, None], torch.stack(words, 1), nothing))
    start = torch.minimum(rows.last // ratio * ratio - (groups - 1) * ratio, rows.last - keep)
    writes = rows.position >= start
    if groups == 2:
        writes |= rows.position % swa_page >= swa_page - ratio
    write.copy_(torch.where(writes[:, None], torch.stack((rows.row, place), 1), -1))
