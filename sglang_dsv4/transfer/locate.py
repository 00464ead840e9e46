"""Where a request lies: found and checked on the device, or read to the host number by number."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from sglang_dsv4.cache.families import Address, window_start
from sglang_dsv4.cache.rows import Int64s, Place
from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.transfer.buffers import DeviceBuffers
from triton_ops.locate import NOTHING, locate, locate_torch, report_size

UNBOUNDED = 2**31 - 1


class Request(NamedTuple):
    """A request on the device, as the engine names it.

    indices: full slots of positions 0..n-1, 1-D int32 or int64. swa_map: the allocator's full-to-SWA mapping, int64,
    its last entry -1. slot: row of req_to_token.
    """

    indices: torch.Tensor
    swa_map: torch.Tensor
    slot: int


class Locator:
    """Finds requests of one pool. On a GPU: one launch whose short report lands in pinned memory.

    ``look``, then other work, then ``window_pages``; both for one request at a time.
    """

    def __init__(self, side: DeviceBuffers) -> None:
        self._geometry, self._cuda = side.geometry, side.device.type == "cuda"
        self._limits = (_fewest_pages(side, Address.FULL_PAGE), _fewest_pages(side, Address.SWA_PAGE))
        most = self._limits[0] if self._limits[0] < UNBOUNDED else 1
        self._pages = torch.empty(most, dtype=torch.int64, device=side.device)
        self._report = torch.empty(
            report_size(most * side.geometry.page_size), dtype=torch.int64, pin_memory=self._cuda
        )
        self._seen = (0, 0)
        self._event = torch.cuda.Event() if self._cuda else None
        if self._cuda:
            self._warm_up(side.device)

    def _warm_up(self, device: torch.device) -> None:
        """Compile the kernel now, for both integer types that indices come in."""
        for dtype in (torch.int32, torch.int64):
            slots = torch.zeros(1, dtype=dtype, device=device)
            self.look(Request(slots, torch.zeros(8, dtype=torch.int64, device=device), 0))

    def look(self, request: Request) -> torch.Tensor:
        """Start looking, on the current stream. Returns the full pages, int64 on the device, valid until the next look.

        They are what the request says, right or wrong: use them in kernels that skip a page out of range, or after
        ``window_pages`` has found no fault.
        """
        indices = request.indices
        if indices.dim() != 1:
            raise IndexMismatch(f"indices must be 1-D, got shape {tuple(indices.shape)}")
        if indices.dtype not in {torch.int32, torch.int64}:
            raise IndexMismatch(f"indices must be int32 or int64, not {indices.dtype}")
        tokens, page = indices.shape[0], self._geometry.page_size
        if self._limits[0] < UNBOUNDED and -(-tokens // page) > len(self._pages):
            raise IndexMismatch(f"{tokens} tokens are more than the pool's {len(self._pages)} pages hold")
        self._room(tokens)
        start = window_start(self._geometry, tokens)
        run = locate if self._cuda else locate_torch
        run(indices.contiguous(), request.swa_map, page, start, self._limits, self._pages, self._report)
        self._seen = (tokens, start)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(indices.device.index))
        return self._pages[: -(-tokens // page)]

    def _room(self, tokens: int) -> None:
        """A stage without paged families bounds no request; then the tables grow."""
        pages = -(-tokens // self._geometry.page_size)
        if pages > len(self._pages):
            self._pages = torch.empty(2 * pages, dtype=torch.int64, device=self._pages.device)
        if report_size(tokens) > len(self._report):
            self._report = torch.empty(2 * report_size(tokens), dtype=torch.int64, pin_memory=self._cuda)

    def window_pages(self) -> tuple[int, ...] | None:
        """SWA pages of the window of the request last looked at; None: it does not lie page by page, ``read`` it."""
        if self._event is not None:
            self._event.synchronize()
        tokens, start = self._seen
        if not tokens:
            return ()
        report = self._report.numpy()
        if report[2 : report_size(tokens)].min() != NOTHING:
            return None
        page = self._geometry.page_size
        return tuple(report[: (tokens - 1) // page - start // page + 1].tolist())

    def read(self, request: Request) -> Place:
        """The Place of ``request``, every slot compared with its page. Raises IndexMismatch."""
        tokens, page = len(request.indices), self._geometry.page_size
        slots = request.indices.cpu().numpy().astype(np.int64)
        _check_slots(slots, page, len(request.swa_map))
        window = slots[window_start(self._geometry, tokens) :]
        swa = request.swa_map[torch.from_numpy(window).to(request.swa_map.device)].cpu().numpy()
        return Place(tokens, slots[::page] // page, swa, request.slot)


def _fewest_pages(side: DeviceBuffers, address: Address) -> int:
    """Pages that every family of ``address`` has, the dummy page 0 included."""
    return min((side.pages[f.name] for f in side.families if f.layers and f.address is address), default=UNBOUNDED)


def _check_slots(slots: Int64s, page: int, mapped: int) -> None:
    """Every slot lies at its position's offset in the page of the first slot of its page."""
    order = np.arange(len(slots))
    expected = slots[order // page * page] // page * page + order % page
    bad = np.flatnonzero((slots != expected) | (slots < 0) | (slots >= mapped - 1))
    if len(bad):
        raise IndexMismatch(
            f"position {int(bad[0])} of {len(slots)} has full slot {int(slots[bad[0]])}, off its page or out of range"
        )
