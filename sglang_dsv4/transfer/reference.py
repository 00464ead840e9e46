"""Copies a request span by span with plain torch, on any device: the readable definition of the copier.

It follows ``cache.rows``. It serves where there is no GPU and for DSV4_TRANSFER=torch, and verify mode walks the same
pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.rows import Spans, find_spans
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.transfer.buffers import DeviceBuffers
from sglang_dsv4.transfer.copier import Together, WriterStreams
from sglang_dsv4.transfer.locate import NO_SLOT, DeviceSearch, Request, locate_on_host
from sglang_dsv4.transfer.templates import rows_without


class Piece(NamedTuple):
    """Pairs the host and device bytes of one plane of one span in one layer, or of a whole page.

    host, device: uint8 [rows, bytes a row], views. A whole page is one row. layer, plane, span: numbers in the family.
    """

    spans: Spans
    layer: int
    plane: int
    span: int
    host: torch.Tensor
    device: torch.Tensor


def find_request_spans(buffers: DeviceBuffers, request: Request) -> tuple[Spans, ...]:
    """Finds every span of ``request`` on the host; without its window those of whole pages."""
    families = tuple(family for family in buffers.families if request.window or family.whole_pages)
    return find_spans(buffers.geometry, families, locate_on_host(buffers, request))


def from_page(spans_of: tuple[Spans, ...], first_page: int) -> tuple[Spans, ...]:
    """Drops the whole pages before ``first_page``."""
    return tuple(_without_blocks(spans, first_page) if spans.family.whole_pages else spans for spans in spans_of)


def _without_blocks(spans: Spans, first: int) -> Spans:
    kept = spans.blocks >= first
    columns = ("pages", "rows", "counts", "blocks", "host_rows", "positions")
    return dataclasses.replace(spans, **{name: getattr(spans, name)[kept] for name in columns})


def pieces(buffers: DeviceBuffers, copy: HostCopy, spans_of: tuple[Spans, ...]) -> Iterator[Piece]:
    """Yields every piece of ``copy``, beside its place on the device."""
    for spans in spans_of:
        family = spans.family
        packed = copy.memory.regions[family.group].packed
        region = copy.memory.region_tensor(family.group)
        blocks, begins = copy.blocks[family.group], copy.begins if family.whole_pages else 0
        for layer, buffer in enumerate(buffers.buffers[family.name]):
            memory = buffer.view(-1)
            for span, (page, row, count, block, host_row) in enumerate(_fields(spans)):
                start = page * family.page_bytes
                if family.whole_pages:
                    at = blocks[block - begins] * packed.block_stride + packed.slot_offset(family, layer)
                    here = region[at : at + family.page_bytes].view(1, -1)
                    yield Piece(spans, layer, 0, span, here, memory[start : start + family.page_bytes].view(1, -1))
                    continue
                for number, plane in enumerate(family.planes):
                    at = start + family.row_offset(number, row)
                    there = memory[at : at + count * plane.row_bytes].view(count, plane.row_bytes)
                    here = packed.view(region, blocks[block], family, layer, number)[host_row : host_row + count]
                    yield Piece(spans, layer, number, span, here, there)


def _fields(spans: Spans) -> Iterator[tuple[int, int, int, int, int]]:
    columns = (spans.pages, spans.rows, spans.counts, spans.blocks, spans.host_rows)
    return zip(*(column.tolist() for column in columns), strict=True)


class ReferenceCopier:
    """Does as ``Copier`` on any device, slowly: everything has happened when a call returns."""

    def __init__(
        self, buffers: DeviceBuffers, writer_streams: WriterStreams, together: Together = lambda work: work()
    ) -> None:
        self._buffers, self._writer_streams, self._together = buffers, writer_streams, together

    def warm_up(self) -> None:
        """Does nothing: there is nothing to compile."""

    def save(self, copy: HostCopy, request: Request) -> DeviceSearch | None:
        """Saves as ``Copier.save``; a wrong request raises at once."""
        spans_of = from_page(find_request_spans(self._buffers, request), copy.first_page)
        for piece in pieces(self._buffers, copy, spans_of):
            if copy.share.has(piece.spans.family.group, int(piece.spans.blocks[piece.span])):
                piece.host.copy_(piece.device)
        return None

    def load(self, copy: HostCopy, request: Request, first_page: int = 0) -> None:
        """Loads as ``Copier.load``."""
        found = self._together(lambda: find_request_spans(self._buffers, request))
        spans_of = from_page(found, first_page)
        for stream in self._writer_streams():
            torch.cuda.current_stream(self._buffers.device).wait_stream(stream)
        for spans in spans_of:
            if spans.family.group is Group.REQUEST and request.slot != NO_SLOT:
                self._reset(spans, request.slot)
        for piece in pieces(self._buffers, copy, spans_of):
            piece.device.copy_(piece.host)

    def place_taken(self) -> None:
        """Does nothing: everything here waits for the current stream."""

    def _reset(self, spans: Spans, slot: int) -> None:
        """Makes the rest of the slot's ring empty: zero values, scores of -inf."""
        family = spans.family
        for buffer in self._buffers.buffers[family.name]:
            start = slot * family.page_bytes
            ring = buffer.view(-1)[start : start + family.page_bytes].view(self._buffers.state_dtype)
            rows = ring.view(family.rows, -1)
            for first, count in rows_without(spans):
                rows[first : first + count, : rows.shape[1] // 2] = 0
                rows[first : first + count, rows.shape[1] // 2 :] = float("-inf")
