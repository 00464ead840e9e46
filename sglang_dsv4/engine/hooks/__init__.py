"""Describes one hook into the engine, and binds it by its target's signature: ``table`` has all, ``check`` asks each.

A hook's own signature lists the parameters it knows. It must take each parameter of its target that it names as the
engine may pass it: at that place, by position or by keyword, or not at all where the target has a default. Others it
takes with ``*args, **kwargs`` and passes on.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.engine.releases import Ranged

PARTS = (  # of this package, which a server may leave out
    "prep",  # the metadata of decode steps
    "plain",  # plain serving
    "layout",  # page-major pools
    "answers",  # those of a decode server, in the store
)


@dataclass(frozen=True, kw_only=True)
class Hook(Ranged):
    """Describes one entry.

    target: dotted path in the engine. kind: replace, around, before or after. ours: ``module:name`` of ours below this
    package. also: modules that bind the target's name by import; the hook must have reached them too. part: of PARTS,
    used only where that is wanted; "" always. Our own signature says which parameters of the target the hook relies on.
    """

    target: str
    kind: str
    ours: str
    why: str
    gone_when: str
    also: tuple[str, ...] = ()
    part: str = ""

    def resolve(self) -> Any:
        """Imports our function or class."""
        module, name = self.ours.split(":")
        return getattr(importlib.import_module(f"sglang_dsv4.{module}"), name)


LEADING = {"around": 1, "after": 1}  # the original, or its result
AT_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
ANY_MORE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters_of(function: Callable[..., Any], skip: int) -> list[inspect.Parameter]:
    """Lists the parameters of a function whose first ``skip`` do not count, those that take any more last."""
    found = inspect.signature(function).parameters.values()
    named = [p for p in found if p.kind not in ANY_MORE]
    return [*named[skip:], *(p for p in found if p.kind in ANY_MORE)]


def mismatch(target: Sequence[inspect.Parameter], ours: Sequence[inspect.Parameter]) -> str | None:
    """Returns why a hook with parameters ``ours`` does not fit ``target``; None when it does."""
    theirs, mine = ({p.name: p for p in each if p.kind not in ANY_MORE} for each in (target, ours))
    if absent := [name for name in mine if name not in theirs]:
        return f"has no parameter {', '.join(absent)}"
    kinds = {p.kind for p in ours}
    args, kwargs = (kind in kinds for kind in ANY_MORE)
    more = [p for name, p in theirs.items() if name not in mine]
    if unknown := [p.name for p in more if (p.kind in AT_PLACE) > args or (p.kind in BY_NAME) > kwargs]:
        return f"has a parameter that this package does not know: {', '.join(unknown)}"
    if any(p.kind in ANY_MORE and p.kind not in kinds for p in target):
        return "takes any more parameters, which this package does not"
    order = [name for name, p in theirs.items() if p.kind in AT_PLACE]
    placed = [name for name, p in mine.items() if p.kind in AT_PLACE and name in order]
    if placed != order[: len(placed)]:
        return f"takes its parameters in another order: {', '.join(order)}"
    return next(filter(None, (_otherwise(theirs[name], p) for name, p in mine.items())), None)


def _otherwise(theirs: inspect.Parameter, ours: inspect.Parameter) -> str | None:
    """Returns how the engine may pass ``theirs`` where ours does not take it so; None where it does."""
    if (theirs.kind in AT_PLACE) != (ours.kind in AT_PLACE):
        return f"takes {theirs.name} {'by position, too' if theirs.kind in AT_PLACE else 'by keyword alone'}"
    if theirs.kind in BY_NAME and ours.kind not in BY_NAME:
        return f"takes {theirs.name} by keyword, too"
    optional = theirs.default is not theirs.empty and ours.default is ours.empty
    return f"may be called without {theirs.name}" if optional else None


def passed(function: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Returns the argument ``name`` of this call of ``function``, by position or by keyword; None where it has none."""
    return _signature(function).bind(*args, **kwargs).arguments.get(name)


_signature = functools.cache(inspect.signature)


def member(path: str) -> Any:
    """Finds a module, class or member by dotted path. Raises ImportError or AttributeError."""
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


def overrides(ours: type) -> Iterator[tuple[str, Any]]:
    """Yields (name, method) of each method that ``ours``, or a class of ours below it, marks as ``override``."""
    seen = set()
    for cls in ours.__mro__:
        for name, method in vars(cls).items():
            if getattr(method, "__override__", False) and name not in seen:
                seen.add(name)
                yield name, method


def engines_class(ours: type) -> type:
    """Returns the class of the engine that ``ours`` extends."""
    return next(cls for cls in ours.__mro__ if not cls.__module__.startswith("sglang_dsv4"))
