"""Gathers rows of planar pages into dense tensors and scatters them back: get_k_and_s, get_index_k_and_s.

A planar page of P rows holds all P rows' value bytes first, then all P rows' scale bytes, then
padding. A row's value is `head` bytes followed by `tail` bytes (the tail may be absent); each part
is one dense tensor outside the pages. Both directions only move bytes, as 32-bit words.

    kv page        P x (448 fp8 NoPE + 64 bf16 RoPE), P x 8 scale bytes, padding to a multiple of 576 bytes
    indexer page   P x 128 (fp8) or 64 (fp4) key bytes, P x 4 scale bytes (one fp32, or four UE8M0)

`loc` numbers rows through the whole buffer: row r of page p is p * P + r. A location outside
[0, num_pages * P) touches no page: a gather gives zeros for it, a scatter skips it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triton_ops._checks import (
    check_aligned,
    check_in_range,
    check_positive,
    check_same_device,
    check_tensor,
)

WORD_BYTES = 4  # the widest word that divides every part of every layout (an indexer scale is 4 bytes)

# Words of the head tile of one program. 2048 words over 128 threads are four 16-byte accesses in
# flight per thread, with the tail and scale loads on top: enough to cover the latency of scattered
# rows, few enough registers to keep the multiprocessor full. Rows per program follow from it.
HEAD_TILE_WORDS = 2048
NUM_WARPS = 4


class Part(NamedTuple):
    """Describes one dense tensor of the rows: [n, width] of dtype."""

    name: str
    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the part in one row."""
        return self.width * self.dtype.itemsize


