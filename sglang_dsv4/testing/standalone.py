"""Builds the engine's real pools and allocator outside a server, on any device.

The demo, tests and benchmarks need them. ``boot`` must run before anything else of sglang is imported on a machine
whose torch has no torchvision operators.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

FLASH_RATIOS = (0, 0, *((4, 128) * 20), 4)
PRO_RATIOS = (128, *((128, 4) * 30))
TINY_RATIOS = (0, 0, 4, 128, 4, 128)
FLASH41_RATIOS = (0, 0, *((2,) * 18), *((1,) * 20))
FLASH41_SOURCES = (2, 8, 14, 20)
TINY41_RATIOS = (0, 0, 2, 2, 2, 2, 1, 1)
TINY41_SOURCES = (2, 4, 6)

_kept: dict[str, Any] = {}


def _define_torchvision_ops() -> None:
    """Defines stand-ins for two operators that torchvision registers only with its compiled library."""
    if "torchvision" in _kept or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept["torchvision"] = library  # the registration dies with this object


def boot(**server_args: Any) -> None:
    """Publishes the global state a pool reads (server arguments). Call again to change it."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        _define_torchvision_ops()
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415

    if "override" in _kept:
        _kept.pop("override").restore()
    override = get_context().override_server_args(**server_args)
    override.install()
    _kept["override"] = override


def install_hooks() -> None:
    """Loads the engine's plugins as a server does, and installs the hooks now, without waiting for the first pool.

    Raises the error that keeps them from being installed; whether each landed is checked when a pool is built.
    """
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools  # noqa: PLC0415
    from sglang.srt.plugins import load_plugins  # noqa: PLC0415

    from sglang_dsv4.engine.hooks.install import install, watch_for_a_pool  # noqa: PLC0415

    load_plugins()
    watch_for_a_pool(pools)  # from a checkout that is not installed, the engine did not
    installation = install()
    if installation.failure is not None:
        raise installation.failure


@dataclass(frozen=True)
class PoolSpec:
    """Sets the sizes of a pool, in the engine's own terms.

    ``pages`` full pages of 256 tokens and ``swa_pages`` SWA pages are usable; the dummy page 0 comes on top.
    ``stage`` is a pipeline stage's (first, past-last) layer. ``sources`` are the kv source layers of V4.1;
    ``kv_layout`` and ``compressed_kv_layout`` the rows, as the engine names them.
    """

    ratios: tuple[int, ...] = TINY_RATIOS
    pages: int = 16
    swa_pages: int = 8
    requests: int = 4
    draft_tokens: int = 0
    state_dtype: torch.dtype = torch.float32
    fp4_indexer: bool = False
    hisparse: bool = False
    stage: tuple[int, int] | None = None
    sources: tuple[int, ...] = ()
    kv_layout: str | None = None
    compressed_kv_layout: str | None = None
    is_draft: bool = False
    device: str = "cpu"
    server_args: dict[str, Any] = field(default_factory=dict)

    @property
    def page_size(self) -> int:
        """Returns the full tokens a page."""
        return 256


def make_pool(spec: PoolSpec) -> Any:
    """Makes a DeepSeekV4TokenToKVPool of the installed engine (with the hooks applied: of this package)."""
    args = dict(spec.server_args, enable_deepseek_v4_fp4_indexer=spec.fp4_indexer)
    if spec.draft_tokens:
        args = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": spec.draft_tokens, **args}
    boot(**args)
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as engine  # noqa: PLC0415

    ring4 = 16 if spec.draft_tokens else 8
    first, last = spec.stage if spec.stage else (None, None)
    newer: dict[str, Any] = {}
    if spec.sources:
        newer.update(kv_source_layers=spec.sources, full_size=spec.pages * 256)
    if spec.kv_layout:
        newer.update(kv_layout=spec.kv_layout, compressed_kv_layout=spec.compressed_kv_layout)
    return engine.DeepSeekV4TokenToKVPool(
        max_num_reqs=spec.requests,
        swa_size=spec.swa_pages * 256,
        c4_size=spec.pages * 64,
        c128_size=spec.pages * 2,
        c4_state_pool_size=spec.swa_pages * ring4,
        c128_state_pool_size=0,
        page_size=256,
        swa_page_size=256,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=spec.state_dtype,
        c128_state_dtype=spec.state_dtype,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=len(spec.ratios),
        device=spec.device,
        enable_memory_saver=False,
        compression_ratios=list(spec.ratios),
        start_layer=first,
        end_layer=last,
        enable_hisparse=spec.hisparse,
        online_mtp_max_draft_tokens=spec.draft_tokens,
        is_draft_worker=spec.is_draft,
        **newer,
    )


def make_draft_pool(spec: PoolSpec, allocator: Any, layers: int = 1) -> Any:
    """Makes the pool of a draft model of so many layers beside that of ``spec``.

    It has windows alone, at the target's places.
    """
    pool = make_pool(replace(spec, ratios=(0,) * layers, sources=(), stage=None, is_draft=True))
    pool.register_mapping(allocator.full_to_swa_index_mapping)
    return pool


def make_allocator(spec: PoolSpec, pool: Any, need_sort: bool = False) -> Any:
    """Makes the real SWATokenToKVPoolAllocator over ``pool``; registers its full-to-SWA map with the pool.

    need_sort: as on a prefill or a decode server.
    """
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: PLC0415

    return SWATokenToKVPoolAllocator(
        spec.pages * 256, spec.swa_pages * 256, 256, torch.float8_e4m3fn, spec.device, pool, need_sort=need_sort
    )


def make_tree(
    spec: PoolSpec, table: Any, allocator: Any, radix: bool = True, chunk: int = 8192, is_eagle: bool = False
) -> Any:
    """Makes the prefix cache that the engine chooses for this model; without ``radix`` one that holds nothing.

    table: the request table. chunk: --chunked-prefill-size. is_eagle: EAGLE drafts; keys are of two tokens then.
    """
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: PLC0415
    from sglang.srt.mem_cache.registry import default_radix_cache_factory  # noqa: PLC0415
    from sglang.srt.runtime_context import get_exec, get_server_args  # noqa: PLC0415

    replay = get_exec().features.enable_decoder_swa_bounded_replay
    newer = {"decoder_swa_bounded_replay": True} if replay else {}  # an older release has no such field
    params = CacheInitParams(
        disable=not radix, req_to_token_pool=table, token_to_kv_pool_allocator=allocator, page_size=spec.page_size,
        sliding_window_size=128, chunked_prefill_size=chunk, is_eagle=is_eagle, **newer,
    )  # fmt: skip
    context = SimpleNamespace(
        server_args=get_server_args(), params=params, is_hybrid_swa=True, is_hybrid_ssm=False, is_dsa=False,
        enable_hierarchical_cache=False, disable_radix_cache=not radix, effective_chunked_prefill_size=chunk,
        full_tokens_per_layer=spec.pages * spec.page_size,
    )  # fmt: skip
    return default_radix_cache_factory(context)
