"""Describes one seeded fault and the tests nearest to it."""

from dataclasses import dataclass

OLDER, NEWEST = "0.5.22", "0.5.23"


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
    release: str = NEWEST


def seeded(
    file: str, tests: str | tuple[str, ...], *faults: tuple[str, str, str], release: str = NEWEST
) -> tuple[Mutant, ...]:
    """Returns the faults (id, old, new) of one file that the same tests notice.

    file: below sglang_dsv4, unless it begins with another folder. tests: below test/cpu; ``::name`` alone is in the
    file of the first.
    """
    here = file if file.startswith(("triton_ops/", "benchmarks/", "tools/", "scripts/")) else f"sglang_dsv4/{file}"
    named = (tests,) if isinstance(tests, str) else tests
    first = named[0].partition("::")[0]
    paths = tuple(f"test/cpu/{first if test.startswith('::') else ''}{test}" for test in named)
    return tuple(Mutant(name, here, paths, old, new, release) for name, old, new in faults)
