"""Lays the layers of a family into one tensor, so that a page moves in few pieces, not 62.

The tensor goes page after page, and in a page layer after layer:

    rows of the tensor      0 .. L-1               L .. 2L-1              2L .. 3L-1
                            page 0, all layers     page 1, all layers     page 2, all layers
    layer l's buffer           l ------------------------------------------------------> (contiguous)

Layer l's buffer is the contiguous slice that begins at row l. Its page id k * L is page k of layer l, and so no kernel,
no page table and no stride changes: only the ids do, which must be multiples of L (``page_stride``). A family with
fewer than L layers has unused rows. Page id 0, where padded tokens write, is page 0 as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from typing_extensions import override

from sglang_dsv4.errors import SettingError
from sglang_dsv4.pools.sub_pools import IndexerPool, SingleKVPool


def regions(backings: Sequence[torch.Tensor], page_stride: int) -> tuple[list[int], list[int], list[int]]:
    """Returns addresses, bytes, and bytes of a page of all layers, as the engine registers with a transfer backend."""
    return (
        [backing.data_ptr() for backing in backings],
        [backing.nbytes for backing in backings],
        [page_stride * backing[0].nbytes for backing in backings],
    )


class _PageMajor:
    """Holds the shared tensor. backing: ``[pages * page_stride, page bytes]``; None: no layer."""

    backing: torch.Tensor | None = None

    def __init__(self, *args: Any, page_stride: int, **kwargs: Any) -> None:
        self.page_stride = page_stride
        super().__init__(*args, **kwargs)


class KVPool(_PageMajor, SingleKVPool):
    """Holds one family of kv rows, page-major."""

    @override
    def _create_buffers(self) -> None:
        with _nowhere(self):
            super()._create_buffers()
        self.backing, self.kv_buffer = _interleave(self, vars(self)["kv_buffer"])

    @override
    def set_key_buffer(self, layer_id: int, loc: torch.Tensor, cache_nope_fp8_rope_bf16_pack: Any) -> None:
        # The engine's Triton store computes byte offsets in the width of the slots.
        super().set_key_buffer(layer_id, loc.long(), cache_nope_fp8_rope_bf16_pack)


class IndexPool(_PageMajor, IndexerPool):
    """Holds an indexer's rows, page-major."""

    @override
    def _create_buffer(self) -> None:
        with _nowhere(self):
            super()._create_buffer()
        shapes = vars(self)["index_k_with_scale_buffer"]
        if shapes is None:
            raise SettingError("DSV4_LAYOUT=page-major: an indexer that keeps its scales apart; unset DSV4_LAYOUT")
        self.backing, self.index_k_with_scale_buffer = _interleave(self, shapes)

    @override
    def get_index_k_scale_buffer(
        self, layer_id: int, seq_len_tensor: torch.Tensor, page_indices: torch.Tensor, seq_len_sum: int,
        max_seq_len: int,
    ) -> Any:  # fmt: skip
        # The engine's Triton gather computes byte offsets in the width of the page numbers.
        return super().get_index_k_scale_buffer(layer_id, seq_len_tensor, page_indices.long(), seq_len_sum, max_seq_len)

    @override
    def set_index_fp4(self, layer_id: int, loc: torch.Tensor, cache_k: torch.Tensor) -> None:
        super().set_index_fp4(layer_id, loc.long(), cache_k)


@contextlib.contextmanager
def _nowhere(pool: Any) -> Iterator[None]:
    """Makes the engine's buffers within ``with`` on the meta device: shapes without memory."""
    device, pool.device = pool.device, "meta"
    try:
        yield
    finally:
        pool.device = device


def _interleave(pool: Any, shapes: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Allocates one tensor for buffers of these shapes, a layer each; returns it and each layer's slice."""
    if not shapes:
        return None, []
    pages, width = shapes[0].shape
    with _memory_of(pool):
        backing = torch.zeros(pages * pool.page_stride, width, dtype=shapes[0].dtype, device=pool.device)
    rows = (pages - 1) * pool.page_stride + 1
    return backing, [backing[layer : layer + rows] for layer in range(len(shapes))]


@contextlib.contextmanager
def _memory_of(pool: Any) -> Iterator[None]:
    """Allocates within ``with`` from the memory of the engine's own buffers of ``pool``."""
    custom: Callable[[], Any] = contextlib.nullcontext
    if pool.custom_mem_pool:
        custom = lambda: torch.cuda.use_mem_pool(pool.custom_mem_pool)  # noqa: E731
    with pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), custom():
        yield
