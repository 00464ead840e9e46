"""copy_pages: whole pages of many device buffers <-> packed host blocks, in one launch.

    for i, for every buffer b:   host[blocks[i] * block_stride + host_offset[b]] <-> buffer b, page pages[i]

A page or block out of range is skipped: nothing is read or written for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triton_ops.tables import ALIGNMENT, BufferTable, host_words

CHUNK_WORDS = 4096  # 32 KiB a program: enough bytes in flight to hide the latency of the link
TILE_WORDS = 1024


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
    def of(cls, buffers: list[torch.Tensor], host_offsets: list[int], block_stride: int) -> PageTable:
        """buffers: as BufferTable.of; host_offsets: byte offset of each buffer's page inside a host block."""
        table = BufferTable.of(buffers)
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
        device = buffers[0].device
        widths = torch.tensor([b.shape[1] for b in buffers], dtype=torch.int64)
        return cls(
            table,
            widths.to(device),
            torch.tensor(chunks, dtype=torch.int64).to(device),
            tuple(host_offsets),
            block_stride,
        )


@triton.jit
def _copy_pages_kernel(
    anchor, offsets, sizes, page_bytes, chunks, host, host_bytes, block_stride, pages, blocks,
    SAVE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    chunk = chunks + tl.program_id(0) * 4
    item = tl.program_id(1)
    buffer = tl.load(chunk)
    in_page = tl.load(chunk + 1)
    in_block = tl.load(chunk + 2)
    nbytes = tl.load(chunk + 3)
    width = tl.load(page_bytes + buffer)
    page = tl.load(pages + item)
    block = tl.load(blocks + item)
    page_count = tl.load(sizes + buffer) // width
    block_count = host_bytes // block_stride
    inside = (page >= 0) & (page < page_count) & (block >= 0) & (block < block_count)
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


def copy_pages(t: PageTable, host: torch.Tensor, pages: torch.Tensor, blocks: torch.Tensor, save: bool) -> None:
    """Copy every buffer's page ``pages[i]`` to (save) or from host block ``blocks[i]``; one launch.

    host: uint8 1-D, pinned where the buffers are on a GPU. pages, blocks: int64 [P], readable by the device
    (pinned host memory will do). On a load the pages must be distinct, on a save the blocks.
    """
    check_indices(pages, blocks)
    if not len(pages):
        return
    grid = (t.chunks.shape[0], len(pages))
    _copy_pages_kernel[grid](
        t.table.anchor, t.table.offsets, t.table.sizes, t.page_bytes, t.chunks, host_words(host), host.numel(),
        t.block_stride, pages, blocks, SAVE=save, TILE=TILE_WORDS, num_warps=8,
    )  # fmt: skip


def check_indices(pages: torch.Tensor, blocks: torch.Tensor) -> None:
    """Both int64, 1-D, contiguous and of one length."""
    for name, tensor in (("pages", pages), ("blocks", blocks)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise TypeError(f"{name} must be a contiguous 1-D int64 tensor")
    if len(pages) != len(blocks):
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
