"""copy_rows: byte runs of many device buffers <-> host memory, in one launch.

    for every item (buffer, d, h, nbytes):   host[h : h + nbytes] <-> buffer[d : d + nbytes]

An item that leaves its buffer or the host region is skipped: nothing is read or written for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops.tables import BufferTable, host_words

CHUNK_BYTES = 32768  # an item is at most this long; ``split`` cuts longer runs
WORD = 8  # rows and offsets are multiples of 8 bytes (the narrowest piece of a row is its 8 scale bytes)
TILE_WORDS = 1024


@triton.jit
def _copy_rows_kernel(
    anchor,
    offsets,
    sizes,
    host,
    host_bytes,
    items,
    SAVE: tl.constexpr,
    TILE: tl.constexpr,
    BUFFERS: tl.constexpr,
):
    item = items + tl.program_id(0) * 4
    buffer = tl.load(item)
    in_buffer = tl.load(item + 1)
    in_host = tl.load(item + 2)
    nbytes = tl.load(item + 3)
    known = (buffer >= 0) & (buffer < BUFFERS)
    buffer = tl.where(known, buffer, 0)
    # Compared without adding, so that a hostile offset cannot overflow into range.
    size = tl.load(sizes + buffer)
    inside = known & (nbytes >= 0) & (in_buffer >= 0) & (in_host >= 0)
    inside = inside & (nbytes <= size) & (in_buffer <= size - nbytes)
    inside = inside & (nbytes <= host_bytes) & (in_host <= host_bytes - nbytes)
    words = tl.where(inside, nbytes, 0) // 8
    device = anchor + (tl.load(offsets + buffer) + tl.where(inside, in_buffer, 0)) // 8
    memory = host + tl.where(inside, in_host, 0) // 8
    for start in range(0, words, TILE):
        lane = start + tl.arange(0, TILE)
        if SAVE:
            value = tl.load(device + lane, mask=lane < words)
            tl.store(memory + lane, value, mask=lane < words)
        else:
            value = tl.load(memory + lane, mask=lane < words)
            tl.store(device + lane, value, mask=lane < words)


def copy_rows(table: BufferTable, host: torch.Tensor, items: torch.Tensor, save: bool) -> None:
    """Copy every item to (save) or from the host; one launch.

    host: uint8 1-D, pinned where the buffers are on a GPU. items: int64 [n, 4], readable by the device (pinned
    host memory will do), all values multiples of 8 except the buffer number. Items must not overlap on the
    side that is written.
    """
    check_items(items)
    if not len(items):
        return
    _copy_rows_kernel[(len(items),)](
        table.anchor, table.offsets, table.sizes, host_words(host), host.numel(), items,
        SAVE=save, TILE=TILE_WORDS, BUFFERS=len(table.buffers), num_warps=8,
    )  # fmt: skip


def check_items(items: torch.Tensor) -> None:
    """int64, [n, 4], contiguous."""
    if items.dtype != torch.int64 or items.dim() != 2 or items.shape[1] != 4 or not items.is_contiguous():
        raise TypeError("items must be a contiguous int64 tensor of shape [n, 4]")


def copy_rows_torch(table: BufferTable, host: torch.Tensor, items: torch.Tensor, save: bool) -> None:
    """Reference of ``copy_rows`` on any device; ``host`` on the CPU."""
    check_items(items)
    flat = [buffer.view(-1) for buffer in table.buffers]
    for number, device, memory, nbytes in items.tolist():
        if not 0 <= number < len(flat):
            continue
        ends_inside = device + nbytes <= flat[number].numel() and memory + nbytes <= host.numel()
        if min(device, memory, nbytes) < 0 or not ends_inside:
            continue
        there, here = flat[number][device : device + nbytes], host[memory : memory + nbytes]
        (here if save else there).copy_(there if save else here)
