"""Holds one decode step's metadata, field by field as the engine's attention, indexer and compressor read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_dsv4.prep.step import INDEX_ALIGNMENT, PrepLayout


class CompressPlan(NamedTuple):
    """Lists the rows that a compressor of one ratio reads and writes; uint8, native byte order.

    A decode step (one query a request), ``write`` is None; for each row:
        plan  = {u32 length, i32 state row to write, i32 group before, i32 group of this token}
    A step that verifies drafts; rows with nothing to do hold -1 in the first word (and -1 elsewhere, 0 in the halves):
        plan  = {u32 length, u16 row, u16 rows to take from the ring, i32 group before, i32 group of this token}
        write = {u32 row, i32 state row to write}
    A group is ``ratio`` neighbouring state rows. Row order within ``plan`` and ``write`` has no meaning.
    """

    plan: torch.Tensor
    write: torch.Tensor | None


@dataclass(frozen=True)
class StepMetadata:
    """Holds the metadata of ``rows`` query tokens of ``requests`` requests.

    ### Worked example
    Pages of 256, window 128, two requests decoding one token each: request 0 lies in slot 5, has 3 tokens, on full page
    7 (so tokens 0..2 are full slots 1792..1794) and SWA page 2; request 1 lies in slot 1, has 256 tokens, on full page
    4 and SWA page 9. The step writes full slots 1794 and 1279.

        lengths            [3, 256]
        positions          [2, 255]
        query_starts       [0, 1, 2]
        page_table         [[7, 0, ...], [4, 0, ...]]          behind a request's pages: 0, never read
        swa_indices        [[514, 513, 512, -1, ...], [2559, 2558, ..., 2432]]      newest first
        swa_lengths        [3, 128]
        swa_out_locs       [514, 2559]
        c4_out_locs        [0, 319]                            1279 // 4: token 255 completes a group of 4; 0: none
        c4_lengths         [0, 64]
        c4_clamped         [1, 64]                             FlashMLA takes no empty row
        c4_sparse_lengths  [1, 64]                             at most topk
        c4_sparse_indices  [[-1, ...], [-1, ...]]              the top-k kernel of each layer writes here
        c128_out_locs      [0, 9]
        c128_clamped       [1, 2]
        c128_indices       [[-1, ...], [8, 9, -1, ...]]        page 4 holds C128 rows 8 and 9
        c4                 rows {3, 2*8+2, 4, 4}, {256, 9*8+7, 18, 19}
        c128               rows {3, 5*128+2, 5, 5}, {256, 1*128+127, 1, 1}

    ### Fields
    All tensors lie on the step's device, are contiguous, and belong to the builder: they hold until the second next
    step is started. [rows] unless told.

    lengths            int32, tokens that the row's query may attend to, itself included
    positions          int32, ``lengths - 1``
    query_starts       int32 [requests + 1], the first row of each request, and the end
    page_table         int32 [rows, width], full page of positions 0, 256, 512, ... below ``lengths``, 0 behind
    swa_indices        int32 [rows, window], SWA slots of the last ``window`` positions, newest first, -1 behind
    swa_lengths        int32, valid entries of ``swa_indices``
    swa_out_locs       int32, SWA slot that the row's key is written to
    c4_out_locs        int64, C4 slot that the row completes, 0 (the dummy) when it completes none
    c4_lengths         int32, C4 rows that exist; ``c4_clamped``: at least 1; ``c4_sparse_lengths``: also at most topk
    c4_sparse_indices  int32 [rows, topk], -1
    c128_out_locs, c128_clamped   likewise
    c128_indices       int32 [rows, 2 * width rounded up to 64], C128 slots, -1 behind; no columns without C128 layers
    c4, c128           CompressPlan
    """

    lengths: torch.Tensor
    positions: torch.Tensor
    query_starts: torch.Tensor
    page_table: torch.Tensor
    swa_indices: torch.Tensor
    swa_lengths: torch.Tensor
    swa_out_locs: torch.Tensor
    c4_out_locs: torch.Tensor
    c4_lengths: torch.Tensor
    c4_clamped: torch.Tensor
    c4_sparse_lengths: torch.Tensor
    c4_sparse_indices: torch.Tensor
    c128_out_locs: torch.Tensor
    c128_clamped: torch.Tensor
    c128_indices: torch.Tensor
    c4: CompressPlan
    c128: CompressPlan


def c128_width(layout: PrepLayout, width: int) -> int:
    """Returns the columns of ``c128_indices`` for a page table of ``width`` pages."""
    if not layout.c128:
        return 0
    return -(-width * (layout.page // 128) // INDEX_ALIGNMENT) * INDEX_ALIGNMENT
