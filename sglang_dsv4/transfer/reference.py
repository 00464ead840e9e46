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
from sglang_dsv4.cache.packed import Tail
from sglang_dsv4.cache.rows import Spans, find_spans
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.transfer.buffers import DeviceBuffers
from sglang_dsv4.transfer.copier import Together, WriterStreams
from sglang_dsv4.transfer.locate import NO_SLOT, DeviceSearch, Request, locate_on_host
from sglang_dsv4.transfer.templates import rows_without


class Piece(NamedTuple):
    """Pairs the host and device bytes of one plane of one span in one layer, or of a whole page.

    host, device: uint8 [rows, bytes a row], views. A whole page is one row. layer, plane, span: numbers in the family.
    number: of its unit among the copy's; None of a piece of the tail. at: its offset in that.
    """

    spans: Spans
    layer: int
    plane: int
    span: int
    host: torch.Tensor
    device: torch.Tensor
    number: int | None
    at: int


def tail_image(copy: HostCopy) -> torch.Tensor:
    """Returns the bytes of the tail of ``copy``, put together from its units: 1-D uint8, a copy of them."""
    image = torch.zeros(copy.in_tail * copy.memory.units.nbytes, dtype=torch.uint8)
    for run in copy.tail_runs():
        image[run.start : run.start + run.nbytes] = copy.memory.arena.region[run.arena : run.arena + run.nbytes]
    return image


def put_tail(copy: HostCopy, image: torch.Tensor, part: range | None = None) -> None:
    """Writes the bytes of ``image`` to the units ``part`` of the tail of ``copy``; None: to all."""
    for run in copy.tail_runs(part):
        copy.memory.arena.region[run.arena : run.arena + run.nbytes] = image[run.start : run.start + run.nbytes]


def find_request_spans(buffers: DeviceBuffers, request: Request) -> tuple[Spans, ...]:
    """Finds every span of ``request`` on the host; without its window those of whole pages."""
    families = tuple(family for family in buffers.families if request.window or family.whole_pages)
    return find_spans(buffers.geometry, families, locate_on_host(buffers, request))


def from_page(spans_of: tuple[Spans, ...], first_page: int) -> tuple[Spans, ...]:
    """Drops the whole pages before ``first_page``."""
    return tuple(_without_pages(spans, first_page) if spans.family.whole_pages else spans for spans in spans_of)


def _without_pages(spans: Spans, first: int) -> Spans:
    kept = spans.copy_pages >= first
    columns = ("pages", "rows", "counts", "copy_pages", "live_rows", "positions")
    return dataclasses.replace(spans, **{name: getattr(spans, name)[kept] for name in columns})


def pieces(buffers: DeviceBuffers, copy: HostCopy, spans_of: tuple[Spans, ...], image: torch.Tensor) -> Iterator[Piece]:
    """Yields every piece of ``copy``, beside its place on the device. image: of its tail; the pieces view it."""
    tail = copy.memory.tail(copy.tokens)
    for spans in spans_of:
        for layer, buffer in enumerate(buffers.buffers[spans.family.name]):
            memory = buffer.view(-1)
            if spans.family.whole_pages:
                yield from _pages(buffers, copy, spans, layer, memory)
            else:
                yield from _rows(tail, spans, layer, memory, image)


def _pages(buffers: DeviceBuffers, copy: HostCopy, spans: Spans, layer: int, memory: torch.Tensor) -> Iterator[Piece]:
    family, at = spans.family, buffers.page.offset(spans.family, layer)
    for span, (page, number) in enumerate(zip(spans.pages.tolist(), spans.copy_pages.tolist(), strict=True)):
        index = number - copy.begins
        here = copy.memory.bytes_of(copy.units[index])[at : at + family.page_bytes].view(1, -1)
        start = page * family.page_bytes
        there = memory[start : start + family.page_bytes].view(1, -1)
        yield Piece(spans, layer, 0, span, here, there, index, at)


def _rows(tail: Tail, spans: Spans, layer: int, memory: torch.Tensor, image: torch.Tensor) -> Iterator[Piece]:
    family = spans.family
    columns = (spans.pages, spans.rows, spans.counts, spans.live_rows)
    for span, (page, row, count, live) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        for plane, piece in enumerate(family.planes):
            start = page * family.page_bytes + family.row_offset(plane, row)
            at, nbytes = tail.offset(family, layer, plane, live), count * piece.row_bytes
            here, there = image[at:][:nbytes].view(count, -1), memory[start:][:nbytes].view(count, -1)
            yield Piece(spans, layer, plane, span, here, there, None, at)


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
        image = tail_image(copy)
        for piece in pieces(self._buffers, copy, spans_of, image):
            if piece.number is None or piece.number in copy.share:
                piece.host.copy_(piece.device)
        put_tail(copy, image, copy.tail_share)
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
        for piece in pieces(self._buffers, copy, spans_of, tail_image(copy)):
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
