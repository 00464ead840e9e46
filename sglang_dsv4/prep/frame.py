"""Holds the device memory of one step's metadata, used again and again."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from sglang_dsv4.prep.metadata import CompressPlan, StepMetadata, c128_width
from sglang_dsv4.prep.plan import head_size, pitch
from sglang_dsv4.prep.step import PrepLayout
from triton_ops.prep_args import (
    C4_CLAMPED,
    C4_LENGTHS,
    C4_SPARSE_LENGTHS,
    C128_CLAMPED,
    LENGTHS,
    POSITIONS,
    SWA_LENGTHS,
    VECTORS,
    Outputs,
)

SMALLEST_ROWS = 16
MOST_SHAPES = 512
LONGS = ("c4_out_locs", "c128_out_locs")  # int64; all other fields are int32
WRITES = ("c4_write", "c128_write")  # of steps that verify drafts


class Shape(NamedTuple):
    """Names the sizes that decide the views of a frame."""

    requests: int
    queries: int
    width: int
    verify: bool


class Views(NamedTuple):
    """Holds a frame cut for one shape. head: the vectors and query starts, where the host's plan is copied to."""

    head: torch.Tensor
    outputs: Outputs
    metadata: StepMetadata


class Frame:
    """Keeps one step's memory. Views of one shape are made once."""

    def __init__(self, layout: PrepLayout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._views: dict[Shape, Views] = {}

    def views(self, shape: Shape) -> tuple[Views, bool]:
        """Returns the views, and whether memory was allocated for them, on the current stream.

        Memory grows by doubling up to the largest step's need; earlier views then keep the old memory alive.
        """
        views = self._views.get(shape)
        if views is not None:
            return views, False
        if len(self._views) >= MOST_SHAPES:
            self._views.clear()
        with torch.inference_mode(False):  # they are written to inside and outside of that mode
            grown = self._reserve(shape)
            views = cut(self._layout, shape, self._memory)
        self._views[shape] = views
        return views, grown

    def _reserve(self, shape: Shape) -> bool:
        rows = max(SMALLEST_ROWS, 1 << (shape.requests * shape.queries - 1).bit_length())
        most = Shape(rows, 1, self._layout.most_pages, True)
        nbytes = size_of(self._layout, most)
        if nbytes <= self._memory.numel():
            return False
        self._views.clear()
        if self._memory.is_cuda:  # made on a stream of its own, say at start: the last forward that reads it is on this
            self._memory.record_stream(torch.cuda.current_stream(self._device))
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return True


def size_of(layout: PrepLayout, shape: Shape) -> int:
    """Returns the bytes that ``cut`` needs."""
    return sum(_nbytes(name, size) for name, size in _sizes(layout, shape).items())


def cut(layout: PrepLayout, shape: Shape, memory: torch.Tensor) -> Views:
    """Cuts the first ``size_of`` bytes of ``memory``, uint8 and 16-byte aligned, into one tensor a field."""
    rows = shape.requests * shape.queries
    parts, end = dict[str, Any](), 0
    for name, size in _sizes(layout, shape).items():
        part = memory[end : end + _nbytes(name, size)].view(torch.int64 if name in LONGS else torch.int32)
        parts[name] = part[: math.prod(size)].view(size)
        end += _nbytes(name, size)
    head, behind = parts.pop("head"), VECTORS * pitch(rows)
    if not shape.verify:
        parts |= dict.fromkeys(WRITES)
    outputs = Outputs(head[:behind].view(VECTORS, -1), head[behind:], **parts)
    return Views(head, outputs, _metadata(outputs, rows))


def _sizes(layout: PrepLayout, shape: Shape) -> dict[str, tuple[int, ...]]:
    """Returns the size of the head, then of every field of ``Outputs`` behind it."""
    rows = shape.requests * shape.queries
    return {
        "head": (head_size(shape.requests, rows),),
        "page_table": (rows, shape.width),
        "swa_indices": (rows, layout.window),
        "swa_out_locs": (rows,),
        "c4_out_locs": (rows,),
        "c4_sparse": (rows, layout.topk),
        "c128_out_locs": (rows,),
        "c128_indices": (rows, c128_width(layout, shape.width)),
        "c4_plan": (rows, 4),
        "c128_plan": (rows, 4),
        **dict.fromkeys(WRITES, (rows, 2)),
    }


def _nbytes(name: str, size: tuple[int, ...]) -> int:
    """Returns the bytes of a part, 16-byte aligned as a vector is."""
    return pitch(math.prod(size) * (2 if name in LONGS else 1)) * 4


def _metadata(outputs: Outputs, rows: int) -> StepMetadata:
    vectors = outputs.vectors

    def plan(words: torch.Tensor, write: torch.Tensor | None) -> CompressPlan:
        return CompressPlan(words.view(torch.uint8), None if write is None else write.view(torch.uint8))

    return StepMetadata(
        lengths=vectors[LENGTHS, :rows],
        positions=vectors[POSITIONS, :rows],
        query_starts=outputs.query_starts,
        page_table=outputs.page_table,
        swa_indices=outputs.swa_indices,
        swa_lengths=vectors[SWA_LENGTHS, :rows],
        swa_out_locs=outputs.swa_out_locs,
        c4_out_locs=outputs.c4_out_locs,
        c4_lengths=vectors[C4_LENGTHS, :rows],
        c4_clamped=vectors[C4_CLAMPED, :rows],
        c4_sparse_lengths=vectors[C4_SPARSE_LENGTHS, :rows],
        c4_sparse_indices=outputs.c4_sparse,
        c128_out_locs=outputs.c128_out_locs,
        c128_clamped=vectors[C128_CLAMPED, :rows],
        c128_indices=outputs.c128_indices,
        c4=plan(outputs.c4_plan, outputs.c4_write),
        c128=plan(outputs.c128_plan, outputs.c128_write),
    )
