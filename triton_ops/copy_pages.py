"""Copies whole pages of many device buffers to or from packed host blocks, in one launch.

    for i, for every buffer b:
        host[i * block_stride + host_offset[b]] <-> buffer b, page slots[(first + i) * page] // page

``slots`` are a request's full slots, as the engine keeps them: the kernel takes the page numbers out of them, so that
no other kernel has to run before it, and the host cuts no tensor. A page or block out of range is skipped: nothing is
read or written for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triton_ops._launch import Fixed, Launcher
from triton_ops.tables import ALIGNMENT, BufferTable, Upload, check_buffers, straight_to

CHUNK_WORDS = 4096  # 32 KiB a program and step: enough bytes in flight to hide the latency of the link
TILE_WORDS = 1024
MOST_PROGRAMS = 1 << 20
SLOT_DTYPES = (torch.int32, torch.int64)  # of full slots, as the engine keeps them


@dataclass(frozen=True)
class PageTable:
    """Holds the static geometry of ``copy_pages``, uploaded once per pool.

    chunks: int64 [C, 4]: buffer, byte offset in its page, byte offset in the host block, bytes.
    page_bytes: int64 [n]: bytes of a page of each buffer.
    """

    table: BufferTable
    page_bytes: torch.Tensor
    chunks: torch.Tensor
    host_offsets: tuple[int, ...]
    block_stride: int

    @functools.cached_property
    def fixed(self) -> Fixed:
        """Returns the tables, in the order of the kernel."""
        return Fixed(*self.table.fixed.tensors, self.page_bytes, self.chunks)

    @classmethod
    def of(
        cls, buffers: list[torch.Tensor], host_offsets: list[int], block_stride: int, upload: Upload | None = None
    ) -> PageTable:
        """Checks the buffers and uploads the table.

        buffers: as BufferTable.of; host_offsets: byte offset of each buffer's page inside a host block. upload: as
        BufferTable.of; also takes ``page_bytes`` and ``chunks``.
        """
        check_buffers(buffers)
        for number, (buffer, host) in enumerate(zip(buffers, host_offsets, strict=True)):
            if host < 0 or host + buffer.shape[1] > block_stride:
                raise ValueError(f"buffer {number}: its page at {host} does not fit the block stride {block_stride}")
            if host % ALIGNMENT or block_stride % ALIGNMENT:
                raise ValueError(
                    f"buffer {number}: offset {host} or stride {block_stride} is no multiple of {ALIGNMENT}"
                )
        step = CHUNK_WORDS * 8
        chunks = [
            (number, start, host + start, min(step, buffer.shape[1] - start))
            for number, (buffer, host) in enumerate(zip(buffers, host_offsets, strict=True))
            for start in range(0, buffer.shape[1], step)
        ]
        widths = torch.tensor([b.shape[1] for b in buffers], dtype=torch.int64)
        upload = upload or straight_to(buffers[0].device)
        return cls(
            BufferTable.of(buffers, upload),
            upload("page_bytes", widths),
            upload("chunks", torch.tensor(chunks, dtype=torch.int64)),
            tuple(host_offsets),
            block_stride,
        )


@triton.jit(
    do_not_specialize=["chunk_count", "items", "host_blocks", "block_stride", "first"],
    do_not_specialize_on_alignment=["slots"],
)
def _copy_pages_kernel(
    anchor, offsets, sizes, page_bytes, chunks, host, chunk_count, items, host_blocks, block_stride, slots,
    first, PAGE: tl.constexpr, SAVE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    total = items.to(tl.int64) * chunk_count
    for job in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0)):
        chunk = chunks + (job % chunk_count) * 4
        block = job // chunk_count
        buffer = tl.load(chunk)
        in_page = tl.load(chunk + 1)
        in_block = tl.load(chunk + 2)
        nbytes = tl.load(chunk + 3)
        width = tl.load(page_bytes + buffer)
        slot = tl.load(slots + (first + block) * PAGE).to(tl.int64)
        inside = (slot >= 0) & (slot // PAGE < tl.load(sizes + buffer) // width) & (block < host_blocks)
        # A skipped item copies zero bytes; its addresses are never formed from the bad index.
        page = tl.where(inside, slot, 0) // PAGE
        block = tl.where(inside, block, 0)
        words = tl.where(inside, nbytes, 0) // 8
        device_word = (tl.load(offsets + buffer) + page * width + in_page) // 8
        host_word = (block * block_stride + in_block) // 8
        # Addresses and widths are multiples of 16 bytes (BufferTable, PackedBlock).
        device = anchor + tl.multiple_of(device_word, 2)
        memory = host + tl.multiple_of(host_word, 2)
        for start in range(0, words, TILE):
            lane = start + tl.arange(0, TILE)
            if SAVE:
                value = tl.load(device + lane, mask=lane < words)
                tl.store(memory + lane, value, mask=lane < words)
            else:
                value = tl.load(memory + lane, mask=lane < words)
                tl.store(device + lane, value, mask=lane < words)


_copy_pages = Launcher(_copy_pages_kernel, num_warps=8)


def copy_pages(
    t: PageTable, host: torch.Tensor, slots: torch.Tensor, page: int, save: bool, pages: range | None = None,
    stream: int | None = None,
) -> None:  # fmt: skip
    """Copies every buffer's page of each of ``pages`` to (save) or from host block 0, 1, ...; one launch.

    host: of ``host_words``, memory of the GPU, or pinned where the buffers are on one. slots: int32 or int64
    [n], full slots of n positions, readable by the device; the first position of a page alone is read. page: tokens a
    page. pages: of the request, one after the other; None: all. On a load they must be distinct. stream: a handle;
    None: the current stream. Raises for pages that it does not have.
    """
    pages = pages_of(slots, page, pages)
    count = len(pages)
    if not count:
        return
    chunk_count = t.chunks.shape[0]
    _copy_pages(
        (save, page, slots.dtype, t.fixed.device), (min(chunk_count * count, MOST_PROGRAMS), 1, 1),
        host, chunk_count, count, host.numel() * 8 // t.block_stride, t.block_stride, slots, pages.start, page, save,
        TILE_WORDS, fixed=t.fixed, stream=stream,
    )  # fmt: skip


def pages_of(slots: torch.Tensor, page: int, pages: range | None) -> range:
    """Returns ``pages``, or all that ``slots`` spans. Raises unless int32 or int64, 1-D and contiguous, with those."""
    if slots.dtype not in SLOT_DTYPES or slots.dim() != 1 or not slots.is_contiguous():
        raise TypeError("slots must be a contiguous 1-D int32 or int64 tensor")
    there = -(-slots.shape[0] // page)
    if pages is None:
        return range(there)
    if pages.step != 1 or not 0 <= pages.start <= pages.stop <= there:
        raise ValueError(f"{pages} of {there} pages")
    return pages


def copy_pages_torch(
    t: PageTable, host: torch.Tensor, slots: torch.Tensor, page: int, save: bool, pages: range | None = None
) -> None:
    """Does as ``copy_pages`` in plain torch on any device; ``host`` on the CPU."""
    pages = pages_of(slots, page, pages)
    host = host.view(torch.uint8)
    blocks = host[: host.numel() // t.block_stride * t.block_stride].view(-1, t.block_stride)
    first = slots[::page][pages.start : pages.stop].to(torch.int64)[: len(blocks)]
    for buffer, offset in zip(t.table.buffers, t.host_offsets, strict=True):
        inside = (first >= 0) & (first // page < buffer.shape[0])
        there, block = first[inside] // page, torch.nonzero(inside)[:, 0].cpu()
        place = blocks[:, offset : offset + buffer.shape[1]]
        if save:
            place[block] = buffer[there].to(place.device)
        else:
            buffer[there] = place[block].to(buffer.device)
