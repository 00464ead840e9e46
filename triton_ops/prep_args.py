"""Describes and checks the arguments of ``prep_rows``: the engine's tables and a step's tensors in, fields out."""

from __future__ import annotations

from typing import NamedTuple

import torch

from triton_ops._checks import check_tensor

# Rows of ``vectors``.
LENGTHS, POSITIONS, SWA_LENGTHS, C4_LENGTHS, C4_CLAMPED, C4_SPARSE_LENGTHS, C128_CLAMPED = range(7)
VECTORS = 7


class Sizes(NamedTuple):
    """Holds the compile-time sizes.

    page, window, swa_page: tokens. topk: columns of that table. rings: rows of the state rings. keeps: trailing tokens
    of a verified step that the state rings always keep.
    """

    page: int
    window: int
    swa_page: int
    topk: int
    c4_ring: int
    c128_ring: int
    c4_keep: int
    c128_keep: int


class Inputs(NamedTuple):
    """Holds the inputs of a step.

    slots: int32 or int64 [requests]. out_locs: int32 or int64 [rows].
    lengths: int32 or int64 [requests], None: in vectors.
    req_to_token: int32 [slots, context]. full_to_swa: int64 [n], its last entry -1.
    length_offset: causal length of a request's first row minus its entry in ``lengths``.
    """

    slots: torch.Tensor
    out_locs: torch.Tensor
    lengths: torch.Tensor | None
    req_to_token: torch.Tensor
    full_to_swa: torch.Tensor
    queries: int
    length_offset: int


class Outputs(NamedTuple):
    """Holds the tensors that a step fills.

    vectors: int32 [7, at least rows]. query_starts: int32 [requests + 1]. page_table: int32 [rows, width].
    swa_indices: int32 [rows, window]. c4_sparse: int32 [rows, topk].
    c128_indices: int32 [rows, columns]; no columns where no layer compresses by 128.
    swa_out_locs: int32 [rows]; c4_out_locs, c128_out_locs: int64 [rows].
    plans: int32 [rows, 4]; writes: int32 [rows, 2], or None for a step without drafts.
    """

    vectors: torch.Tensor
    query_starts: torch.Tensor
    page_table: torch.Tensor
    swa_indices: torch.Tensor
    swa_out_locs: torch.Tensor
    c4_out_locs: torch.Tensor
    c4_sparse: torch.Tensor
    c128_out_locs: torch.Tensor
    c128_indices: torch.Tensor
    c4_plan: torch.Tensor
    c128_plan: torch.Tensor
    c4_write: torch.Tensor | None
    c128_write: torch.Tensor | None


def check_prep_rows(sizes: Sizes, inputs: Inputs, outputs: Outputs) -> None:
    """Raises for the first argument that the kernel cannot take; separate, so that reused tensors are checked once."""
    if sizes.topk & (sizes.topk - 1) or sizes.window & (sizes.window - 1):
        raise ValueError(f"topk {sizes.topk} and window {sizes.window} must be powers of two")
    requests = inputs.slots.shape[0]
    rows = requests * inputs.queries
    ints = (torch.int32, torch.int64)
    check_tensor("slots", inputs.slots, ints, (requests,))
    check_tensor("out_locs", inputs.out_locs, ints, (rows,))
    if inputs.lengths is not None:
        check_tensor("lengths", inputs.lengths, ints, (requests,))
    check_tensor("req_to_token", inputs.req_to_token, (torch.int32,), (None, None))
    check_tensor("full_to_swa", inputs.full_to_swa, (torch.int64,), (None,))
    shapes: dict[str, tuple[int | None, ...]] = {
        "vectors": (VECTORS, None), "query_starts": (requests + 1,), "page_table": (rows, None),
        "swa_indices": (rows, sizes.window), "c4_sparse": (rows, sizes.topk), "c128_indices": (rows, None),
        "c4_plan": (rows, 4), "c128_plan": (rows, 4), "c4_write": (rows, 2), "c128_write": (rows, 2),
    }  # fmt: skip
    for name, tensor in outputs._asdict().items():
        if tensor is not None:
            wide = name in {"c4_out_locs", "c128_out_locs"}
            check_tensor(name, tensor, (torch.int64 if wide else torch.int32,), shapes.get(name, (rows,)))
    if (outputs.c4_write is None) != (outputs.c128_write is None) or (outputs.c4_write is None and inputs.queries > 1):
        raise ValueError("a step with drafts has both write plans, a step without has none")
    if outputs.vectors.shape[1] < rows:
        raise ValueError(f"vectors of {outputs.vectors.shape[1]} entries do not hold {rows} rows")
    pages = outputs.page_table.shape[1]
    columns = outputs.c128_indices.shape[1]
    if (pages - 1) * sizes.page >= inputs.req_to_token.shape[1] or 0 < columns < pages * (sizes.page // 128):
        raise ValueError(f"{pages} pages are more than req_to_token or c128_indices have columns for")


def fill_vectors_torch(sizes: Sizes, lengths: torch.Tensor, vectors: torch.Tensor) -> None:
    """Fills ``vectors`` from the causal length of each row."""
    c4 = lengths // 4
    clamped = c4.clamp(min=1)
    every = (
        lengths, lengths - 1, lengths.clamp(max=sizes.window), c4, clamped, clamped.clamp(max=sizes.topk),
        (lengths // 128).clamp(min=1),
    )  # fmt: skip
    vectors[:, : len(lengths)] = torch.stack(every).to(torch.int32)
