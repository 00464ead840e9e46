"""What counts on the engine's own page ids, or on a buffer a layer, would read and write wrong bytes: it is refused.

Raised while the server is built. The message names the setting and what does not go with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_dsv4.engine.attach import has_host_tier
from sglang_dsv4.engine.releases import TESTED, engine_version
from sglang_dsv4.errors import SettingError

BACKENDS = ("nixl", "mooncake", "fake")  # whose way with pages was read; fake moves nothing


def refuse(pool: Any) -> None:
    """Raise SettingError unless this server can have ``pool`` page-major."""
    if reasons := list(_reasons(pool)):
        raise SettingError(f"DSV4_LAYOUT=page-major does not go with {'; '.join(reasons)}. Unset DSV4_LAYOUT")


def _reasons(pool: Any) -> Iterator[str]:
    from sglang.srt.runtime_context import get_disagg, get_memory, get_server_args  # noqa: PLC0415

    arguments, disaggregation = get_server_args(), get_disagg()
    if engine_version() not in TESTED:
        yield f"sglang {engine_version()} (tested: {', '.join(TESTED)})"
    if pool._unified_kv or pool.swa_kv_pool is None:
        yield "unified_kv or a window a request, which have no paged window pool"
    if arguments.pp_size > 1:
        yield "pipelines, whose stages send each other's layers apart"
    if arguments.attn_cp_size > 1 or arguments.dcp_size > 1:
        yield "context parallelism, which cuts pages between ranks"
    if get_memory().enable_hisparse:
        yield "HiSparse, which has slots of its own for the history"
    if has_host_tier():
        yield "a hierarchical cache, which copies pages layer by layer by the engine's ids"
    if arguments.enable_return_routed_experts or arguments.enable_return_indexer_topk:
        yield "the capture of routed experts or of indexer choices, whose buffers are as long as the engine's slots"
    if arguments.kv_canary != "none":
        yield "--kv-canary, which counts on the engine's slots"
    transfers = disaggregation.disaggregation_mode != "null"
    if transfers and disaggregation.disaggregation_transfer_backend not in BACKENDS:
        yield f"transfers by {disaggregation.disaggregation_transfer_backend} (covered: {', '.join(BACKENDS[:2])})"
