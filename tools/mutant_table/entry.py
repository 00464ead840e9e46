"""Describes one seeded fault and the tests nearest to it."""

from __future__ import annotations

from dataclasses import dataclass, field

OLDER, NEWEST = "0.5.22", "0.5.23"


def nearest(file: str, *names: str) -> tuple[str, ...]:
    """The tests ``names`` of ``file`` below test/cpu; all of them where none is named."""
    return tuple(f"test/cpu/{file}::{name}" for name in names) or (f"test/cpu/{file}",)


@dataclass(frozen=True)
class Mutant:
    """One fault: in ``file``, ``old`` (there exactly once) becomes ``new``.

    id: names the fault as a user would meet it. tests: the nearest ones, paths with ``::name`` where a file is long.
    release: the engine's, of which the tests need an interpreter.
    """

    id: str
    file: str
    tests: tuple[str, ...]
    old: str
    new: str
    release: str = field(default=NEWEST, kw_only=True)
