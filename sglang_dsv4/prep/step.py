"""Describes the inputs of a decode step's metadata. No kernel reads them before ``MetadataBuilder.start``.

A *row* is one query token. A plain decode step has one row a request; a step that verifies drafts has ``queries``
rows a request, the rows of one request side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_dsv4.errors import GeometryError, IndexMismatch
from triton_ops.prep_args import Inputs, Sizes

INDEX_ALIGNMENT = 64  # FlashMLA takes index tables whose width is a multiple of this
MOST_ROWS = 65_535  # a compress plan numbers its rows in 16 bits

INTS = (torch.int32, torch.int64)

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PrepLayout:
    """Keeps sizes that never change while a server runs.

    context: columns of req_to_token, the longest request. topk: index_topk of the model, rows a C4 layer attends to.
    swa_page: tokens an SWA page. c4_ring, c128_ring: rows of a state ring (an SWA page's, a request's).
    c4_keep, c128_keep: trailing tokens of a verified step that are written to the ring whatever they complete,
    so that a rejected draft can be rolled back (the engine's ``mtp_pad``). c128: whether any layer compresses by 128.
    """

    context: int
    topk: int = 512
    page: int = 256
    window: int = 128
    swa_page: int = 256
    c4_ring: int = 8
    c128_ring: int = 128
    c4_keep: int = 0
    c128_keep: int = 0
    c128: bool = True

    def __post_init__(self) -> None:
        if self.context < 1 or self.topk < 1 or self.window < 1:
            raise GeometryError(f"context {self.context}, topk {self.topk} and window {self.window} must be positive")
        if self.page % 128 or self.page < 128:
            raise GeometryError(f"a page of {self.page} tokens does not hold whole C128 rows")
        if self.topk % INDEX_ALIGNMENT or self.window % INDEX_ALIGNMENT:
            raise GeometryError(f"topk {self.topk} and window {self.window} must be multiples of {INDEX_ALIGNMENT}")
        if self.c4_ring % 4 or self.c128_ring % 128 or self.swa_page % self.c4_ring:
            raise GeometryError(
                f"state rings of {self.c4_ring} and {self.c128_ring} rows do not fit SWA pages of {self.swa_page}"
            )

    @property
    def most_pages(self) -> int:
        """Counts the pages of the longest request."""
        return -(-self.context // self.page)

    @property
    def sizes(self) -> Sizes:
        """Returns the sizes for which the kernel is compiled."""
        return Sizes(
            self.page, self.window, self.swa_page, self.topk,
            self.c4_ring, self.c128_ring, self.c4_keep, self.c128_keep,
        )  # fmt: skip


class Tables(NamedTuple):
    """Holds the engine's tables, which live on the device only.

    req_to_token: int32 [request slots, context], the full slot of each position.
    full_to_swa: int64 [full slots + 1], the SWA slot of each full slot (0: none); the last entry is -1.
    """

    req_to_token: torch.Tensor
    full_to_swa: torch.Tensor


class Step(NamedTuple):
    """Describes one step as the scheduler knows it.

    slots: int32 or int64 [requests] on the device, rows of req_to_token. out_locs: int32 or int64 [requests * queries]
    on the device, full slots that the step writes.
    lengths: the requests' tokens, int64 NumPy [requests] where the host knows them NOW; else a device tensor, int32 or
    int64 [requests], read by the kernel when it runs. With overlapped speculation only the device knows how many
    drafts were accepted: a host copy of such lengths is out of date, so there is none to be read.
    verify: whether drafts are verified. Then ``lengths`` do not count the step's own tokens, and a request's queries
    see lengths + 1, + 2, ...; in plain decode the length counts the one token being decoded.
    length_offset: tokens of a request's first query beyond ``lengths``, a device tensor then. None: 1 or 0.
    width: pages of the page table, at most ``PrepLayout.most_pages``; None: all of them.
    """

    slots: torch.Tensor
    out_locs: torch.Tensor
    lengths: Lengths | torch.Tensor
    queries: int = 1
    verify: bool = False
    width: int | None = None
    length_offset: int | None = None

    @property
    def requests(self) -> int:
        """Counts the requests of the step."""
        return int(self.slots.shape[0])

    @property
    def rows(self) -> int:
        """Counts the query tokens of the step."""
        return int(self.slots.shape[0]) * self.queries


def inputs_of(step: Step, tables: Tables) -> Inputs:
    """Returns the kernel's inputs."""
    lengths = step.lengths if isinstance(step.lengths, torch.Tensor) else None
    length_offset = int(step.verify) if step.length_offset is None else step.length_offset
    return Inputs(step.slots, step.out_locs, lengths, *tables, step.queries, length_offset)


def check_step(layout: PrepLayout, step: Step) -> int:
    """Returns the width of the page table. Raises IndexMismatch unless the step is one that can be prepared."""
    requests, rows = step.requests, step.rows
    if step.queries < 1 or (step.queries > 1 and not step.verify) or not 0 < rows <= MOST_ROWS:
        kind = "verified" if step.verify else "decoded"
        raise IndexMismatch(
            f"{requests} requests of {step.queries} {kind} queries: a decode step has 1 query a request, "
            f"a step 1 to {MOST_ROWS} rows"
        )
    if step.slots.dtype not in INTS or (isinstance(step.lengths, torch.Tensor) and step.lengths.dtype not in INTS):
        raise IndexMismatch("slots, and lengths on the device, must be int32 or int64")
    if step.out_locs.shape != (rows,) or step.out_locs.dtype not in INTS:
        raise IndexMismatch(
            f"out_locs must be int32 or int64 [{rows}], not {step.out_locs.dtype} {list(step.out_locs.shape)}"
        )
    on_device = (step.slots, step.out_locs, *((step.lengths,) if isinstance(step.lengths, torch.Tensor) else ()))
    if not all(tensor.is_contiguous() for tensor in on_device):
        raise IndexMismatch("slots, out_locs and lengths must be contiguous")
    if step.length_offset is not None and not isinstance(step.lengths, torch.Tensor):
        raise IndexMismatch("a step with a length_offset needs its lengths on the device")
    if tuple(step.lengths.shape) != (requests,):
        raise IndexMismatch(f"lengths must have shape [{requests}], not {list(step.lengths.shape)}")
    width = layout.most_pages if step.width is None else step.width
    if not 0 < width <= layout.most_pages:
        raise IndexMismatch(f"a page table of {width} pages; the longest request has {layout.most_pages}")
    return width
