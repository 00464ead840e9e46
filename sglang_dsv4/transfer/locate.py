"""Locates and checks a request on the device in one launch, and sends the host a short report.

The engine names a request by indices on the device; reading them to the host costs more than moving the pages. The
report is read when it is needed: the launch may be behind a whole forward. A request must lie page by page, as the
engine's paged allocator lays it; anything else is refused with the position.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sglang_dsv4.cache.families import Geometry, window_start
from sglang_dsv4.cache.rows import Place
from sglang_dsv4.errors import HostCopyError, IndexMismatch, WindowNotMapped
from sglang_dsv4.transfer.buffers import UNBOUNDED, DeviceBuffers
from triton_ops.copy_pages import SLOT_DTYPES
from triton_ops.copy_rows import PAGE_NUMBERS
from triton_ops.locate import NOT_MAPPED, NOTHING, OFF_PAGE, OFF_SWA_PAGE, locate, locate_torch, report_size

SEARCHES = 64  # whose answers and page numbers are kept; one more waits for the end of the oldest transfer
NO_SLOT = -1  # of a request whose rows there are neither read nor written
_SLOT = {OFF_PAGE: "full slot", OFF_SWA_PAGE: "SWA slot"}


class Request(NamedTuple):
    """Names a request on the device as the engine does.

    indices: full slots of positions 0..n-1, 1-D int32 or int64, contiguous. swa_map: the allocator's full-to-SWA
    mapping, int64, its last entry -1. slot: row of req_to_token, or NO_SLOT. window: whether its window is looked for,
    too; without it only its pages are copied.
    """

    indices: torch.Tensor
    swa_map: torch.Tensor
    slot: int
    window: bool = True

    @classmethod
    def of(cls, indices: torch.Tensor, swa_map: torch.Tensor, slot: int, window: bool = True) -> Request:
        """Checks and builds a Request. Raises IndexMismatch for indices that are no list of slots."""
        if indices.dim() != 1:
            raise IndexMismatch(f"indices must be 1-D, got shape {tuple(indices.shape)}")
        if indices.dtype not in SLOT_DTYPES:
            raise IndexMismatch(f"indices must be int32 or int64, not {indices.dtype}")
        if indices.device != swa_map.device:
            raise IndexMismatch(f"indices on {indices.device}, the pool is on {swa_map.device}")
        return cls(indices.contiguous(), swa_map, slot, window)

    def looked_up_from(self, geometry: Geometry) -> int:
        """Returns the first position whose SWA slot is looked up."""
        tokens = self.indices.shape[0]
        return window_start(geometry, tokens) if self.window else tokens


class DeviceSearch:
    """Holds the answer of one search on the device. page_numbers: int64 [3] on the device, for ``copy_rows``."""

    def __init__(self, request: Request, memory: _SearchMemory) -> None:
        self._request: Request | None = request  # kept alive while kernels read its indices
        self._tokens, self._memory = request.indices.shape[0], memory
        self._first: int | None = None
        self.page_numbers = memory.page_numbers

    def check(self, late: bool = False) -> None:
        """Waits for the search alone; raises IndexMismatch or WindowNotMapped for a request that it found at fault.

        late: the request's slots may be others' by now; the message leaves them out.
        """
        raise_fault(self.first_fault(), self._tokens, None if late else self._request)

    def first_fault(self) -> int:
        """Waits for the report and returns its smallest entry."""
        if self._first is None:
            self._memory.located.synchronize()
            self._first = _smallest(self._memory.report, self._tokens)
        return self._first

    def comes_before(self, stream: Any) -> None:
        """Orders later work of ``stream`` behind the search."""
        stream.wait_event(self._memory.located)

    def ends_with(self, event: Any) -> None:
        """Notes that after ``event`` nothing reads the page numbers."""
        self._memory.ended = event

    def release_memory(self) -> None:
        """Keeps the answer and frees the memory for another search."""
        self.first_fault()
        if self._memory.ended is not None:
            self._memory.ended.synchronize()
        self._memory.ended = self._request = None


class Refusal:
    """Holds the error of a save that this rank alone may have refused, until all ranks ask for the answer."""

    def __init__(self, error: HostCopyError) -> None:
        self._error = error

    def check(self, late: bool = False) -> None:
        """Raises the error."""
        raise self._error


@dataclass(eq=False)
class _SearchMemory:
    """Holds the memory that one search writes; the next search in it waits for the end of its transfer."""

    page_numbers: torch.Tensor
    report: torch.Tensor
    located: Any
    ended: Any = None
    search: DeviceSearch | None = None


class Locator:
    """Finds requests of one pool on its device. The answer of a search may be asked for at any time, or never."""

    def __init__(self, buffers: DeviceBuffers, cuda: Any) -> None:
        self._geometry, self._limits, self._pages = buffers.geometry, buffers.limits, buffers.page_counts[0]
        self._pinned, self._device = buffers.device.type == "cuda", buffers.device
        numbers = torch.full((SEARCHES, PAGE_NUMBERS), -1, dtype=torch.int64, device=buffers.device)
        most = self._pages if self._pages < UNBOUNDED else 1
        tokens = most * self._geometry.page_size
        self._memories = deque(_SearchMemory(row, self._make_report(tokens), cuda.Event()) for row in numbers)

    def _make_report(self, tokens: int) -> torch.Tensor:
        return torch.empty(report_size(tokens), dtype=torch.int64, pin_memory=self._pinned)

    def start(self, request: Request, stream: Any) -> DeviceSearch:
        """Launches the search on ``stream``. Raises IndexMismatch for more tokens than the pool holds."""
        tokens = request.indices.shape[0]
        check_length(tokens, self._geometry.page_size, self._pages)
        memory = self._memories[0]
        if memory.search is not None:
            memory.search.release_memory()
        if report_size(tokens) > memory.report.shape[0]:  # a stage without paged families bounds no request
            memory.report = self._make_report(2 * tokens)
        start = request.looked_up_from(self._geometry)
        locate(
            request.indices, request.swa_map, request.slot, self._geometry.page_size, start, self._limits,
            memory.page_numbers, memory.report, stream.cuda_stream,
        )  # fmt: skip
        memory.located.record(stream)
        memory.search = DeviceSearch(request, memory)
        self._memories.rotate(-1)
        return memory.search


def check_length(tokens: int, page: int, pages: int) -> None:
    """Raises IndexMismatch when ``tokens`` tokens need more than ``pages`` pages."""
    if -(-tokens // page) > pages:
        raise IndexMismatch(f"{tokens} tokens are more than the pool's {pages} pages hold")


def _smallest(report: torch.Tensor, tokens: int) -> int:
    return int(report.numpy()[: report_size(tokens)].min())


def raise_fault(first: int, tokens: int, request: Request | None) -> None:
    """Raises for position and fault ``first``, unless it is NOTHING. request: None where its slots cannot be read."""
    if first == NOTHING:
        return
    position, fault = divmod(first, 4)
    where = f"position {position} of {tokens}"
    if fault == NOT_MAPPED:
        raise WindowNotMapped(f"{where} is inside the window but has no SWA slot")
    if request is None:
        raise IndexMismatch(f"{where} has its {_SLOT[fault]} off its page or out of range")
    slot = int(request.indices[position])
    found = slot if fault == OFF_PAGE else int(request.swa_map[slot])
    raise IndexMismatch(f"{where} has {_SLOT[fault]} {found}, off its page or out of range")


def locate_on_host(buffers: DeviceBuffers, request: Request) -> Place:
    """Finds the Place of ``request`` on the host, slot by slot; raises as ``Locator``.

    Slow: for verify mode and the reference, which must not rest on the kernel.
    """
    geometry, limits = buffers.geometry, buffers.limits
    here = request._replace(indices=request.indices.cpu(), swa_map=request.swa_map.cpu())
    tokens, page = len(here.indices), geometry.page_size
    check_length(tokens, page, buffers.page_counts[0])
    start = request.looked_up_from(geometry)
    report = torch.empty(report_size(tokens), dtype=torch.int64)
    numbers = torch.empty(PAGE_NUMBERS, dtype=torch.int64)
    locate_torch(here.indices, here.swa_map, here.slot, page, start, limits, numbers, report)
    raise_fault(_smallest(report, tokens), tokens, here)
    slots = here.indices.long()
    pages = slots[::page] // page
    if len(torch.unique(pages)) != len(pages):  # the kernel cannot tell
        raise IndexMismatch(f"{tokens} tokens lie in {len(torch.unique(pages))} pages: one is named twice")
    return Place(tokens, pages.numpy(), here.swa_map[slots[start:]].numpy(), here.slot)
