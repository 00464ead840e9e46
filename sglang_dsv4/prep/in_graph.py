"""Builds metadata inside a captured graph, from lengths that lie on the device.

A graph replays its capture for every batch to come, so no length may go into it from the host. The kernel reads
lengths, slots and tables where the device has them, and each replay finds their present content. The metadata is one
allocation. Inside a capture it comes from the graph's own pool, and lives as long as the graph may write it; the
rotating frames of the eager builder would be read by one batch while another is prepared.
"""

from __future__ import annotations

import torch

from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.prep.frame import Shape, cut, size_of
from sglang_dsv4.prep.metadata import StepMetadata
from sglang_dsv4.prep.step import PrepLayout, Step, Tables, check_step, inputs_of
from triton_ops.prep_args import check_prep_rows
from triton_ops.prep_rows import prep_rows, prep_rows_torch


def build_in_graph(layout: PrepLayout, step: Step, tables: Tables) -> StepMetadata:
    """Builds the metadata of ``step`` in memory of its own: one allocation and one kernel on the current stream.

    The lengths must lie on the device; rows of the batch's padding have length 1 and slot 0. While a stream captures,
    nothing is compiled: the caller has run the same step before, as the engine's warm-ups do. Raises IndexMismatch.
    """
    if not isinstance(step.lengths, torch.Tensor):
        raise IndexMismatch("lengths of the host do not change when a graph is replayed")
    shape = Shape(step.requests, step.queries, check_step(layout, step), step.verify)
    memory = torch.empty(size_of(layout, shape), dtype=torch.uint8, device=step.slots.device)
    views = cut(layout, shape, memory)
    inputs = inputs_of(step, tables)
    if memory.is_cuda:
        check_prep_rows(layout.sizes, inputs, views.outputs)
        prep_rows(layout.sizes, inputs, views.outputs)
    else:
        prep_rows_torch(layout.sizes, inputs, views.outputs)
    return views.metadata
