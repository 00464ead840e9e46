"""Checks a release of sglang against the hook table, without importing sglang.

    python3 -m tools.compat                                the installed one
    python3 -m tools.compat sglang-0.5.24-...whl           a wheel: pip download --no-deps sglang==0.5.24
    python3 -m tools.compat FOLDER --as 0.5.24             a folder that has sglang/, a checkout's python/

Looks up every hook target, every method that a subclass of ours overrides, their parameters, and every other engine
name that the hooks use. Prints a line, and the missing names behind it.

Exit status: 0 nothing missing, 1 something missing, 2 a release that could not be checked, or is before the window.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path

from sglang_dsv4.command_line import CommandError, Parser, to_its_end
from sglang_dsv4.engine.hooks import LEADING, PARTS, Hook, mismatch
from sglang_dsv4.engine.hooks.table import hooks_of
from sglang_dsv4.engine.releases import SUPPORTED, TESTED, is_supported, version_of
from tools.sources import Found, Sources, has_decorator, parameters
from tools.symbols import symbols_of

ROOT = Path(__file__).resolve().parent.parent


def problems(engine: Sources, ours: Sources, hook: Hook) -> Iterator[str]:
    """Yields why a hook does not fit a release."""
    found, reason = engine.resolve(hook.target)
    mine, _ = ours.resolve(".".join(hook.place))
    if not found or all(f.kind == "instance" for f in found):
        yield reason or "only an instance attribute"
    elif not mine:
        yield f"this package has no {hook.ours}"
    elif mine[0].kind == "class":
        yield from override_problems(engine, ours, found, mine[0])
    else:
        owner, _ = engine.resolve(hook.target.rsplit(".", 1)[0])
        method = any(f.kind == "class" for f in owner)
        skip = LEADING.get(hook.kind, 0) + method
        yield from unfit(found, method, mine[0], skip)


def override_problems(engine: Sources, ours: Sources, found: list[Found], mine: Found) -> Iterator[str]:
    """Yields the methods that ours override and a replaced class lacks."""
    for name, method in dict(ours.methods_of(mine)).items():
        if not has_decorator(method.node, "override"):
            continue
        originals = [m for f in found for m in engine.member(f, name)]
        if not originals:
            yield f"has no {name}"
        else:
            yield from (f"its {name} {reason}" for reason in unfit(originals, True, method, 1))


def unfit(originals: list[Found], skip: int, mine: Found, my_skip: int) -> Iterator[str]:
    """Yields why ours fits none of the definitions."""
    known = parameters(mine.node, my_skip)
    functions = [f for f in originals if f.kind == "function"]
    reasons = [mismatch(parameters(f.node, skip), known) for f in functions]
    if not functions:
        yield "is no function"
    elif all(reasons):
        yield min(filter(None, reasons), key=len)


def missing(path: Path, version: str) -> list[str]:
    """Prints how many names a release has; returns a line for each that it lacks."""
    engine, ours = Sources(path, "sglang"), Sources(ROOT, "sglang_dsv4")
    hooks, names = hooks_of(version, *PARTS), symbols_of(version)
    unfit = {hook.target: list(problems(engine, ours, hook)) for hook in hooks}
    lost = {target: reasons for target, reasons in unfit.items() if reasons}
    gone = {name: reason for name in names if (reason := engine.resolve(name)[1])}
    tested = "tested" if version in TESTED else "not tested"
    counts = f"hooks {len(hooks) - len(lost)}/{len(hooks)}, symbols {len(names) - len(gone)}/{len(names)}"
    print(f"{version}  {'missing' if lost or gone else 'ok'}, {tested}: {counts}")
    found = [f"hook {target}: {reason}" for target, reasons in lost.items() for reason in reasons]
    return found + [f"symbol {name}: {reason}" for name, reason in gone.items()]


def source_of(given: Path | None, version: str | None) -> tuple[Path, str]:
    """Returns the source, and its version as given or as the wheel is named; without any, the installed one's."""
    if given is None:
        installed = distribution("sglang")
        return Path(str(installed.locate_file(""))), installed.version
    if not given.exists():
        raise CommandError(f"no such file or folder: {given}")
    version = version or (given.name.split("-")[1] if given.name.startswith("sglang-") else "")
    if not version_of(version):
        raise CommandError(f"which release is {given}? Give --as VERSION")
    return given, version


def main(argv: Sequence[str] | None = None) -> int:
    """Checks a release and prints what it lacks; returns the exit status."""
    parser = Parser("python3 -m tools.compat", description=__doc__)
    parser.add_argument("source", type=Path, nargs="?", help="a wheel, or a folder that has sglang/")
    parser.add_argument("--as", dest="version", metavar="VERSION", help="the release that it is")
    arguments = parser.parse_args(argv)
    path, version = source_of(arguments.source, arguments.version)
    if not is_supported(version):
        raise CommandError(f"sglang {version} is not supported: {SUPPORTED}")
    found = missing(path, version)
    print("".join(f"  {line}\n" for line in found), end="")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(to_its_end("tools.compat", main))
