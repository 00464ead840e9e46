"""A release may rename or add a parameter of what we hook: seen at start by name, and not at the first retract.

A hook's own signature is the list of what it knows. Every parameter that it names must be the target's, in that order;
and unless it passes on whatever it is given (``*args, **kwargs``), it must name all that the target has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

LEADING = {"around": 1, "after": 1}  # the original, or its result


@dataclass(frozen=True)
class Parameters:
    """names: in order, without what a method is bound to. is_open: takes more than these."""

    names: tuple[str, ...]
    is_open: bool

    @classmethod
    def of(cls, function: Callable[..., Any], skip: int) -> Parameters:
        """Of a function whose first ``skip`` parameters do not count."""
        found = inspect.signature(function).parameters.values()
        named = [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return cls(tuple(named[skip:]), any(p.kind is p.VAR_KEYWORD for p in found))


def mismatch(target: Parameters, ours: Parameters, ignores: tuple[str, ...] = ()) -> str | None:
    """Why a hook with parameters ``ours`` does not fit ``target``; None when it does. ignores: see ``Hook``."""
    absent = [name for name in (*ours.names, *ignores) if name not in target.names]
    if absent:
        return f"has no parameter {', '.join(absent)}"
    unknown = [name for name in target.names if name not in (*ours.names, *ignores)]
    if unknown and not ours.is_open:
        return f"has a parameter that this package does not know: {', '.join(unknown)}"
    if ours.names != target.names[: len(ours.names)]:
        return f"takes its parameters in another order: {', '.join(target.names)}"
    return None


def overrides(ours: type) -> Iterator[tuple[str, Any]]:
    """(name, method) of what ``ours``, or a class of ours below it, marks as ``override`` of the engine's."""
    seen = set()
    for cls in ours.__mro__:
        for name, method in vars(cls).items():
            if getattr(method, "__override__", False) and name not in seen:
                seen.add(name)
                yield name, method


def engines_class(ours: type) -> type:
    """The class of the engine that ``ours`` extends."""
    return next(cls for cls in ours.__mro__ if not cls.__module__.startswith("sglang_dsv4"))
