"""Watches each engine process for its first DeepSeek-V4 pool: the entry point of ``sglang.srt.plugins``.

Nothing is hooked here. A process that builds a DeepSeek-V4 pool installs the hooks at that moment: the device is set by
then, and an error of the installation stops the server. All other processes, and all other models, keep the engine as
it is and import none of it.
"""

from __future__ import annotations

from sglang_dsv4.engine.hooks.install import after_import, watch_for_a_pool, watch_for_sizes

POOLS = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
SIZES = "sglang.srt.model_executor.pool_configurator"


def install() -> None:
    """Watches for the first DeepSeek-V4 pool of this process; called by the engine."""
    after_import(POOLS, watch_for_a_pool)
    after_import(SIZES, watch_for_sizes)