class RowLayout(NamedTuple):
    """Describes the place of a row's bytes in a page. Every part is a whole number of 32-bit words."""

    head: Part
    tail: Part | None
    scale: Part
    page_align: int

    @property
    def parts(self) -> tuple[Part, ...]:
        """The dense tensors of a row, in the order the ops take and return them."""
        return tuple(part for part in (self.head, self.tail, self.scale) if part is not None)

    @property
    def value_bytes(self) -> int:
        """Bytes of a row in the value plane."""
        return self.head.nbytes + (self.tail.nbytes if self.tail else 0)

    def page_bytes(self, page_size: int) -> int:
        """Counts the bytes of a page of `page_size` rows, padding included."""
        used = page_size * (self.value_bytes + self.scale.nbytes)
        return -(-used // self.page_align) * self.page_align

    def planes(self, page_size: int) -> list[tuple[int, int, int]]:
        """Lists (first byte of row 0 in the page, bytes between rows, bytes to move) of each part."""
        stride = self.value_bytes
        planes = [(0, stride, self.head.nbytes)]
        if self.tail:
            planes.append((self.head.nbytes, stride, self.tail.nbytes))
        return [*planes, (page_size * stride, self.scale.nbytes, self.scale.nbytes)]


# Seven UE8M0 scales, one per 64 NoPE values, and a pad byte. The store kernel takes the seven and
# leaves the pad byte alone; a copy of a row must carry it, so here a scale is always 8 bytes.
KV_ROW = RowLayout(
    head=Part("k_nope", 448, torch.float8_e4m3fn),
    tail=Part("k_rope", 64, torch.bfloat16),
    scale=Part("scale8", 8, torch.uint8),
    page_align=576,
)
Rows = tuple[torch.Tensor, ...]  # the parts of the rows, in the order of their layout


@lru_cache
def index_row(head_dim_bytes: int) -> RowLayout:
    """Lays out indexer rows of ``head_dim_bytes`` key bytes, a multiple of 4."""
    check_positive("head_dim_bytes", head_dim_bytes)
    if head_dim_bytes % WORD_BYTES:
        raise ValueError(f"head_dim_bytes must be a multiple of {WORD_BYTES}, not {head_dim_bytes}")
    return RowLayout(Part("k", head_dim_bytes, torch.uint8), None, Part("scale", 4, torch.uint8), page_align=1)


@triton.jit
def _locate(
    loc_ptr, n, num_rows,
    PAGE_SIZE: tl.constexpr, PAGE_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Returns (position in loc, position < n, location in range, first value word, first scale word)."""
    item = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = item < n
    # Widen before comparing or multiplying: a narrowed index may wrap back into range, and a
    # buffer may hold more than 2**31 words.
    row = tl.load(loc_ptr + item, mask=live, other=-1).to(tl.int64)
    inside = (row >= 0) & (row < num_rows)
    row = tl.where(inside, row, 0)  # keeps the address arithmetic small; the mask forbids the access
    page = row // PAGE_SIZE * PAGE_WORDS
    slot = row % PAGE_SIZE
    return item, live, inside, page + slot * VALUE_WORDS, page + PAGE_SIZE * VALUE_WORDS + slot * SCALE_WORDS


@triton.jit
def _load_rows(ptr, starts, rows, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    mask = rows[:, None] & (column < WORDS)[None, :]
    return tl.load(ptr + starts[:, None] + column[None, :], mask=mask, other=0)


@triton.jit
def _store_rows(ptr, starts, rows, tile, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    mask = rows[:, None] & (column < WORDS)[None, :]
    tl.store(ptr + starts[:, None] + column[None, :], tile, mask=mask)


# In both kernels every load comes before the first store: the compiler cannot prove that the
# tensors are disjoint, so a load written after a store would wait for it.


@triton.jit(do_not_specialize=["n", "num_rows"])
def _gather_rows_kernel(
    buf_ptr, loc_ptr, head_ptr, tail_ptr, scale_ptr, n, num_rows,
    PAGE_SIZE: tl.constexpr, PAGE_WORDS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_WORDS: tl.constexpr, TAIL_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr,
):  # fmt: skip
    item, live, inside, value, scale = _locate(
        loc_ptr, n, num_rows, PAGE_SIZE, PAGE_WORDS, HEAD_WORDS + TAIL_WORDS, SCALE_WORDS, ROWS
    )
    head_tile = _load_rows(buf_ptr, value, inside, HEAD_WORDS, HEAD_BLOCK)
    if TAIL_WORDS > 0:
        tail_tile = _load_rows(buf_ptr, value + HEAD_WORDS, inside, TAIL_WORDS, TAIL_BLOCK)
    scale_tile = _load_rows(buf_ptr, scale, inside, SCALE_WORDS, SCALE_BLOCK)
    _store_rows(head_ptr, item * HEAD_WORDS, live, head_tile, HEAD_WORDS, HEAD_BLOCK)
    if TAIL_WORDS > 0:
        _store_rows(tail_ptr, item * TAIL_WORDS, live, tail_tile, TAIL_WORDS, TAIL_BLOCK)
    _store_rows(scale_ptr, item * SCALE_WORDS, live, scale_tile, SCALE_WORDS, SCALE_BLOCK)


@triton.jit(do_not_specialize=["n", "num_rows"])
def _scatter_rows_kernel(
    buf_ptr, loc_ptr, head_ptr, tail_ptr, scale_ptr, n, num_rows,
    PAGE_SIZE: tl.constexpr, PAGE_WORDS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_WORDS: tl.constexpr, TAIL_WORDS: tl.constexpr, SCALE_WORDS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, TAIL_BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr,
):  # fmt: skip
    item, _, inside, value, scale = _locate(
        loc_ptr, n, num_rows, PAGE_SIZE, PAGE_WORDS, HEAD_WORDS + TAIL_WORDS, SCALE_WORDS, ROWS
    )
    head_tile = _load_rows(head_ptr, item * HEAD_WORDS, inside, HEAD_WORDS, HEAD_BLOCK)
    if TAIL_WORDS > 0:
        tail_tile = _load_rows(tail_ptr, item * TAIL_WORDS, inside, TAIL_WORDS, TAIL_BLOCK)
    scale_tile = _load_rows(scale_ptr, item * SCALE_WORDS, inside, SCALE_WORDS, SCALE_BLOCK)
    _store_rows(buf_ptr, value, inside, head_tile, HEAD_WORDS, HEAD_BLOCK)
    if TAIL_WORDS > 0:
        _store_rows(buf_ptr, value + HEAD_WORDS, inside, tail_tile, TAIL_WORDS, TAIL_BLOCK)
    _store_rows(buf_ptr, scale, inside, scale_tile, SCALE_WORDS, SCALE_BLOCK)


def check_pages(buf: torch.Tensor, loc: torch.Tensor, page_size: int, layout: RowLayout, check: bool) -> None:
    """Refuses a buffer or locations that are not of `layout`; with `check`, also bad locations."""
    check_positive("page_size", page_size)
    check_tensor("buf", buf, (torch.uint8,), (None, layout.page_bytes(page_size)))
    check_aligned("buf", buf, WORD_BYTES)
    check_tensor("loc", loc, (torch.int32, torch.int64), (None,))
    check_same_device("loc", loc, buf.device)
    if check:
        check_in_range("loc", loc, buf.shape[0] * page_size)


def check_parts(
    tensors: Sequence[torch.Tensor], layout: RowLayout, n: int, device: torch.device, prefix: str = ""
) -> None:
    """Refuses dense tensors that are not the `n` rows of `layout`, in the order of its parts."""
    if len(tensors) != len(layout.parts):
        raise ValueError(f"{prefix or 'parts'} must hold {len(layout.parts)} tensors, not {len(tensors)}")
    for part, tensor in zip(layout.parts, tensors, strict=True):
        name = prefix + (f".{part.name}" if prefix else part.name)
        check_tensor(name, tensor, (part.dtype,), (n, part.width))
        check_aligned(name, tensor, WORD_BYTES)
        check_same_device(name, tensor, device)


def _outputs(layout: RowLayout, n: int, device: torch.device, out: Sequence[torch.Tensor] | None) -> Rows:
    if out is None:
        return tuple(torch.empty((n, part.width), dtype=part.dtype, device=device) for part in layout.parts)
    check_parts(out, layout, n, device, prefix="out")
    return tuple(out)


def _launch(
    kernel: triton.JITFunction,
    buf: torch.Tensor,
    loc: torch.Tensor,
    page_size: int,
    layout: RowLayout,
    tensors: Sequence[torch.Tensor],
) -> None:
    n = loc.shape[0]
    if n == 0 or (buf.shape[0] == 0 and kernel is _scatter_rows_kernel):
        return
    head, *tail, scale = (tensor.view(torch.int32) for tensor in tensors)
    words = [part.nbytes // WORD_BYTES if part else 0 for part in (layout.head, layout.tail, layout.scale)]
    blocks = [triton.next_power_of_2(max(count, 1)) for count in words]
    rows = max(HEAD_TILE_WORDS // blocks[0], 1)
    with torch.cuda.device_of(buf):
        kernel[(triton.cdiv(n, rows),)](
            buf.view(torch.int32),
            loc,
            head,
            tail[0] if tail else head,  # never dereferenced when TAIL_WORDS is 0
            scale,
            n,
            buf.shape[0] * page_size,
            PAGE_SIZE=page_size,
            PAGE_WORDS=buf.shape[1] // WORD_BYTES,
            ROWS=rows,
            HEAD_WORDS=words[0],
            TAIL_WORDS=words[1],
            SCALE_WORDS=words[2],
            HEAD_BLOCK=blocks[0],
            TAIL_BLOCK=blocks[1],
            SCALE_BLOCK=blocks[2],
            num_warps=NUM_WARPS,
        )


def gather_rows(
    buf: torch.Tensor,
    loc: torch.Tensor,
    page_size: int,
    layout: RowLayout,
    out: Sequence[torch.Tensor] | None,
    check: bool,
) -> Rows:
    """Gathers the parts of the rows at `loc`, in one launch; zeros for a location out of range."""
    check_pages(buf, loc, page_size, layout, check)
    out = _outputs(layout, loc.shape[0], buf.device, out)
    _launch(_gather_rows_kernel, buf, loc, page_size, layout, out)
    return out


def scatter_rows(
    buf: torch.Tensor,
    loc: torch.Tensor,
    parts: Sequence[torch.Tensor],
    page_size: int,
    layout: RowLayout,
    check: bool,
) -> None:
    """Writes the parts to the rows at `loc`, in one launch; a location out of range is skipped."""
    check_pages(buf, loc, page_size, layout, check)
    check_parts(parts, layout, loc.shape[0], buf.device)
    _launch(_scatter_rows_kernel, buf, loc, page_size, layout, parts)


def _plane(buf: torch.Tensor, page_size: int, start: int, stride: int, nbytes: int) -> torch.Tensor:
    """Views one part of every page: [num_pages, page_size, nbytes]."""
    return buf.as_strided((buf.shape[0], page_size, nbytes), (buf.shape[1], stride, 1), buf.storage_offset() + start)


def gather_rows_torch(
    buf: torch.Tensor,
    loc: torch.Tensor,
    page_size: int,
    layout: RowLayout,
    out: Sequence[torch.Tensor] | None,
    check: bool,
) -> Rows:
    """Does as `gather_rows` with torch indexing, plane by plane."""
    check_pages(buf, loc, page_size, layout, check)
    out = _outputs(layout, loc.shape[0], buf.device, out)
    row = loc.to(torch.int64)
    outside = (row < 0) | (row >= buf.shape[0] * page_size)
    row = row.masked_fill(outside, 0)
    for tensor, plane in zip(out, layout.planes(page_size), strict=True):
        target = tensor.view(torch.uint8)
        if buf.shape[0] == 0:  # there is no row 0 to stand in for the masked ones
            target.zero_()
            continue
        found = _plane(buf, page_size, *plane)[row // page_size, row % page_size]
        target.copy_(found.masked_fill_(outside[:, None], 0))
    return out


def scatter_rows_torch(
    buf: torch.Tensor,
    loc: torch.Tensor,
    parts: Sequence[torch.Tensor],
    page_size: int,
    layout: RowLayout,
    check: bool,
) -> None:
    """Does as `scatter_rows` with torch indexing, plane by plane; waits for the device to drop bad rows."""
    check_pages(buf, loc, page_size, layout, check)
    check_parts(parts, layout, loc.shape[0], buf.device)
    row = loc.to(torch.int64)
    kept = ((row >= 0) & (row < buf.shape[0] * page_size)).nonzero().squeeze(1)
    row = row[kept]
    for tensor, plane in zip(parts, layout.planes(page_size), strict=True):
        _plane(buf, page_size, *plane)[row // page_size, row % page_size] = tensor.view(torch.uint8)[kept]


def get_k_and_s(
    buf: torch.Tensor, loc: torch.Tensor, page_size: int, *,
    out: Sequence[torch.Tensor] | None = None, check: bool = False,
) -> Rows:  # fmt: skip
    """Gathers the kv rows at `loc`: bytes exactly as stored, one launch, no wait for the device.

    buf: uint8 [num_pages, page_bytes], contiguous, page_bytes = ceil(page_size * 584 / 576) * 576
    loc: int32 or int64 [n], contiguous, on buf's device; order and repeats are free
    out: the three result tensors to fill, contiguous, 4-byte aligned, disjoint from buf
    check: raise IndexError naming the first bad location and its position (waits for the device)

    Returns (k_nope float8_e4m3fn [n, 448], k_rope bfloat16 [n, 64], scale uint8 [n, 8]); the eighth
    scale byte is the pad byte. A location outside [0, num_pages * page_size) reads nothing and gives
    a row of zeros.
    """
    return gather_rows(buf, loc, page_size, KV_ROW, out, check)


def get_k_and_s_torch(
    buf: torch.Tensor, loc: torch.Tensor, page_size: int, *,
    out: Sequence[torch.Tensor] | None = None, check: bool = False,
) -> Rows:  # fmt: skip
    """Does as `get_k_and_s` in plain torch: same arguments, same result."""
    return gather_rows_torch(buf, loc, page_size, KV_ROW, out, check)


def put_k_and_s(
    buf: torch.Tensor, loc: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, scale8: torch.Tensor,
    page_size: int, *, check: bool = False,
) -> None:  # fmt: skip
    """Scatters kv rows to `loc`: all 584 bytes of each row, pad byte included, and no other byte.

    buf, loc, check: as in `get_k_and_s`; buf is written in place. k_nope, k_rope, scale8: as it returns
    them, contiguous, 4-byte aligned, on buf's device, disjoint from buf.

    A location outside [0, num_pages * page_size) is skipped. A location given twice must carry the
    same row twice: which of two different rows wins is not defined, nor that one wins whole.
    """
    scatter_rows(buf, loc, (k_nope, k_rope, scale8), page_size, KV_ROW, check)


def put_k_and_s_torch(
    buf: torch.Tensor, loc: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, scale8: torch.Tensor,
    page_size: int, *, check: bool = False,
) -> None:  # fmt: skip
    """Does as `put_k_and_s` in plain torch: same arguments, same effect, but waits for the device."""
    scatter_rows_torch(buf, loc, (k_nope, k_rope, scale8), page_size, KV_ROW, check)


def get_index_k_and_s(
    buf: torch.Tensor, loc: torch.Tensor, page_size: int, head_dim_bytes: int, *,
    out: Sequence[torch.Tensor] | None = None, check: bool = False,
) -> Rows:  # fmt: skip
    """Gathers indexer rows as `get_k_and_s` does: (k uint8 [n, head_dim_bytes], scale uint8 [n, 4]).

    buf: uint8 [num_pages, page_size * (head_dim_bytes + 4)], contiguous, 4-byte aligned
    head_dim_bytes: key bytes of a row: 128 (fp8) or 64 (fp4); any multiple of 4 works
    """
    return gather_rows(buf, loc, page_size, index_row(head_dim_bytes), out, check)


def get_index_k_and_s_torch(
    buf: torch.Tensor, loc: torch.Tensor, page_size: int, head_dim_bytes: int, *,
    out: Sequence[torch.Tensor] | None = None, check: bool = False,
) -> Rows:  # fmt: skip
    """Does as `get_index_k_and_s` in plain torch: same arguments, same result."""
    return gather_rows_torch(buf, loc, page_size, index_row(head_dim_bytes), out, check)


def put_index_k_and_s(
    buf: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, page_size: int, head_dim_bytes: int, *,
    check: bool = False,
) -> None:  # fmt: skip
    """Scatters indexer rows as `put_k_and_s` does: head_dim_bytes + 4 bytes a row, and no other byte."""
    scatter_rows(buf, loc, (k, scale), page_size, index_row(head_dim_bytes), check)


def put_index_k_and_s_torch(
    buf: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, page_size: int, head_dim_bytes: int, *,
    check: bool = False,
) -> None:  # fmt: skip
    """Does as `put_index_k_and_s` in plain torch: same arguments, same effect, but waits for the device."""
    scatter_rows_torch(buf, loc, (k, scale), page_size, index_row(head_dim_bytes), check)
