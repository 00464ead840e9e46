"""Entry point of the group ``sglang.srt.plugins``, which the engine runs in each of its processes, whatever they serve.

Nothing is hooked here. A process that builds a DeepSeek-V4 pool installs the hooks at that moment: the device is set by
then, and what such an installation raises stops the server. All other processes, and all other models, keep the engine
as it is and import none of it.
"""

from __future__ import annotations

from sglang_dsv4.engine.hooks.install import after_import

POOLS = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
SIZES = "sglang.srt.model_executor.pool_configurator"


def install() -> None:
    """Called by the engine. Watches for the first DeepSeek-V4 pool of this process."""
    after_import(POOLS, _watch)
    after_import(SIZES, _watch_sizes)


def _watch(pools: object) -> None:
    from sglang_dsv4.engine.hooks.install import watch_for_a_pool  # noqa: PLC0415

    watch_for_a_pool(pools)


def _watch_sizes(configurators: object) -> None:
    from sglang_dsv4.engine.hooks.install import watch_for_sizes  # noqa: PLC0415

    watch_for_sizes(configurators)
