"""Describes a pool of the engine as DeviceBuffers, or refuses it with the reason.

An allow-list: every size is compared with the layout in ``cache.families``; a mismatch is refused by name, and the
engine keeps its own behaviour. Rows of an unknown layout would be cut in the wrong places, and answers only get worse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sglang_dsv4.cache.families import (
    COMPRESSIONS,
    INDEX_ROWS,
    KEPT_BY_HISPARSE,
    KV_ROWS,
    MOST_DRAFT_TOKENS,
    RATIOS,
    Draft,
    Geometry,
    families,
)
from sglang_dsv4.cache.family import Address, Family, Group
from sglang_dsv4.errors import GeometryError, LayoutRefused
from sglang_dsv4.transfer.buffers import DeviceBuffers

PAGE = 256  # tokens, of full and of SWA pages
NO_KEPT_ROWS = "HiSparse keeps the history of a request in its coordinator's host pool"
INDEX_PAGE8 = "SGLANG_HIP_DSV41_INDEX_K_PAGE8"  # on ROCm; 0.5.22 has it not
REORDERED_INDEX = f"{INDEX_PAGE8}: index rows in another order"
NO_WINDOWS = "no paged SWA pool (unified_kv or request_window)"
LayoutCheck = Callable[[Any], str | None]


class DraftPool(NamedTuple):
    """Holds the draft model's pool, with rows at the target's places. reach: see ``cache.families.Draft``."""

    pool: Any
    reach: int


def describe(pool: Any, extra_checks: tuple[LayoutCheck, ...] = (), draft: DraftPool | None = None) -> DeviceBuffers:
    """Describes the buffers of ``pool`` (a DeepSeekV4TokenToKVPool), with the window of its ``draft``.

    Raises LayoutRefused with the reason.
    """
    try:
        return _described(pool, extra_checks, draft)
    except AttributeError as error:
        raise LayoutRefused(f"the engine's {type(error.obj).__name__} has no {error.name}") from error


def _described(pool: Any, extra_checks: tuple[LayoutCheck, ...], draft: DraftPool | None) -> DeviceBuffers:
    for check in (_unknown_parts, *extra_checks):
        reason = check(pool)
        if reason:
            raise LayoutRefused(reason)
    if draft is not None and (reason := _unknown_draft(pool, draft.pool, extra_checks)):
        raise LayoutRefused(reason)
    try:
        geometry = geometry_of(pool, draft)
        members = families(geometry)
    except GeometryError as error:
        raise LayoutRefused(str(error)) from error
    found = {f.name: _buffers(pool, f, draft) for f in members}
    states = [b for f in members if f.group is Group.REQUEST for b in found[f.name]]
    buffers = {f.name: tuple(_in_pages(f, buffer) for buffer in found[f.name]) for f in members}
    for family in members:
        _check_buffers(family, buffers[family.name])
    pages = {f.name: _pages(f, buffers[f.name], pool.num_req_slots) for f in members}
    begins = None if draft is None else getattr(draft.pool, "swa_valid_from", None)
    stride = getattr(pool, "page_stride", 1)
    return DeviceBuffers(geometry, members, buffers, pages, _one_dtype(states), begins, stride)


def _unknown_parts(pool: Any) -> str | None:
    """Returns a reason when a part of the pool is missing or not covered."""
    if pool.swa_kv_pool is None:
        return NO_WINDOWS
    ratios = set(_stage_ratios(pool))
    if not ratios <= set(RATIOS):
        return f"compression ratios {sorted(ratios - set(RATIOS))} are not covered"
    if reason := drafts_refusal(pool.online_mtp_max_draft_tokens or 0):
        return reason
    if is_online(pool) and (reason := online_refusal(bool(pool.online_mtp_max_draft_tokens), _is_hisparse(pool))):
        return reason
    if _is_hisparse(pool) and getattr(pool, "kept_rows", None) is None:
        return NO_KEPT_ROWS
    if pool.page_size != PAGE or pool.swa_page_size != PAGE:
        return f"pages of {pool.page_size} and {pool.swa_page_size} tokens, covered: {PAGE}"
    for ratio, part in {0: pool.swa_kv_pool, **_kv_pools(pool)}.items():
        if reason := _unknown_rows(f"c{ratio}_kv_pool" if ratio else "swa_kv_pool", ratio, part):
            return reason
    return None


def environment_refusal(
    ratios: Iterable[int], drafts: bool = False, hisparse: bool = False, stages: int = 1
) -> str | None:
    """Returns why the layout that the environment asks for is not covered, before there is a pool of it; or None."""
    from sglang.srt.environ import envs  # noqa: PLC0415
    from sglang.srt.runtime_context import get_platform  # noqa: PLC0415

    if envs.SGLANG_HACK_FLASHMLA_BACKEND.get() == "unified_kv_triton":
        return NO_WINDOWS
    switch = getattr(envs, INDEX_PAGE8, None)
    if switch is not None and switch.get() and get_platform().is_hip and 1 in ratios:
        return REORDERED_INDEX
    online = envs.SGLANG_OPT_USE_ONLINE_COMPRESS.get() and 128 in ratios
    return online_refusal(drafts, hisparse, stages) if online else None


def drafts_refusal(tokens: int) -> str | None:
    """Returns why ``tokens`` draft tokens a step are too many for copies; None: they are not."""
    if tokens <= MOST_DRAFT_TOKENS:
        return None
    return f"{tokens} draft tokens: more than {MOST_DRAFT_TOKENS} would overwrite live state rows"


def is_online(pool: Any) -> bool:
    """Returns whether a request's open block of 128 tokens is one row, which each step writes in place."""
    return any(getattr(state, "online", False) for state in pool.compress_state_pools if state is not None)


