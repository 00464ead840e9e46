"""Checks that every hook fits its target and landed: a server must not start with half of them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from sglang_dsv4.engine.hooks import LEADING, Hook, engines_class, member, mismatch, overrides, parameters_of
from sglang_dsv4.engine.releases import SUPPORTED, is_supported
from sglang_dsv4.errors import HooksNotLanded

ADVICE = "Fix the installation, or serve without this package: DSV4_ENABLED=0"


class Installation:
    """Records the hooks meant for this process, and how far they came. enabled: any were meant."""

    def __init__(self, version: str, hooks: tuple[Hook, ...] = ()) -> None:
        self.version, self.hooks, self.enabled = version, hooks, False
        self.failure: Exception | None = None

    def unfit(self) -> list[str]:
        """Lists the targets that are gone, or that our hook does not fit, each with the reason."""
        return [f"{hook.target}: {reason}" for hook in self.hooks for reason in _misfits(hook)]

    def missing(self) -> list[str]:
        """Returns ``unfit``; where all fits, the targets that do not run our hook."""
        return self.unfit() or [f"{hook.target}: {reason}" for hook in self.hooks for reason in _out_of_place(hook)]

    def require(self) -> None:
        """Raises HooksNotLanded with targets and version unless everything is in place."""
        if self.failure is not None:
            raise HooksNotLanded(
                f"sglang_dsv4 could not be installed into sglang {self.version}: {self.failure}. {ADVICE}"
            ) from self.failure
        if self.enabled and not is_supported(self.version):
            raise HooksNotLanded(
                f"sglang {self.version} is not supported by this package (supported: {SUPPORTED}). {ADVICE}"
            )
        missing = self.missing()
        if missing:
            raise HooksNotLanded(f"hooks did not land in sglang {self.version}: {'; '.join(missing)}. {ADVICE}")


def _misfits(hook: Hook) -> Iterator[str]:
    try:
        ours = hook.resolve()
        found = member(hook.target)
    except (ImportError, AttributeError) as error:
        yield str(error)
        return
    yield from _override_faults(ours) if isinstance(ours, type) else _function_faults(hook, found, ours)


def _out_of_place(hook: Hook) -> Iterator[str]:
    ours = hook.resolve()
    if not in_place(hook, ours):
        yield "is still the engine's own"
        return
    name = hook.target.rsplit(".", 1)[1]
    for module in hook.also:
        loaded = sys.modules.get(module)
        if loaded is not None and not runs(getattr(loaded, name, None), ours):
            yield f"{module} still holds the engine's own"


def _function_faults(hook: Hook, found: Any, ours: Any) -> Iterator[str]:
    """Checks a function hook, which the engine calls with the target's arguments."""
    method = inspect.isclass(member(hook.target.rsplit(".", 1)[0]))
    fault = mismatch(parameters_of(found, method), parameters_of(ours, LEADING.get(hook.kind, 0) + method))
    if fault:
        yield fault


def _override_faults(ours: type) -> Iterator[str]:
    """Checks a replaced class: the methods that ours override must still be there."""
    engines = engines_class(ours)
    for name, method in overrides(ours):
        original = getattr(engines, name, None)
        if original is None:
            yield f"has no {name}"
        elif fault := mismatch(parameters_of(original, skip=1), parameters_of(method, skip=1)):
            yield f"its {name} {fault}"


def in_place(hook: Hook, ours: Any) -> bool:
    """Returns whether the hook's target runs ``ours`` already. Raises as ``member``."""
    return runs(member(hook.target), ours)


def runs(found: Any, ours: Any) -> bool:
    """Returns whether ``found`` is ``ours`` or a chain of the registry's wrappers with ``ours`` in it."""
    while found is not None:
        if found is ours:
            return True
        cells = getattr(found, "__closure__", None) or ()
        if any(cell.cell_contents is ours for cell in cells):
            return True
        found = getattr(found, "__wrapped__", None)
    return False
