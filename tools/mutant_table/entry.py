"""Describes one seeded fault and the tests nearest to it."""

from __future__ import annotations

from dataclasses import dataclass

LINE_0517, LINE_0523 = "0.5.17", "0.5.23"


def nearest(file: str, *names: str) -> tuple[str, ...]:
    """The tests ``names`` of ``file`` below test/cpu; all of them where none is named."""
    return tuple(f"test/cpu/{file}::{name}" for name in names) or (f"test/cpu/{file}",)


@dataclass(frozen=True)
class Mutant:
    """One fault: in ``file``, ``old`` (there exactly once) becomes ``new``.

    tests: the nearest ones, paths with ``::name`` where a file is long. harm: to a user, where the id is silent.
    line: the engine line that the tests need.
    """

    id: str
    file: str
    tests: tuple[str, ...]
    old: str
    new: str
    harm: str = ""
    line: str = LINE_0523
