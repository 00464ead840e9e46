"""Checks the installed release of sglang against the hook table, and against every other name that the hooks use.

    make compat SGLANG=0.5.24                              with the pins of requirements/sglang-0.5.24.txt
    python3 -m tools.compat                                the release that this Python imports
    PYTHONPATH=FOLDER python3 -m tools.compat --as 0.5.24  a folder that has sglang/, a checkout's python/

Asks the server's own check (engine/hooks/check.py) of every hook, those of all parts, and looks for each name of
symbols.txt: an attribute, a field, or what a method assigns. Needs no GPU. Prints a line, and what is missing.

Exit status: 0 nothing missing, 1 something missing, 2 a release before the window.
"""

import dis
import inspect
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from sglang_dsv4.command_line import CommandError, Parser, to_its_end
from sglang_dsv4.engine.hooks import PARTS, member
from sglang_dsv4.engine.hooks.check import Installation
from sglang_dsv4.engine.hooks.table import hooks_of
from sglang_dsv4.engine.releases import SUPPORTED, TESTED, Ranged, is_supported

SYMBOLS = Path(__file__).with_name("symbols.txt")


def symbols_of(version: str) -> Iterator[tuple[str, str]]:
    """Yields (module or class, name) of each name that a release must have."""
    owner, covered = "", False
    for line in SYMBOLS.read_text().splitlines():
        if line.startswith(" "):
            yield from ((owner, name) for name in line.split() if covered)
        elif not line.startswith("#"):
            owner, *limits = line.split()
            covered = Ranged(**dict(limit.split("=") for limit in limits)).covers(version)


def lacks(path: str, name: str) -> str:
    """Returns why the module or class ``path`` has no ``name``; empty where it has."""
    *owners, name = f"{path}.{name}".split(".")
    try:
        owner = member(".".join(owners))
    except (ImportError, AttributeError) as error:
        return str(error)
    classes = getattr(owner, "__mro__", ())
    found = hasattr(owner, name) or any(
        name in getattr(cls, "__annotations__", ()) or assigns(cls, name) for cls in classes
    )
    return "" if found else f"{'.'.join(owners)} has no {name}"


def assigns(cls: type, name: str) -> bool:
    """Returns whether a method of the class assigns the attribute ``name``."""
    methods = filter(inspect.isfunction, map(inspect.unwrap, vars(cls).values()))
    return any(step.opname == "STORE_ATTR" and step.argval == name for m in methods for step in dis.get_instructions(m))


def missing(version: str) -> list[str]:
    """Prints how many names a release has; returns a line for each that it lacks."""
    from sglang_dsv4.testing.standalone import boot  # noqa: PLC0415 - it imports torch

    boot()
    installation, symbols = Installation(version, hooks_of(version, *PARTS)), list(symbols_of(version))
    unfit = installation.unfit()
    gone = [f"symbol {owner}.{name}: {reason}" for owner, name in symbols if (reason := lacks(owner, name))]
    hooks, lost = len(installation.hooks), len({line.partition(":")[0] for line in unfit})
    said = f"{version}  {'missing' if unfit or gone else 'ok'}, {'' if version in TESTED else 'not '}tested: "
    print(f"{said}hooks {hooks - lost}/{hooks}, symbols {len(symbols) - len(gone)}/{len(symbols)}")
    return [f"hook {line}" for line in unfit] + gone


def main(argv: Sequence[str] | None = None) -> int:
    """Checks a release and prints what it lacks; returns the exit status."""
    parser = Parser("python3 -m tools.compat", description=__doc__)
    parser.add_argument("--as", dest="version", metavar="VERSION", help="the release that it is")
    version: Any = parser.parse_args(argv).version or installed_version("sglang")
    if not is_supported(version):
        raise CommandError(f"sglang {version} is not supported: {SUPPORTED}")
    found = missing(version)
    print("".join(f"  {line}\n" for line in found), end="")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(to_its_end("tools.compat", main))
