"""Watches each engine process for its first DeepSeek-V4 pool: the entry point of ``sglang.srt.plugins``.

Nothing is hooked here. A process that builds a DeepSeek-V4 pool installs the hooks at that moment: the device is set by
then, and an error of the installation stops the server. All other processes, and all other models, keep the engine as
it is and import none of it.
"""

from __future__ import annotations

from sglang_dsv4.engine.hooks.install import after_import

POOLS = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
SIZES = "sglang.srt.model_executor.pool_configurator"


def install() -> None:
    """Watches for the first DeepSeek-V4 pool of this process; called by the engine."""
    after_import(POOLS, _watch)
    after_import(SIZES, _watch_sizes)


def _watch(pools: object) -> None:
    from sglang_dsv4.engine.hooks.install import watch_for_a_pool  # noqa: PLC0415

    watch_for_a_pool(pools)


def _watch_sizes(configurators: object) -> None:
    from sglang_dsv4.engine.hooks.install import watch_for_sizes  # noqa: PLC0415

    watch_for_sizes(configurators)