def online_refusal(drafts: bool, hisparse: bool, stages: int = 1) -> str | None:
    """Returns the feature beside which online c128 compression gets no copies; None: it gets them."""
    beside = {"drafts": drafts, "HiSparse": hisparse, "pipeline stages": stages > 1}
    name = next((name for name, there in beside.items() if there), None)
    return name and f"online c128 compression with {name}"


def _unknown_draft(pool: Any, draft: Any, extra_checks: tuple[LayoutCheck, ...]) -> str | None:
    """Returns a reason when the rows of ``draft`` are not covered, or not at the places of ``pool``."""
    if not hasattr(draft, "compression_ratios"):
        return f"a draft's {type(draft).__name__}"
    for check in (_unknown_parts, *extra_checks):
        if reason := check(draft):
            return reason
    if any(_stage_ratios(draft)):
        return f"a draft with compression ratios {sorted(set(_stage_ratios(draft)))}, covered: 0"
    if draft.full_to_swa_index_mapping is not pool.full_to_swa_index_mapping:
        return "a draft whose window is mapped apart from the target's"
    if draft.swa_size != pool.swa_size:
        return f"a draft with {draft.swa_size} window tokens beside the target's {pool.swa_size}"
    return None


def _unknown_rows(name: str, ratio: int, part: Any) -> str | None:
    row = _kv_row(part)
    if row not in KV_ROWS:
        return f"{name} has {row} rows, covered: {', '.join(KV_ROWS)}"
    width, covered = part.get_bytes_per_token(), sum(KV_ROWS[row].planes)
    if width != covered:
        return f"{name} has {width} bytes a row, covered: {covered}"
    tiles = (PAGE, 64) if ratio == 0 else (PAGE // ratio,)  # 64: the SWA pages of SM120
    if part.page_size not in tiles:
        return f"{name} has pages of {part.page_size} rows, covered: {' and '.join(map(str, tiles))}"
    return None


def _is_hisparse(pool: Any) -> bool:
    """Returns whether the device has only the hot c4 rows of the running requests."""
    part = pool.c4_kv_pool
    return hasattr(part, "full_to_hisparse_device_index_mapping") or hasattr(part, "data_ptrs")


def _kv_row(part: Any) -> str:
    """Returns the name of a pool's kv rows."""
    layout = getattr(part, "kv_layout", None)
    return "v4" if layout is None else str(layout.value)


def _stage_ratios(pool: Any) -> tuple[int, ...]:
    return tuple(pool.compression_ratios[pool._stage_start : pool._stage_end])


def _kv_pools(pool: Any) -> dict[int, Any]:
    """Returns the compressed kv pools of this stage's layers, by ratio."""
    pools: Mapping[int, Any] = getattr(pool, "kv_pools", None) or {4: pool.c4_kv_pool, 128: pool.c128_kv_pool}
    return {ratio: pools[ratio] for ratio in set(_stage_ratios(pool)) - {0} if pools.get(ratio) is not None}


def _index_pools(pool: Any) -> dict[int, Any]:
    pools: Mapping[int, Any] = getattr(pool, "index_pools", None) or {4: pool.c4_indexer_kv_pool}
    return {ratio: pools[ratio] for ratio in set(_stage_ratios(pool)) - {0} if pools.get(ratio) is not None}


def _state_pools(pools: list[Any]) -> dict[int, list[Any]]:
    """Sorts state pools by ratio, in the order of their layers."""
    found: dict[int, list[Any]] = {}
    for state in pools:
        if state is not None:
            found.setdefault(state.ratio, []).append(state)
    return found


def _sources(pool: Any) -> tuple[int, ...]:
    """Lists the stage's kv source layers, ratio by ratio in the order of their buffers."""
    by_ratio = getattr(pool, "sources_by_ratio", {})
    return tuple(layer for ratio in COMPRESSIONS if COMPRESSIONS[ratio].shared for layer in by_ratio.get(ratio, ()))


def _kv(pool: Any, ratio: int) -> Sequence[torch.Tensor]:
    buffers: Sequence[torch.Tensor] = _kv_pools(pool)[ratio].kv_buffer
    return buffers


def _index(pool: Any, ratio: int) -> Sequence[torch.Tensor]:
    part = _index_pools(pool)[ratio]
    buffers: Sequence[torch.Tensor] = part.index_k_with_scale_buffer or part.index_k_payload_buffer
    return buffers


def _index_scales(pool: Any, ratio: int) -> Sequence[torch.Tensor]:
    buffers: Sequence[torch.Tensor] = _index_pools(pool)[ratio].index_k_scale_buffer
    return buffers


def _states(name: str, pool: Any, ratio: int) -> Sequence[torch.Tensor]:
    return [state.kv_score_buffer.kv_score for state in _state_pools(getattr(pool, name)).get(ratio, [])]


def _swa(pool: Any) -> Sequence[torch.Tensor]:
    buffers: Sequence[torch.Tensor] = pool.swa_kv_pool.kv_buffer
    return buffers


# The engine's buffers of each family, one a layer, in the order of its layers. Asked only when the stage has a layer.
BUFFERS: dict[str, Callable[[Any], Sequence[torch.Tensor]]] = {"swa_kv": _swa}
DRAFT_BUFFERS = {"draft_swa_kv": _swa}  # likewise, of the draft's pool
for _ratio in COMPRESSIONS:
    BUFFERS[f"c{_ratio}_kv"] = functools.partial(_kv, ratio=_ratio)
    BUFFERS[f"c{_ratio}_indexer"] = functools.partial(_index, ratio=_ratio)
    BUFFERS[f"c{_ratio}_indexer_scales"] = functools.partial(_index_scales, ratio=_ratio)
    BUFFERS[f"c{_ratio}_state"] = functools.partial(_states, "compress_state_pools", ratio=_ratio)
    BUFFERS[f"c{_ratio}_online_state"] = BUFFERS[f"c{_ratio}_state"]
    BUFFERS[f"c{_ratio}_indexer_state"] = functools.partial(_states, "indexer_compress_state_pools", ratio=_ratio)


def _one_dtype(states: Sequence[torch.Tensor]) -> torch.dtype:
    """Returns the one dtype of request states; a load empties the rest of their rings by one pattern."""
    dtypes = {state.dtype for state in states} or {torch.float32}
    if len(dtypes) > 1:
        raise LayoutRefused(f"request states of {' and '.join(sorted(map(str, dtypes)))}, covered: one dtype")
    return dtypes.pop()


def geometry_of(pool: Any, draft: DraftPool | None = None) -> Geometry:
    """Reads the pool's Geometry. Raises GeometryError or LayoutRefused."""
    states = _state_pools(pool.compress_state_pools)
    indexers = _index_pools(pool)
    pages = {part.page_size for ratio, part in indexers.items() if COMPRESSIONS[ratio].shared}
    if len(pages) > 1:
        raise LayoutRefused(f"indexer pages of {' and '.join(map(str, sorted(pages)))} rows, covered: one size")
    return Geometry(
        ratios=_stage_ratios(pool),
        first_layer=pool._stage_start,
        page_size=pool.page_size,
        window=pool.sliding_window,
        sources=_sources(pool),
        rings={ratio: pools[0].ring_size for ratio, pools in states.items()},
        kv_rows={0: _kv_row(pool.swa_kv_pool)} | {ratio: _kv_row(part) for ratio, part in _kv_pools(pool).items()},
        index_rows={ratio: _index_row(part) for ratio, part in indexers.items()},
        state_bytes={ratio: pools[0].kv_score_buffer.kv_score.itemsize for ratio, pools in states.items()},
        swa_tiles=pool.swa_page_size // pool.swa_kv_pool.page_size,
        index_page=pages.pop() if pages else Geometry.index_page,
        elsewhere=KEPT_BY_HISPARSE if _is_hisparse(pool) else (),
        head_dim=pool.qk_nope_head_dim + pool.qk_rope_head_dim,
        index_head_dim=pool.indexer_head_dim,
        draft=None if draft is None else _draft(draft),
        folded=tuple(ratio for ratio, pools in states.items() if getattr(pools[0], "online", False)),
    )


def _draft(draft: DraftPool) -> Draft:
    pool = draft.pool
    part = pool.swa_kv_pool
    return Draft(len(_stage_ratios(pool)), draft.reach, _kv_row(part), pool.swa_page_size // part.page_size)


def _index_row(part: Any) -> str:
    """Names an indexer pool's rows."""
    if getattr(part, "index_k_page8", False):
        raise LayoutRefused(REORDERED_INDEX)
    if part.index_k_with_scale_buffer is None:
        if not getattr(part, "index_k_payload_buffer", None):
            raise LayoutRefused("an indexer without buffers")
        return "fp4_split"
    width = part.get_bytes_per_token()
    names = [name for name, buffers in INDEX_ROWS.items() if len(buffers) == 1 and sum(buffers[0]) == width]
    if not names:
        raise LayoutRefused(f"indexer rows of {width} bytes are not covered")
    return names[0]


def _buffers(pool: Any, family: Family, draft: DraftPool | None) -> Sequence[torch.Tensor]:
    if draft is not None and family.name in DRAFT_BUFFERS:
        return DRAFT_BUFFERS[family.name](draft.pool)
    if family.name not in BUFFERS:
        raise LayoutRefused(f"{family.name}: pools/describe.py does not say where its buffers are")
    try:
        return BUFFERS[family.name](pool)
    except (AttributeError, KeyError) as error:
        raise LayoutRefused(f"{family.name}: the engine's pool has no buffers of it ({error})") from error


def _in_pages(family: Family, buffer: torch.Tensor) -> torch.Tensor:
    """Views a buffer as bytes: [rows, row bytes] of a ring, else [pages, page bytes] without surplus tiles."""
    flat = buffer.view(torch.uint8).flatten(1)
    if family.tiles == 1:
        return flat
    count = len(flat) // family.tiles
    return flat[: count * family.tiles].view(count, family.tiles * flat.shape[1])


def _check_buffers(family: Family, buffers: tuple[torch.Tensor, ...]) -> None:
    """Raises LayoutRefused unless every buffer has the shape of the layout."""
    if len(buffers) != len(family.layers):
        raise LayoutRefused(f"{family.name}: {len(buffers)} buffers for {len(family.layers)} layers")
    if not buffers:
        raise LayoutRefused(f"{family.name}: a family without layers")
    width = family.row_bytes if family.ring else family.page_bytes
    for layer, buffer in zip(family.layers, buffers, strict=True):
        if buffer.dim() != 2 or buffer.shape[1] != width or not buffer.is_contiguous():
            raise LayoutRefused(
                f"{family.name}, layer {layer}: buffer of shape {tuple(buffer.shape)} bytes, covered: [*, {width}]"
            )


def _pages(family: Family, buffers: tuple[torch.Tensor, ...], request_slots: int) -> int:
    """Counts the pages that requests may use; a ring buffer's last row is the sentinel and belongs to none.

    Rings by request slot are as many as the slots; behind them the engine rounds up.
    """
    shortest = min(buffer.shape[0] for buffer in buffers)
    if not family.ring:
        return shortest
    rings = (shortest - 1) // family.rows
    return min(rings, request_slots) if family.address is Address.REQUEST_SLOT else rings
