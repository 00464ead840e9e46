"""The engine names a request by indices on the device; reading them to the host costs more than moving the pages.

So the device finds the request and checks it, in one launch, and sends the host a short report. A request must lie page
by page, as the engine's paged allocator lays it; anything else is a mistake and is refused with the position.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang_dsv4.cache.families import window_start
from sglang_dsv4.cache.rows import Place
from sglang_dsv4.errors import IndexMismatch, WindowNotMapped
from sglang_dsv4.transfer.buffers import UNBOUNDED, DeviceBuffers
from triton_ops.copy_rows import PAGE_NUMBERS
from triton_ops.locate import NOT_MAPPED, NOTHING, OFF_PAGE, locate, locate_torch, report_size


class Request(NamedTuple):
    """A request on the device, as the engine names it.

    indices: full slots of positions 0..n-1, 1-D int32 or int64, contiguous. swa_map: the allocator's full-to-SWA
    mapping, int64, its last entry -1. slot: row of req_to_token.
    """

    indices: torch.Tensor
    swa_map: torch.Tensor
    slot: int

    @classmethod
    def of(cls, indices: torch.Tensor, swa_map: torch.Tensor, slot: int) -> Request:
        """Raises IndexMismatch for indices that are no list of slots."""
        if indices.dim() != 1:
            raise IndexMismatch(f"indices must be 1-D, got shape {tuple(indices.shape)}")
        if indices.dtype not in {torch.int32, torch.int64}:
            raise IndexMismatch(f"indices must be int32 or int64, not {indices.dtype}")
        return cls(indices.contiguous(), swa_map, slot)


class Locator:
    """Finds requests of one pool on its card, one at a time.

    page_numbers: int64 [3] on the card, for ``copy_rows``; written by the kernel that ``start`` launches.
    """

    def __init__(self, buffers: DeviceBuffers, cuda: Any = torch.cuda) -> None:
        self._geometry, self._limits, self._cuda = buffers.geometry, buffers.limits, cuda
        self.page_numbers = torch.full((PAGE_NUMBERS,), -1, dtype=torch.int64, device=buffers.device)
        most = self._limits[0] if self._limits[0] < UNBOUNDED else 1
        self._report = self._make_report(most * self._geometry.page_size)
        self._done = cuda.Event()
        self._request: Request | None = None

    def _make_report(self, tokens: int) -> torch.Tensor:
        return torch.empty(report_size(tokens), dtype=torch.int64, pin_memory=self.page_numbers.is_cuda)

    def warm_up(self, stream: Any) -> None:
        """Compile the kernel for both integer types that indices come in."""
        for dtype in (torch.int32, torch.int64):
            slots = torch.zeros(1, dtype=dtype, device=self.page_numbers.device)
            self.start(Request(slots, torch.zeros(8, dtype=torch.int64, device=slots.device), 0), stream)

    def start(self, request: Request, stream: Any) -> None:
        """Launch the search on ``stream``. Raises IndexMismatch for more tokens than the pool holds."""
        tokens = request.indices.shape[0]
        check_length(tokens, self._geometry.page_size, self._limits[0])
        if report_size(tokens) > len(self._report):  # a stage without paged families bounds no request
            self._report = self._make_report(2 * tokens)
        start = window_start(self._geometry, tokens)
        locate(
            request.indices, request.swa_map, request.slot, self._geometry.page_size, start, self._limits,
            self.page_numbers, self._report, stream.cuda_stream,
        )  # fmt: skip
        self._done.record(stream)
        self._request = request

    def check(self) -> None:
        """Wait for the last search; raise IndexMismatch or WindowNotMapped for a request that it found at fault."""
        self._done.synchronize()
        assert self._request is not None
        raise_fault(self._request, self._report)


def check_length(tokens: int, page: int, pages: int) -> None:
    """Raise IndexMismatch when ``tokens`` tokens need more than ``pages`` pages."""
    if -(-tokens // page) > pages:
        raise IndexMismatch(f"{tokens} tokens are more than the pool's {pages} pages hold")


def raise_fault(request: Request, report: torch.Tensor) -> None:
    """Raise for the first position that ``report`` names."""
    tokens = len(request.indices)
    first = int(report.numpy()[: report_size(tokens)].min())
    if first == NOTHING:
        return
    position, fault = divmod(first, 4)
    slot = int(request.indices[position])
    if fault == OFF_PAGE:
        raise IndexMismatch(f"position {position} of {tokens} has full slot {slot}, off its page or out of range")
    if fault == NOT_MAPPED:
        raise WindowNotMapped(f"position {position} of {tokens} is inside the window but has no SWA slot")
    raise IndexMismatch(
        f"position {position} of {tokens} has SWA slot {int(request.swa_map[slot])}, off its page or out of range"
    )


def locate_on_host(buffers: DeviceBuffers, request: Request) -> Place:
    """The Place of ``request``, read to the host slot by slot; raises as ``Locator``.

    Slow: for what must not rest on the kernel, such as verify mode and the reference.
    """
    geometry, limits = buffers.geometry, buffers.limits
    here = Request(request.indices.cpu(), request.swa_map.cpu(), request.slot)
    tokens, page = len(here.indices), geometry.page_size
    check_length(tokens, page, limits[0])
    start = window_start(geometry, tokens)
    report = torch.empty(report_size(tokens), dtype=torch.int64)
    numbers = torch.empty(PAGE_NUMBERS, dtype=torch.int64)
    locate_torch(here.indices, here.swa_map, here.slot, page, start, limits, numbers, report)
    raise_fault(here, report)
    slots = here.indices.long()
    return Place(tokens, (slots[::page] // page).numpy(), here.swa_map[slots[start:]].numpy(), here.slot)
