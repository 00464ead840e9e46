"""Prepares the metadata of each step on a stream of its own.

    CPU             plan k+1
    prep stream         slab k+1 -> frame 1   [tables]  kernel k+1 -> frame 1
                                                               | ready
    forward stream  forward k, reads frame 0 ............      v   forward k+1, reads frame 1   forward k+2, frame 0
                                                     | released 0 ------> prep stream, before step k+2 writes frame 0

The copy of the plan waits for nothing but the memory it is written to; the kernel waits for the tables too. Two-way
order, by events alone: the forward stream waits for the step's kernel, the prep stream for the forward that used the
frame before.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable

import numpy as np
import torch

from sglang_dsv4.prep.frame import MOST_SHAPES, Frame, Shape, Views
from sglang_dsv4.prep.metadata import StepMetadata
from sglang_dsv4.prep.plan import fill_lengths
from sglang_dsv4.prep.slab import Slabs
from sglang_dsv4.prep.step import PrepLayout, Step, Tables, check_step, inputs_of
from sglang_dsv4.streams import on_stream
from triton_ops.prep_args import Inputs, check_prep_rows
from triton_ops.prep_rows import prep_rows, prep_rows_torch

FRAMES = 2


class MetadataBuilder:
    """Builds each step's metadata. Not thread-safe: the scheduler thread owns it. The CPU does everything at once.

    layout: sizes. device: where the tables and the metadata lie.
    """

    def __init__(self, layout: PrepLayout, device: torch.device) -> None:
        self.layout = layout
        self._sizes = layout.sizes
        self._cuda, self._device = device.type == "cuda", device
        self._slabs = Slabs(pin=self._cuda)
        self._frames = [Frame(layout, device) for _ in range(FRAMES)]
        self._steps = 0
        self._started = False
        self._beside = False  # whether the step last started is prepared on the prep stream
        self._checked: set[tuple[Hashable, ...]] = set()
        if self._cuda:
            self.stream = torch.cuda.Stream(device)
            self._copied = itertools.cycle([torch.cuda.Event() for _ in range(Slabs.COUNT)])
            self._tables_written, self._ready = torch.cuda.Event(), torch.cuda.Event()
            self._released = [torch.cuda.Event() for _ in range(FRAMES)]

    def start(self, step: Step, tables: Tables, after: torch.cuda.Stream | None = None) -> StepMetadata:
        """Enqueues the preparation of ``step``.

        after: the stream that made ``slots``, ``out_locs``, lengths that lie on the device, and ``tables``: the step
        is prepared on the prep stream behind that stream's work so far, beside the current one. None: it is prepared
        on the current stream.
        The caller keeps the step's tensors alive until the forward that follows ``finish`` has been enqueued.
        Returns the metadata: not to be read before ``finish``, valid until the second next start. Raises IndexMismatch.
        """
        if self._started:
            self.finish()
        width = check_step(self.layout, step)
        shape = Shape(step.requests, step.queries, width, step.verify)
        views, grown = self._frames[self._steps % FRAMES].views(shape)
        inputs = self._inputs(step, tables, views, shape)
        self._started = True
        self._beside = self._cuda and after is not None
        if after is not None and self._cuda:
            self._enqueue_beside(step, views, inputs, after, grown)
        elif self._cuda:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._released[self._steps % FRAMES])  # that step may have run on another stream
            self._send_plan(step, views, current)
            prep_rows(self._sizes, inputs, views.outputs)
        else:
            self._send_plan(step, views, None)
            prep_rows_torch(self._sizes, inputs, views.outputs)
        return views.metadata

    def finish(self) -> None:
        """Orders the current stream behind the step last started.

        Only work already on the current stream may read the metadata of the step before.
        """
        if not self._started:
            raise RuntimeError("finish without a started step")
        if self._cuda:
            current = torch.cuda.current_stream(self._device)
            self._released[(self._steps + 1) % FRAMES].record(current)
            if self._beside:
                current.wait_event(self._ready)
        self._steps += 1
        self._started = False

    def build(self, step: Step, tables: Tables) -> StepMetadata:
        """Runs ``start`` on the current stream, and ``finish``."""
        metadata = self.start(step, tables)
        self.finish()
        return metadata

    def warm_up(self) -> None:
        """Compiles the kernels of later steps: lengths of the host and of the device, with drafts and without."""
        longs = torch.zeros(1, dtype=torch.int64, device=self._device)
        table = torch.zeros((1, self.layout.context), dtype=torch.int32, device=self._device)
        tables = Tables(table, torch.full((2,), -1, dtype=torch.int64, device=self._device))
        for lengths, verify in ((np.ones(1, np.int64), False), (longs, False), (longs, True)):
            self.build(Step(longs, longs, lengths, verify=verify, width=1), tables)

    def _inputs(self, step: Step, tables: Tables, views: Views, shape: Shape) -> Inputs:
        inputs = inputs_of(step, tables)
        # The frame's own views were checked when they were cut; the engine's tables stay the same for many steps.
        dtypes = step.slots.dtype, step.out_locs.dtype
        key = (shape, tables.req_to_token.data_ptr(), tables.full_to_swa.data_ptr(), dtypes, inputs.lengths is None)
        if key not in self._checked:
            check_prep_rows(self._sizes, inputs, views.outputs)
            if len(self._checked) >= MOST_SHAPES:
                self._checked.clear()
            self._checked.add(key)
        return inputs

    def _enqueue_beside(self, step: Step, views: Views, inputs: Inputs, after: torch.cuda.Stream, grown: bool) -> None:
        current = torch.cuda.current_stream(self._device)
        if grown:
            self.stream.wait_stream(current)  # the new memory may have had readers there
        self.stream.wait_event(self._released[self._steps % FRAMES])
        with on_stream(self.stream, current):
            self._send_plan(step, views, self.stream)
            self._tables_written.record(after)
            self.stream.wait_event(self._tables_written)
            prep_rows(self._sizes, inputs, views.outputs, self.stream.cuda_stream)
        self._ready.record(self.stream)

    def _send_plan(self, step: Step, views: Views, stream: torch.cuda.Stream | None) -> None:
        """Plans into a slab and copies it on ``stream``, which is current; nothing where the device has the lengths."""
        if not isinstance(step.lengths, np.ndarray):
            return
        slab, array = self._slabs.take(views.head.shape[0])
        fill_lengths(self.layout, step.lengths, step.queries, step.verify, array)
        views.head.copy_(slab, non_blocking=True)
        if stream is not None:
            event = next(self._copied)
            event.record(stream)
            self._slabs.guard(event)
