"""A DeepSeek-V4 server starts with --kv-canary, by the engine's own canary code; it makes no copies, and says so."""

from typing import Any

import pytest
import torch
from sglang.srt.kv_canary import api
from sglang.srt.kv_canary.config import CanaryConfig

from sglang_dsv4.testing.standalone import PoolSpec, make_allocator, make_draft_pool, make_pool

WITH_CANARY = {"kv_canary": "raise"}


def attached(pool: Any) -> tuple[Any, ...]:
    """The canary's buffers, by the engine's call at a server's start."""
    groups: tuple[Any, ...] = api.attach_canary_buffers(
        pool=pool, config=CanaryConfig.from_env(None), device=torch.device("cpu"), kv_token_id_vs_position_offset=0
    )
    return groups


@pytest.mark.parametrize("draft", [False, True])
def test_the_canary_finds_the_window_of_our_pool(draft: bool) -> None:
    spec = PoolSpec(draft_tokens=4 if draft else 0, server_args=WITH_CANARY)
    pool = make_pool(spec)
    allocator = make_allocator(spec, pool)
    watched = make_draft_pool(spec, allocator) if draft else pool
    before = watched.get_state_buf_infos()
    (group,) = attached(watched)
    assert group.kind.name == "SWA" and group.swa_index_lut is allocator.full_to_swa_index_mapping
    assert len(group.k_head) >= watched.swa_kv_pool.size
    assert len(watched.get_state_buf_infos()[0]) > len(before[0]), "they travel with a transfer"
