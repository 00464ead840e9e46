"""Reads from the device where a request lies: a few numbers, one wait."""

from __future__ import annotations

import numpy as np
import torch

from sglang_dsv4.cache.families import Geometry, window_start
from sglang_dsv4.cache.rows import Int64s, Place
from sglang_dsv4.errors import IndexMismatch
from triton_ops.read_place import place_size, read_place, read_place_torch


class PlaceReader:
    """Reads places of one pool. On a GPU: one launch that writes to pinned memory, and a wait for its event."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._geometry = geometry
        self._cuda = device.type == "cuda"
        self._out = torch.empty(0, dtype=torch.int64)
        if self._cuda:
            self._warm_up(device)

    def _warm_up(self, device: torch.device) -> None:
        """Compile the kernel now: for a row of req_to_token that is 16-byte aligned, and for one that is not."""
        slots, swa_map = (
            torch.zeros(8, dtype=torch.int32, device=device),
            torch.zeros(8, dtype=torch.int64, device=device),
        )
        out = torch.empty(16, dtype=torch.int64, pin_memory=True)
        for first in (0, 1):
            read_place(slots[first : first + 1], swa_map, self._geometry.page_size, 0, out)

    def read(self, indices: torch.Tensor, swa_map: torch.Tensor, request_slot: int, thorough: bool = False) -> Place:
        """The Place of the request whose full slots are ``indices`` (1-D int, positions 0..n-1).

        swa_map: the allocator's full-to-SWA mapping. thorough: compare every slot with its page, not only the
        first of each page and the window (the rest then comes to the host too; always done where it already is).
        Raises IndexMismatch.
        """
        if indices.dim() != 1:
            raise IndexMismatch(f"indices must be 1-D, got shape {tuple(indices.shape)}")
        tokens, page = len(indices), self._geometry.page_size
        if not self._cuda or thorough:
            _check_slots(indices.cpu().numpy().astype(np.int64), page)
        start = window_start(self._geometry, tokens)
        size = place_size(tokens, page, start)
        if len(self._out) < size:
            self._out = torch.empty(max(4096, 2 * size), dtype=torch.int64, pin_memory=self._cuda)
        if self._cuda:
            read_place(indices.contiguous(), swa_map, page, start, self._out)
            torch.cuda.current_stream(indices.device).record_event().synchronize()
        else:
            read_place_torch(indices.contiguous(), swa_map, page, start, self._out)
        pages, tail = -(-tokens // page), tokens - start
        found = self._out[:size].numpy().copy()
        first, slots, mapped = found[:pages], found[pages : pages + tail], found[pages + tail :]
        _check_window(first, slots, tokens, page, len(swa_map))
        return Place(tokens, first // page, mapped, int(request_slot))


def _check_slots(slots: Int64s, page: int) -> None:
    """Every slot lies at its position's offset in the page of the first slot of its page."""
    order = np.arange(len(slots))
    expected = slots[order // page * page] // page * page + order % page
    bad = np.flatnonzero((slots != expected) | (slots < 0))
    if len(bad):
        raise IndexMismatch(f"position {int(bad[0])} has full slot {int(slots[bad[0]])}, off its page")


def _check_window(first: Int64s, slots: Int64s, tokens: int, page: int, mapped: int) -> None:
    positions = np.arange(tokens - len(slots), tokens)
    expected = first[positions // page] + positions % page
    bad = np.flatnonzero((slots != expected) | (slots < 0) | (slots >= mapped))
    if len(bad) or np.any(first % page):
        where = int(positions[bad[0]]) if len(bad) else int(np.flatnonzero(first % page)[0]) * page
        raise IndexMismatch(f"the full slot of position {where} of {tokens} is off its page or out of range")
