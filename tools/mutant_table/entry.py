"""One fault that somebody could really make, and the tests nearest to it."""

from __future__ import annotations

from dataclasses import dataclass, field

LINE_0517, LINE_0523 = "0.5.17", "0.5.23"


def nearest(file: str, *names: str) -> tuple[str, ...]:
    """The tests ``names`` of ``file`` below test/cpu; all of them where none is named."""
    return tuple(f"test/cpu/{file}::{name}" for name in names) or (f"test/cpu/{file}",)


@dataclass(frozen=True)
class Mutant:
    """One fault: in ``file``, ``old`` (there exactly once) becomes ``new``.

    id: names the fault as a user would meet it. tests: the nearest ones, paths with ``::name`` where a file is long.
    line: the engine line that the tests need.
    """

    id: str
    file: str
    tests: tuple[str, ...]
    old: str
    new: str
    line: str = field(default=LINE_0523, kw_only=True)
