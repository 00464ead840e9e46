"""A pool of the engine -> its DeviceBuffers, or the reason why its layout is not covered.

An allow-list: every size is compared with the layout written in ``cache.families``; what does not match is
refused by name, and the engine keeps its own behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_dsv4.cache.families import (
    INDEX_SCALE_BYTES,
    KV_SCALE_BYTES,
    KV_VALUE_BYTES,
    RATIOS,
    Family,
    Geometry,
    Group,
    families,
)
from sglang_dsv4.errors import GeometryError, LayoutRefused
from sglang_dsv4.transfer.buffers import DeviceBuffers

MOST_DRAFT_TOKENS = 8  # with more, a forward in flight writes ring rows that are still live
LayoutCheck = Callable[[Any], str | None]


def describe(pool: Any, extra_checks: tuple[LayoutCheck, ...] = ()) -> DeviceBuffers:
    """The device side of ``pool`` (a DeepSeekV4TokenToKVPool). Raises LayoutRefused with the reason."""
    for check in (_unknown_parts, *extra_checks):
        reason = check(pool)
        if reason:
            raise LayoutRefused(reason)
    try:
        geometry = _geometry(pool)
    except GeometryError as error:
        raise LayoutRefused(str(error)) from error
    members = families(geometry)
    found = {f.name: _buffers(pool, f) for f in members}
    states = [b for f in members if f.group is Group.REQUEST for b in found[f.name]]
    buffers = {name: tuple(b.view(torch.uint8) for b in tensors) for name, tensors in found.items()}
    for family in members:
        _check_buffers(family, buffers[family.name])
    pages = {f.name: _pages(f, buffers[f.name]) for f in members}
    return DeviceBuffers(geometry, members, buffers, pages, _one_dtype(states))


def _unknown_parts(pool: Any) -> str | None:
    """A reason when a part of the pool is missing or of a kind that is not covered."""
    if pool.swa_kv_pool is None:
        return "no paged SWA pool (unified_kv or request_window)"
    ratios = set(_stage_ratios(pool))
    if not ratios <= set(RATIOS):
        return f"compression ratios {sorted(ratios - set(RATIOS))} are not covered"
    drafts = pool.online_mtp_max_draft_tokens or 0
    if drafts > MOST_DRAFT_TOKENS:
        return f"{drafts} draft tokens: more than {MOST_DRAFT_TOKENS} would overwrite live state rows"
    if hasattr(pool.c4_kv_pool, "full_to_hisparse_device_index_mapping") or hasattr(pool.c4_kv_pool, "data_ptrs"):
        return "HiSparse keeps the history of a request in its coordinator's host pool"
    kv_bytes = KV_VALUE_BYTES + KV_SCALE_BYTES
    for name, rows in (("swa_kv_pool", pool.swa_page_size), ("c4_kv_pool", 64), ("c128_kv_pool", 2)):
        part = getattr(pool, name)
        if part is None:
            continue
        if part.get_bytes_per_token() != kv_bytes:
            return f"{name} has {part.get_bytes_per_token()} bytes a row, covered: {kv_bytes}"
        if part.page_size != rows:
            return f"{name} has pages of {part.page_size} rows, covered: {rows}"
    if pool.page_size != 256 or pool.swa_page_size != 256:
        return f"pages of {pool.page_size} and {pool.swa_page_size} tokens, covered: 256"
    indexer = pool.c4_indexer_kv_pool
    if indexer is not None and getattr(indexer, "index_k_with_scale_buffer", None) is None:
        return "split indexer buffers"
    return None


def _stage_ratios(pool: Any) -> tuple[int, ...]:
    return tuple(pool.compression_ratios[pool._stage_start : pool._stage_end])


def _state_pools(pools: list[Any], ratio: int) -> list[Any]:
    return [p for p in pools if p is not None and p.ratio == ratio]


def _states(pools: list[Any], ratio: int) -> list[torch.Tensor]:
    return [state.kv_score_buffer.kv_score for state in _state_pools(pools, ratio)]


# The engine's buffers of each family, one a layer, in the order of its layers. Asked only when the stage has a layer.
BUFFERS: dict[str, Callable[[Any], Sequence[torch.Tensor]]] = {
    "c4_kv": lambda pool: pool.c4_kv_pool.kv_buffer,
    "c4_indexer": lambda pool: pool.c4_indexer_kv_pool.index_k_with_scale_buffer,
    "c128_kv": lambda pool: pool.c128_kv_pool.kv_buffer,
    "swa_kv": lambda pool: pool.swa_kv_pool.kv_buffer,
    "c4_state": lambda pool: _states(pool.compress_state_pools, 4),
    "c4_indexer_state": lambda pool: _states(pool.indexer_compress_state_pools, 4),
    "c128_state": lambda pool: _states(pool.compress_state_pools, 128),
}


def _one_dtype(states: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype of request states; a load empties the rest of their rings by one pattern."""
    dtypes = {state.dtype for state in states} or {torch.float32}
    if len(dtypes) > 1:
        raise LayoutRefused(f"request states of {' and '.join(sorted(map(str, dtypes)))}, covered: one dtype")
    return dtypes.pop()


def _geometry(pool: Any) -> Geometry:
    c4, c128 = (_state_pools(pool.compress_state_pools, ratio) for ratio in (4, 128))
    indexer = pool.c4_indexer_kv_pool
    return Geometry(
        ratios=_stage_ratios(pool),
        first_layer=pool._stage_start,
        page_size=pool.page_size,
        window=pool.sliding_window,
        c4_ring=c4[0].ring_size if c4 else 8,
        c128_ring=c128[0].ring_size if c128 else 128,
        index_value_bytes=indexer.get_bytes_per_token() - INDEX_SCALE_BYTES if indexer is not None else 128,
        head_dim=pool.qk_nope_head_dim + pool.qk_rope_head_dim,
        index_head_dim=pool.indexer_head_dim,
        c4_state_bytes=c4[0].kv_score_buffer.kv_score.itemsize if c4 else 4,
        c128_state_bytes=c128[0].kv_score_buffer.kv_score.itemsize if c128 else 4,
    )


def _buffers(pool: Any, family: Family) -> Sequence[torch.Tensor]:
    if not family.layers:
        return ()
    if family.name not in BUFFERS:
        raise LayoutRefused(f"{family.name}: pools/describe.py does not say where its buffers are")
    return BUFFERS[family.name](pool)


def _check_buffers(family: Family, buffers: tuple[torch.Tensor, ...]) -> None:
    """Raise LayoutRefused unless every buffer has the shape that the layout says."""
    if len(buffers) != len(family.layers):
        raise LayoutRefused(f"{family.name}: {len(buffers)} buffers for {len(family.layers)} layers")
    width = family.row_bytes if family.ring else family.page_bytes
    for layer, buffer in zip(family.layers, buffers, strict=True):
        if buffer.dim() != 2 or buffer.shape[1] != width or not buffer.is_contiguous():
            raise LayoutRefused(
                f"{family.name}, layer {layer}: buffer of shape {tuple(buffer.shape)} bytes, covered: [*, {width}]"
            )


def _pages(family: Family, buffers: tuple[torch.Tensor, ...]) -> int:
    """Pages that requests may use; a ring buffer's last row is the sentinel and belongs to none."""
    if not buffers:
        return 0
    shortest = min(buffer.shape[0] for buffer in buffers)
    return (shortest - 1) // family.rows if family.ring else shortest
