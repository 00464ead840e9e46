"""Serves page-major pools: page ids, the cost that the engine is told, the layout that peers are told, refusals.

The engine's allocator counts pages 1, 2, 3; here their ids are multiples of the pool's layers. Slots, page tables and
the rows of each family follow from the ids. The map from full slots to window slots is made as long as the ids reach;
counts of pages or tokens keep their numbers.

A server with features that count on the engine's page ids, or on one buffer a layer, is refused while it is built. The
message names the setting and the feature that it excludes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.page_major import is_covered, piece_figures
from sglang_dsv4.engine.coverage import Part, launch, reasons
from sglang_dsv4.engine.releases import TESTED, engine_version
from sglang_dsv4.errors import SettingError
from sglang_dsv4.pools.token_to_kv import TokenToKVPool

logger = logging.getLogger(__name__)

MOST_SLOTS = 2**31
READ = (9, 0)  # on others attention goes through kernels that may count bytes in 32 bits
SAID = ", DSV4_LAYOUT=page-major"


def after_init(result: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
    """Runs AFTER SWATokenToKVPoolAllocator.__init__: ids are multiples of the pool's page stride."""
    pool = allocator.get_kvcache()
    stride = pool.page_stride if isinstance(pool, TokenToKVPool) else 1
    if stride == 1:
        return
    refuse(pool)
    full, page = allocator.full_attn_allocator, allocator.page_size
    full.page_stride = stride
    slots = (full.num_pages * stride + 1) * page
    window = allocator.full_to_swa_index_mapping
    allocator.full_to_swa_index_mapping = window.new_zeros(slots + 1)
    allocator.full_to_swa_index_mapping[-1] = -1  # it belongs to slot -1, as in the engine's own map
    allocator.clear()
    pool.register_mapping(allocator.full_to_swa_index_mapping)
    logger.info(
        "page-major pools: %d regions, page ids in steps of %d, the map to window slots takes %.2f GiB",
        len(pool.get_contiguous_buf_infos()[0]), stride, allocator.full_to_swa_index_mapping.nbytes / 2**30,
    )  # fmt: skip


def after_clear(result: Any, allocator: Any) -> None:
    """Runs AFTER PagedTokenToKVPoolAllocator.clear: frees the same pages, by their ids."""
    allocator.free_pages = allocator.free_pages * getattr(allocator, "page_stride", 1)


def slots_sent(result: torch.Tensor, allocator: Any, kv_indices: torch.Tensor) -> torch.Tensor:
    """Runs AFTER translate_kv_indices_for_transfer: maps full slots to registered pages, same offset."""
    stride = getattr(getattr(allocator, "full_attn_allocator", None), "page_stride", 1)
    page = allocator.page_size
    return result // (page * stride) * page + result % page if stride > 1 else result


def after_bytes_per_full_token(result: float, configurator: Any) -> float:
    """Runs AFTER DSV4PoolConfigurator._get_bytes_per_full_token: adds the layout's cost beside the rows."""
    ratios = tuple(configurator.stage_compress_ratios)
    return result + (piece_figures(Geometry(ratios))[-1].extra_bytes if is_covered(ratios) else 0.0)


def before_manager(self: Any, args: Any, *others: Any, **more: Any) -> None:
    """Runs BEFORE CommonKVManager.__init__, where DSV4_LAYOUT=page-major."""
    args.kv_cache_dtype_str = f"{args.kv_cache_dtype_str}{SAID}"


def refuse(pool: Any) -> None:
    """Raises SettingError unless this server can have ``pool`` page-major."""
    if reasons := list(_reasons(pool)):
        raise SettingError(f"DSV4_LAYOUT=page-major does not go with {'; '.join(reasons)}. Unset DSV4_LAYOUT")


def _reasons(pool: Any) -> Iterator[str]:
    yield from server_reasons(torch.device(pool.device).type == "cuda")
    if pool._unified_kv or pool.swa_kv_pool is None:
        yield "unified_kv or a window a request, which have no paged window pool"
    if pool.page_stride * pool.swa_page_size * (_pages(pool) + 1) > MOST_SLOTS:
        yield f"{_pages(pool)} pages, whose slots are more than the engine's kernels count"


def server_reasons(cuda: bool) -> Iterator[str]:
    """Returns the reasons that the release, the GPU and the launch arguments tell. cuda: the pools lie on a GPU."""
    if engine_version() not in TESTED:
        yield f"sglang {engine_version()} (tested: {', '.join(TESTED)})"
    if cuda and torch.cuda.get_device_capability() != READ:
        yield f"a GPU of compute capability {torch.cuda.get_device_capability()} (whose kernels were read: {READ})"
    yield from reasons(launch(), Part.PAGE_MAJOR)


def _pages(pool: Any) -> int:
    """Counts the pages of tokens of ``pool``."""
    kv = pool.c4_kv_pool or pool.c128_kv_pool
    return 0 if kv is None else int(kv.size // kv.page_size)
