"""Describes one hook into the engine, and binds it by its target's signature: ``table`` has all, ``check`` asks each.

A hook's own signature lists the parameters it knows. It must take each parameter of its target that it names as the
engine may pass it: at that place, by position or by keyword, or not at all where the target has a default. Others it
takes with ``*args, **kwargs`` and passes on.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
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

    @property
    def place(self) -> tuple[str, str]:
        """Returns (module, name) of our function or class."""
        module, name = self.ours.split(":")
        return f"sglang_dsv4.{module}", name

    def resolve(self) -> Any:
        """Imports our function or class."""
        module, name = self.place
        return getattr(importlib.import_module(module), name)


LEADING = {"around": 1, "after": 1}  # the original, or its result


@dataclass(frozen=True)
class Parameter:
    """Describes one parameter: how a caller may pass it, and whether it may be left out."""

    name: str
    by_position: bool = True
    by_keyword: bool = True
    optional: bool = False


@dataclass(frozen=True)
class Parameters:
    """Lists the parameters of a function.

    named: in order, without those a method is bound to. args, kwargs: takes others by position, by keyword.
    """

    named: tuple[Parameter, ...]
    args: bool = False
    kwargs: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any], skip: int) -> Parameters:
        """Reads the parameters of a function whose first ``skip`` do not count."""
        found = inspect.signature(function).parameters.values()
        kinds = {p.kind for p in found}
        named = [
            Parameter(p.name, p.kind is not p.KEYWORD_ONLY, p.kind is not p.POSITIONAL_ONLY, p.default is not p.empty)
            for p in found
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        more = (inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds)
        return cls(tuple(named[skip:]), *more)


def mismatch(target: Parameters, ours: Parameters) -> str | None:
    """Returns why a hook with parameters ``ours`` does not fit ``target``; None when it does."""
    theirs = {p.name: p for p in target.named}
    absent = [name for name in (p.name for p in ours.named) if name not in theirs]
    if absent:
        return f"has no parameter {', '.join(absent)}"
    known = {p.name for p in ours.named}
    more = [p for p in target.named if p.name not in known]
    unknown = [p.name for p in more if p.by_position > ours.args or p.by_keyword > ours.kwargs]
    if unknown:
        return f"has a parameter that this package does not know: {', '.join(unknown)}"
    if target.args > ours.args or target.kwargs > ours.kwargs:
        return "takes any more parameters, which this package does not"
    order = [p.name for p in target.named if p.by_position]
    mine = [p.name for p in ours.named if p.by_position and theirs[p.name].by_position]
    if mine != order[: len(mine)]:
        return f"takes its parameters in another order: {', '.join(order)}"
    return next(filter(None, (_otherwise(theirs[p.name], p) for p in ours.named)), None)


def _otherwise(theirs: Parameter, ours: Parameter) -> str | None:
    """Returns how the engine may pass ``theirs`` where ours does not take it so; None where it does."""
    if theirs.by_position != ours.by_position:
        return f"takes {theirs.name} {'by position, too' if theirs.by_position else 'by keyword alone'}"
    if theirs.by_keyword > ours.by_keyword:
        return f"takes {theirs.name} by keyword, too"
    return f"may be called without {theirs.name}" if theirs.optional > ours.optional else None


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
