"""Lets ``--kv-canary`` check a DeepSeek-V4 pool: the engine finds a pool's attacher by its exact class.

The canary keeps checksums beside the window's rows, by slot. They are no part of a copy, so such a server makes none.
"""

from __future__ import annotations

from typing import Any

from sglang_dsv4.pools.token_to_kv import TokenToKVPool


def before_attach_canary_buffers(*, pool: Any, **_: Any) -> None:
    """BEFORE pool_patcher.api.attach_canary_buffers: our pool has the attacher of the engine's."""
    from sglang.srt.kv_canary.pool_patcher.adapters.dsv4 import attach_dsv4  # noqa: PLC0415
    from sglang.srt.kv_canary.pool_patcher.api import register_pool_attacher  # noqa: PLC0415

    if isinstance(pool, TokenToKVPool):
        register_pool_attacher(type(pool), attach_dsv4)


def refusal() -> str | None:
    """Why this server makes no copies, if a canary runs in it."""
    from sglang.srt.runtime_context import get_observability  # noqa: PLC0415

    on = get_observability().kv_canary != "none"
    return "--kv-canary keeps checksums by cache slot, which a copy does not have" if on else None
