"""Installs the hooks where an error stops the server: the engine swallows errors of a plugin and serves on unpatched.

``watch_for_a_pool`` waits in the constructor of the engine's DeepSeek-V4 pool. The first pool of a process installs the
hooks; each pool checks that all of them are in place before it is built. At that moment the device is set, the model is
known to be DeepSeek-V4, and neither the scheduler's queues nor its dispatcher exist yet.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from sglang_dsv4.engine.coverage import leave_sessions
from sglang_dsv4.engine.hooks import Hook
from sglang_dsv4.engine.hooks.check import ADVICE, Installation, in_place
from sglang_dsv4.engine.hooks.table import hooks_for, left_out
from sglang_dsv4.engine.releases import TESTED, engine_version, is_supported, release_for
from sglang_dsv4.engine.state import server
from sglang_dsv4.errors import HooksNotLanded
from sglang_dsv4.settings import read_settings

logger = logging.getLogger(__name__)

POOL = "DeepSeekV4TokenToKVPool"
CONFIGURATOR = "DSV4PoolConfigurator"


def watch_for_a_pool(pools: Any) -> None:
    """Makes the engine's pool install the hooks before it is built, and refuse to be built without them."""
    server.watched = True
    stock = getattr(pools, POOL, None)
    if stock is None:
        logger.error("sglang %s has no %s: its DeepSeek-V4 servers stay as they are", engine_version(), POOL)
        return
    if "__new__" in vars(stock):
        return

    def new(cls: type, *_: Any, **__: Any) -> Any:
        before = getattr(pools, POOL)
        install().require()
        # A use of the engine's own class by name gets its replacement.
        return object.__new__(getattr(pools, POOL) if cls in (stock, before) else cls)

    stock.__new__ = new


def watch_for_sizes(configurators: Any) -> None:
    """Installs the hooks before the first pool is sized with DSV4_LAYOUT=page-major; else when it is built."""
    stock = getattr(configurators, CONFIGURATOR, None)
    if stock is None or "__new__" in vars(stock):
        return

    def new(cls: type, *_: Any, **__: Any) -> Any:
        if read_settings().layout == "page-major":
            install().require()
        return object.__new__(cls)

    stock.__new__ = new


def install() -> Installation:
    """Installs the hooks, once a process. A failure is kept in the installation, whose ``require`` raises it."""
    if server.installation is None:
        server.installation = _install()
    installation: Installation = server.installation
    return installation


def require_landed() -> None:
    """Raises HooksNotLanded unless the plugin ran in this process and every hook is in place."""
    if not server.watched:
        raise HooksNotLanded(
            "the engine did not load the plugin of sglang_dsv4: is the package installed (pip install --no-deps .), "
            f"not only on the path? {ADVICE}, and unset SGLANG_EXTERNAL_MODEL_PACKAGE"
        )
    install().require()


def _install() -> Installation:
    version = engine_version()
    installation = Installation(version)
    try:
        settings = read_settings()
        if not settings.enabled:
            logger.info("DSV4_ENABLED=0: the engine stays as it is")
            return installation
        installation.enabled = True
        if not is_supported(version):
            logger.error("sglang %s is not supported by this package", version)
            return installation
        installation.hooks = hooks_for(settings, version)
        if installation.unfit():
            return installation  # nothing is changed; the pool refuses with the names
        _apply(installation.hooks)
        _check_layouts_with(release_for(version).layout_refusal)
    except Exception as error:  # noqa: BLE001  # whatever it was, the pool refuses with it
        installation.failure = error
        return installation
    if reason := left_out("DSV4_PLAIN", settings.plain, version):
        leave_sessions(reason)
    if version not in TESTED:
        logger.warning("sglang %s is not tested with this package (tested: %s)", version, ", ".join(TESTED))
    logger.info("%d hooks installed into sglang %s", len(installation.hooks), version)
    return installation


def _apply(hooks: tuple[Hook, ...]) -> None:
    """Lets the engine's registry wrap and replace, classes first: a hook on a method must find the final class.

    Not through ``apply_hooks``, which logs failures, and passes over a target that another plugin has hooked.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType  # noqa: PLC0415

    source = HookSource("sglang_dsv4", "sglang-dsv4")
    for hook in sorted(hooks, key=lambda hook: hook.kind != "replace"):
        ours = hook.resolve()
        if not in_place(hook, ours):
            HookRegistry._apply_target(hook.target, [(HookType(hook.kind), ours, source)])


def _check_layouts_with(check: Any) -> None:
    from sglang_dsv4.pools.token_to_kv import TokenToKVPool  # noqa: PLC0415

    TokenToKVPool.layout_checks = (check,)


Action = Callable[[ModuleType], None]


def after_import(name: str, action: Action) -> None:
    """Calls ``action`` with the module ``name``: now if it is imported, else right after it is. Imports nothing."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _Watcher(name, action))


class _Watcher(MetaPathFinder):
    """Watches for the import of one module, and goes away when it was executed. Finds nothing itself."""

    def __init__(self, name: str, action: Action) -> None:
        self.name, self.action, self._asks = name, action, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns the spec that the other finders give, with ``action`` behind its loader."""
        if name != self.name or self._asks:
            return None
        self._asks = True
        try:
            spec = find_spec(name)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.action(module)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
