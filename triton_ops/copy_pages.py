"""copy_pages: whole pages of many device buffers <-> packed host blocks, in one launch.

    for i, for every buffer b:   host[blocks[i] * block_stride + host_offset[b]] <-> buffer b, page pages[i]

A page or block out of range is skipped: nothing is read or written for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triton_ops._launch import Launcher
from triton_ops.tables import ALIGNMENT, BufferTable, Upload, check_buffers, host_words, straight_to

CHUNK_WORDS = 4096  # 32 KiB a program and step: enough bytes in flight to hide the latency of the link
TILE_WORDS = 1024
MOST_PROGRAMS = 1 << 20
# Stores straight to host memory: a thread stores one run of 16 bytes a step, so that a warp fills whole lines; with
# two runs a thread the link falls to a quarter of its speed.
HOST_PROGRAMS, HOST_WARPS, HOST_TILE_WORDS = 64, 16, 1024


@dataclass(frozen=True)
class PageTable:
    """Static geometry of ``copy_pages``, uploaded once per pool.

    chunks: int64 [C, 4]: buffer, byte offset in its page, byte offset in the host block, bytes.
    page_bytes: int64 [n]: bytes of a page of each buffer.
    """

    table: BufferTable
    page_bytes: torch.Tensor
    chunks: torch.Tensor
    host_offsets: tuple[int, ...]
    block_stride: int

    @classmethod
    def of(
        cls, buffers: list[torch.Tensor], host_offsets: list[int], block_stride: int, upload: Upload | None = None
    ) -> PageTable:
        """buffers: as BufferTable.of; host_offsets: byte offset of each buffer's page inside a host block.

        upload: as BufferTable.of; also takes ``page_bytes`` and ``chunks``.
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


@triton.jit(do_not_specialize=["chunk_count", "items", "host_blocks", "block_stride"])
def _copy_pages_kernel(
    anchor, offsets, sizes, page_bytes, chunks, host, chunk_count, items, host_blocks, block_stride, pages, blocks,
    SAVE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    total = items.to(tl.int64) * chunk_count
    for job in range(tl.program_id(0).to(tl.int64), total, tl.num_programs(0)):
        chunk = chunks + (job % chunk_count) * 4
        item = job // chunk_count
        buffer = tl.load(chunk)
        in_page = tl.load(chunk + 1)
        in_block = tl.load(chunk + 2)
        nbytes = tl.load(chunk + 3)
        width = tl.load(page_bytes + buffer)
        page = tl.load(pages + item)
        block = tl.load(blocks + item)
        inside = (page >= 0) & (page < tl.load(sizes + buffer) // width) & (block >= 0) & (block < host_blocks)
        # A skipped item copies zero bytes; its addresses are never formed from the bad index.
        page = tl.where(inside, page, 0)
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
_copy_pages_to_host = Launcher(_copy_pages_kernel, num_warps=HOST_WARPS)


def copy_pages(
    t: PageTable,
    host: torch.Tensor,
    pages: torch.Tensor,
    blocks: torch.Tensor,
    save: bool,
    stream: int | None = None,
) -> None:
    """Copy every buffer's page ``pages[i]`` to (save) or from host block ``blocks[i]``; one launch.

    host: uint8 1-D, memory of the GPU, or pinned where the buffers are on one. pages, blocks: int64 [P], readable by
    the device (pinned host memory will do). On a load the pages must be distinct, on a save the blocks. stream: a
    handle; None: the current stream.
    """
    check_indices(pages, blocks)
    chunk_count, count = t.chunks.shape[0], pages.shape[0]
    if not count:
        return
    device = t.chunks.device
    to_host = save and host.device != device
    launcher = _copy_pages_to_host if to_host else _copy_pages
    programs = min(chunk_count * count, HOST_PROGRAMS if to_host else MOST_PROGRAMS)
    tile = HOST_TILE_WORDS if to_host else TILE_WORDS
    launcher(
        (save, tile, device.index), (programs, 1, 1),
        t.table.anchor, t.table.offsets, t.table.sizes, t.page_bytes, t.chunks, host_words(host), chunk_count,
        count, host.numel() // t.block_stride, t.block_stride, pages, blocks, save, tile, stream=stream,
    )  # fmt: skip


def check_indices(pages: torch.Tensor, blocks: torch.Tensor) -> None:
    """Both int64, 1-D, contiguous and of one length."""
    for name, tensor in (("pages", pages), ("blocks", blocks)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise TypeError(f"{name} must be a contiguous 1-D int64 tensor")
    if pages.shape != blocks.shape:
        raise ValueError(f"{len(pages)} pages but {len(blocks)} blocks")


def copy_pages_torch(t: PageTable, host: torch.Tensor, pages: torch.Tensor, blocks: torch.Tensor, save: bool) -> None:
    """Reference of ``copy_pages`` on any device; ``host`` on the CPU."""
    check_indices(pages, blocks)
    rows = host[: host.numel() // t.block_stride * t.block_stride].view(-1, t.block_stride)
    for buffer, offset in zip(t.table.buffers, t.host_offsets, strict=True):
        inside = (pages >= 0) & (pages < buffer.shape[0]) & (blocks >= 0) & (blocks < rows.shape[0])
        page = pages[inside].to(buffer.device)
        block = blocks[inside].cpu()
        slot = rows[:, offset : offset + buffer.shape[1]]
        if save:
            slot[block] = buffer[page].cpu()
        else:
            buffer[page] = slot[block].to(buffer.device)
