"""Did every hook land? The engine logs a plugin's exception and serves on unpatched, so this package asks itself.

``guard`` wraps the stock pool's constructor directly, before anything that could fail: from there an error is
not swallowed, and the server stops.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

from sglang_dsv4.engine.hooks import Hook
from sglang_dsv4.errors import HooksNotLanded

ADVICE = "Fix the installation, or serve without this package: DSV4_ENABLED=0"


class Landing:
    """What the plugin meant to do, as far as it came."""

    def __init__(self, version: str, line: str | None, hooks: tuple[Hook, ...]) -> None:
        self.version, self.line, self.hooks = version, line, hooks
        self.failure: Exception | None = None

    def missing(self) -> list[str]:
        """Targets that do not run our hook, each with the reason."""
        return [f"{hook.target}: {reason}" for hook in self.hooks if (reason := _missing(hook))]

    def require(self) -> None:
        """Raise HooksNotLanded with targets and version unless everything is in place."""
        if self.failure is not None:
            raise HooksNotLanded(
                f"sglang_dsv4 could not be installed into sglang {self.version}: {self.failure}. {ADVICE}"
            ) from self.failure
        if self.line is None:
            raise HooksNotLanded(
                f"sglang {self.version} has no adapter (supported: 0.5.17, 0.5.22 and later). {ADVICE}"
            )
        missing = self.missing()
        if missing:
            raise HooksNotLanded(f"hooks did not land in sglang {self.version}: {'; '.join(missing)}. {ADVICE}")


def _missing(hook: Hook) -> str | None:
    ours = hook.resolve()
    owner_path, name = hook.target.rsplit(".", 1)
    try:
        owner = _resolve(owner_path)
        found = getattr(owner, name)
    except (ImportError, AttributeError) as error:
        return str(error)
    if not runs(found, ours):
        return "is still the engine's own"
    absent = sorted(set(hook.params) - set(inspect.signature(found).parameters)) if hook.params else []
    if absent:
        return f"has no parameter {', '.join(absent)}"
    for module in hook.also:
        loaded = sys.modules.get(module)
        if loaded is not None and not runs(getattr(loaded, name, None), ours):
            return f"{module} still holds the engine's own"
    return None


def _resolve(path: str) -> Any:
    """Module, or class in a module, by dotted path."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"no module in {path}")


def runs(found: Any, ours: Any) -> bool:
    """Whether ``found`` is ``ours`` or a chain of the registry's wrappers with ``ours`` in it."""
    while found is not None:
        if found is ours:
            return True
        cells = getattr(found, "__closure__", None) or ()
        if any(cell.cell_contents is ours for cell in cells):
            return True
        found = getattr(found, "__wrapped__", None)
    return False


_landings: list[Landing] = []


def require_landed() -> None:
    """Raise HooksNotLanded unless the plugin ran in this process and every hook is in place."""
    if not _landings:
        raise HooksNotLanded(
            "the engine did not load the plugin of sglang_dsv4: is the package installed (pip install --no-deps .), "
            f"not only on the path? {ADVICE}, and unset SGLANG_EXTERNAL_MODEL_PACKAGE"
        )
    _landings[-1].require()


def guard(pools: ModuleType, landing: Landing) -> None:
    """Make the stock DeepSeek-V4 pool refuse to be built unless ``landing`` is complete."""
    _landings.append(landing)
    stock = pools.DeepSeekV4TokenToKVPool
    original = stock.__init__

    @functools.wraps(original)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        landing.require()
        original(self, *args, **kwargs)

    stock.__init__ = guarded
