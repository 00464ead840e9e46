"""Checks releases of sglang against the hook table, without importing sglang.

    compat.py                                      every release from the package index
    compat.py --only 0.5.23                        one
    compat.py --source sglang-0.5.24-...whl        one that is not released: a wheel ...
    compat.py --source FOLDER --as 0.5.24          ... or a folder that has sglang/, a checkout or an installation

For each release: look up every hook target, every method that a subclass of ours overrides, their parameters, and every
other engine name that the hooks use. Prints a line a release, and the missing names behind it.

Exit status: 0 nothing missing, 1 something missing, 2 a release (or all of them) could not be checked. A release
without a CPython 3.11 wheel, or before the window, gets a row and does not change the status.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sglang_dsv4.engine.hooks import LEADING, PARTS, Hook, mismatch  # noqa: E402
from sglang_dsv4.engine.hooks.table import hooks_of  # noqa: E402
from sglang_dsv4.engine.releases import SUPPORTED, TESTED, is_supported, parse, version_of  # noqa: E402
from tools.sources import Found, SourceError, Sources, has_decorator, parameters  # noqa: E402
from tools.symbols import symbols_of  # noqa: E402

PACKAGE = "sglang"
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (35, 34, 31, 28, 27, 24, 17)] + ["manylinux2014_x86_64"]
WHEEL_TAG = re.compile(r"-(cp311-cp311|cp3\d+-abi3|(py2\.)?py3\d*-none)-")


class CompatError(Exception):
    """Reports that the whole run could not be made."""


@dataclass
class Row:
    """Holds one release's result: status is ok, missing, unsupported, no wheel or error; counts are (ok, total)."""

    version: str
    status: str
    note: str = ""
    tested: bool = False
    hooks: tuple[int, int] = (0, 0)
    symbols: tuple[int, int] = (0, 0)
    missing: list[str] = field(default_factory=list)


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
        yield from unfit(found, method, mine[0], skip, hook.ignores)


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


def unfit(originals: list[Found], skip: int, mine: Found, my_skip: int, ignores: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields why ours fits none of the definitions."""
    known = parameters(mine.node, my_skip)
    functions = [f for f in originals if f.kind == "function"]
    reasons = [mismatch(parameters(f.node, skip), known, ignores) for f in functions]
    if not functions:
        yield "is no function"
    elif all(reasons):
        yield min(filter(None, reasons), key=len)


def check(path: Path, version: str) -> Row:
    """Checks one release's sources against its part of the table."""
    row = Row(version, "ok", tested=version in TESTED)
    if not is_supported(version):
        row.status, row.note = "unsupported", f"supported: {SUPPORTED}"
        return row
    try:
        engine, ours = Sources(path, PACKAGE), Sources(ROOT, "sglang_dsv4")
        hooks, names = hooks_of(version, *PARTS), symbols_of(version)
        bad = [("hook", h.target, reason) for h in hooks for reason in problems(engine, ours, h)]
        lost = len({name for _, name, _ in bad})
        bad += [("symbol", name, reason) for name in names if (reason := engine.resolve(name)[1])]
    except SourceError as exc:
        return Row(version, "error", str(exc))
    row.missing = [f"{what} {name}: {reason}" for what, name, reason in bad]
    row.status = "missing" if bad else "ok"
    row.hooks = (len(hooks) - lost, len(hooks))
    row.symbols = (len(names) - sum(what == "symbol" for what, _, _ in bad), len(names))
    return row


def final_releases(versions: Iterable[str]) -> list[str]:
    """Returns the final releases of the window and later ones, oldest first."""
    return sorted((v for v in versions if re.fullmatch(r"\d+\.\d+\.\d+", v) and is_supported(v)), key=parse)


def pip(*args: str) -> str:
    """Returns standard output of pip, empty when no distribution matches."""
    cmd = [sys.executable, "-m", "pip", *args, "--disable-pip-version-check", "--retries", "1"]
    done = subprocess.run(cmd, capture_output=True, text=True, check=False)
    if done.returncode and "No matching distribution" not in done.stderr:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        raise CompatError(f"pip {args[0]} failed: {said[-1]}")
    return done.stdout


def index_versions() -> list[str]:
    """Returns the versions that the package index lists."""
    match = re.search(
        r"^Available versions: (.+)$", pip("index", "versions", PACKAGE, "--ignore-requires-python"), re.M
    )
    if not match:
        raise CompatError(f"the package index lists no {PACKAGE}")
    return [v.strip() for v in match[1].split(",")]


def wheel_of(version: str, cache: Path) -> Path | None:
    """Returns the wheel for CPython 3.11 that the cache folder has of a release."""
    return next((path for path in cache.glob(f"{PACKAGE}-{version}-*.whl") if WHEEL_TAG.search(path.name)), None)


def check_release(version: str, cache: Path) -> Row:
    """Returns one release's row, its wheel downloaded when the cache lacks it."""
    try:
        if wheel_of(version, cache) is None:
            tags = ["--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp"]
            tags += [a for p in PLATFORMS for a in ("--platform", p)]
            pip("download", "-q", "--no-deps", *tags, "-d", str(cache), f"{PACKAGE}=={version}")
        if path := wheel_of(version, cache):
            return check(path, version)
        return Row(version, "no wheel", "the package index has none for CPython 3.11")
    except CompatError as exc:
        return Row(version, "error", str(exc))


def source_version(path: Path, given: str | None) -> str:
    """Returns the version of ``--source``: as given, or as the wheel is named."""
    version = given or (path.name.split("-")[1] if path.name.startswith(f"{PACKAGE}-") else "")
    if not version_of(version):
        raise CompatError(f"which release is {path}? Give --as VERSION")
    if not path.exists():
        raise CompatError(f"no such file or folder: {path}")
    return version


def print_report(rows: Sequence[Row]) -> None:
    """Prints a line a release, each followed by what it lacks."""
    for row in rows:
        tested = "tested" if row.tested else "not tested"
        counts = "hooks {}/{}, symbols {}/{}".format(*row.hooks, *row.symbols)
        print(f"{row.version}  {row.status}, {tested}: {row.note or counts}")
        for line in row.missing:
            print(f"  {line}")


def exit_status(rows: Sequence[Row]) -> int:
    """Returns 1 when a row misses something, else 2 when a release or all of them went unchecked, else 0."""
    statuses = {r.status for r in rows}
    if "missing" in statuses:
        return 1
    return 2 if "error" in statuses or statuses <= {"no wheel"} else 0


def rows_of(args: argparse.Namespace) -> list[Row]:
    """Returns a row for each release that the arguments name. Raises CompatError."""
    if args.source:
        return [check(args.source, source_version(args.source, args.version))]
    args.cache.mkdir(parents=True, exist_ok=True)
    versions = args.only or final_releases(index_versions())
    if not versions:
        raise CompatError(f"no {PACKAGE} release from {TESTED[0]} on to check")
    return [check_release(v, args.cache) for v in versions]


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the releases that the arguments name and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(".compat-wheels"), help="folder of wheels")
    parser.add_argument("--only", nargs="+", metavar="VERSION", help="check these versions alone")
    parser.add_argument("--source", type=Path, help="check this wheel, or this folder that has sglang/, alone")
    parser.add_argument("--as", dest="version", metavar="VERSION", help="the release that --source is")
    args = parser.parse_args(argv)
    try:
        rows = rows_of(args)
    except CompatError as exc:
        print(f"compat: {exc}", file=sys.stderr)
        return 2
    print_report(rows)
    return exit_status(rows)


if __name__ == "__main__":
    sys.exit(main())
