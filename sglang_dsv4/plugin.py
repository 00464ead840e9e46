"""Entry point of the group ``sglang.srt.plugins``: registers the hook table, nothing else."""

from __future__ import annotations

import logging

from sglang_dsv4.engine.hooks import TESTED, hooks_of, install_layout_checks, line_of, prep_wanted
from sglang_dsv4.engine.landed import Landing, guard
from sglang_dsv4.engine.standalone import engine_version
from sglang_dsv4.settings import read_enabled, read_settings

logger = logging.getLogger(__name__)


def install() -> Landing | None:
    """Register the hooks of the installed engine's line. The engine applies them right after.

    Called by the engine in each of its processes. With DSV4_ENABLED=0 nothing is touched and None returned.
    Whatever fails here also stops the construction of a DeepSeek-V4 pool, with the reason.
    """
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools  # noqa: PLC0415

    version = engine_version()
    line = line_of(version)
    landing = Landing(version, line, hooks_of(line) if line else ())
    guard(pools, landing)
    try:
        if not read_enabled():  # first, and alone: no other setting stops a server that is switched off
            landing.hooks, landing.line = (), version
            logger.info("DSV4_ENABLED=0: the engine stays as it is")
            return None
        if line and prep_wanted(read_settings().prep, version):
            landing.hooks = hooks_of(line, prep=True)
        _register(landing)
    except Exception as error:
        landing.failure = error  # the engine only logs what a plugin raises
        raise
    return landing


def _register(landing: Landing) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    if landing.line is None:
        logger.error("sglang %s has no adapter in this package", landing.version)
        return
    for hook in landing.hooks:
        HookRegistry.register(hook.target, hook.resolve(), HookType(hook.kind))
    install_layout_checks(landing.line)
    if landing.version not in TESTED:
        logger.warning("sglang %s is not tested with this package (tested: %s)", landing.version, ", ".join(TESTED))
    logger.info("%d hooks registered for sglang %s", len(landing.hooks), landing.version)
