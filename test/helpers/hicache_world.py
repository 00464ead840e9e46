"""Runs plain servers with the engine's own hierarchical cache (HiCache, L2) on a CPU.

Tree, host pools, controller and queues are the engine's. Host memory is not pinned, and plain torch moves its pages
where the engine launches a kernel, at once: nothing is ever in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from plain_world import SMALL
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import l2_transfer, memory_pool_host
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_server_args

from sglang_dsv4.testing.server import PAGE, WINDOW
from sglang_dsv4.testing.world import PlainWorld

WRITE = "hicache_write_policy"
ON = {
    "enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first", WRITE: "write_through",
}  # fmt: skip
TREE = (ComponentType.FULL, ComponentType.SWA)


class HiCacheWorld(PlainWorld):
    """Runs one plain server with --enable-hierarchical-cache."""

    def build_scheduler(self, memory: Any) -> Any:
        """Gives the tree its host tier, as the engine does when it builds the tree."""
        params = CacheInitParams(
            disable=False, req_to_token_pool=memory.table, token_to_kv_pool_allocator=memory.allocator, page_size=PAGE,
            sliding_window_size=WINDOW, is_eagle=self.spec.algorithm().is_eagle(), tree_components=TREE,
            mtp_draft_device_pools=(memory.draft,) if memory.draft is not None else (),
        )  # fmt: skip
        memory.pool.end_layer = memory.pool.start_layer + len(self.spec.ratios)  # as a server says it
        with _on_this_machine():
            memory.tree.init_hicache(get_server_args(), params)
        scheduler = super().build_scheduler(memory)
        scheduler.enable_hierarchical_cache = True
        return scheduler

    def step(self) -> Any:
        """Runs one pass; see ``PlainWorld.step``."""
        with _on_this_machine():
            return super().step()

    def retract(self, req: Any) -> None:
        """Retracts ``req``; see ``PlainWorld.retract``."""
        with _on_this_machine():
            super().retract(req)

    def evict(self, full: int, window: int = 0) -> None:
        """Moves to the host what the tree need not keep on the device."""
        with _on_this_machine():
            self.tree.check_hicache_events()
            super().evict(full, window)


def hicache_world(policy: str = "write_through", **changes: Any) -> HiCacheWorld:
    """Returns a server of three layers with a host tier of four times its memory."""
    server_args = ON | {WRITE: policy} | changes.pop("server_args", {})
    return HiCacheWorld(**({"ratios": SMALL, "server_args": server_args} | changes))


@contextmanager
def _on_this_machine() -> Iterator[None]:
    allocate = mock.Mock(side_effect=lambda dims, dtype, **_: torch.zeros(dims, dtype=dtype))
    functions = dict.fromkeys(memory_pool_host.ALLOC_MEMORY_FUNCS, allocate) | {"cpu": allocate}
    with (
        mock.patch.object(memory_pool_host, "ALLOC_MEMORY_FUNCS", functions),
        mock.patch.object(memory_pool_host, "transfer_kv_direct", _transfer, create=True),
        mock.patch.object(l2_transfer, "device_module", torch.cpu),
        mock.patch.object(cache_controller, "device_module", torch.cpu),
    ):
        yield


def _transfer(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    assert page_size == 1
    for source, target in zip(src_layers, dst_layers, strict=True):
        target.view(torch.uint8).flatten(1)[dst_indices] = source.view(torch.uint8).flatten(1)[src_indices]
