"""Checks releases of sglang against the hook table, without importing sglang.

    compat.py                                      every release from the package index
    compat.py --only 0.5.23                        one
    compat.py --source sglang-0.5.24-...whl        one that is not released: a wheel ...
    compat.py --source FOLDER --as 0.5.24          ... or a folder that has sglang/, a checkout or an installation

For each release: look up every hook target, every method that a subclass of ours overrides, their parameters, and every
other engine name that the hooks use. Prints a row a release, then the missing names, then one line of JSON.

Exit status: 0 nothing missing, 1 something missing, 2 a release (or all of them) could not be checked. A release
without a CPython 3.11 wheel, or before the window, gets a row and does not change the status.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sglang_dsv4.engine.hooks import LEADING, PARTS, Hook, mismatch  # noqa: E402
from sglang_dsv4.engine.hooks.table import hooks_of  # noqa: E402
from sglang_dsv4.engine.releases import SUPPORTED, TESTED, is_supported, version_of  # noqa: E402
from tools.sources import Found, SourceError, Sources, has_decorator, parameters  # noqa: E402
from tools.symbols import symbols_of  # noqa: E402

PACKAGE, FIRST = "sglang", TESTED[0]
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (35, 34, 31, 28, 27, 24, 17)] + ["manylinux2014_x86_64"]
WHEEL_TAG = re.compile(r"-(cp311-cp311|cp3\d+-abi3|(py2\.)?py3\d*-none)-")
NO_NETWORK = re.compile(r"Retrying \(|Connection ?Error|Max retries exceeded|timed out", re.IGNORECASE)


class CompatError(Exception):
    """Reports that the whole run could not be made."""


@dataclass
class Row:
    """Holds one release's result: status is ok, missing, unsupported, no wheel or error; counts are (ok, total)."""

    version: str
    status: str
    note: str = ""
    tested: bool = False
    wheel: str | None = None
    hooks: tuple[int, int] = (0, 0)
    symbols: tuple[int, int] = (0, 0)
    missing: list[dict[str, str]] = field(default_factory=list)


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
    row = Row(version, "ok", tested=version in TESTED, wheel=path.name)
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
    row.missing = [{"what": what, "name": name, "reason": reason} for what, name, reason in bad]
    row.status = "missing" if bad else "ok"
    row.hooks = (len(hooks) - lost, len(hooks))
    row.symbols = (len(names) - sum(what == "symbol" for what, _, _ in bad), len(names))
    return row


def version_key(version: str) -> tuple[tuple[int, ...], int, str]:
    """Sorts versions: release numbers, then -1 pre-release, 0 release, 1 post-release, then the rest."""
    match = re.match(r"\d+(\.\d+)*", version)
    if not match:
        raise CompatError(f"not a version: {version!r}")
    rest = version[match.end() :]
    phase = 0 if not rest else 1 if rest.startswith(".post") else -1
    return tuple(int(n) for n in match[0].split(".")), phase, rest


def select(versions: Iterable[str], everything: bool) -> list[str]:
    """Versions from FIRST on, oldest first; final releases only unless `everything`."""
    keys = sorted((version_key(v), v) for v in versions)
    return [v for key, v in keys if key >= version_key(FIRST) and (everything or key[1] == 0)]


def pip(*args: str) -> str:
    """Returns standard output of pip, empty when no distribution matches."""
    cmd = [sys.executable, "-m", "pip", *args, "--disable-pip-version-check", "--retries", "1"]
    done = subprocess.run(cmd, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout
    if "No module named pip" in done.stderr:
        raise CompatError("this Python has no pip")
    if NO_NETWORK.search(done.stdout + done.stderr):
        raise CompatError("no network: the package index cannot be reached (--offline uses the cache alone)")
    if "No matching distribution" in done.stderr:
        return ""
    errors = [ln for ln in done.stderr.splitlines() if ln.startswith("ERROR")]
    raise CompatError(f"pip {args[0]} failed: {errors[-1] if errors else f'status {done.returncode}'}")


def index_versions(everything: bool) -> list[str]:
    """Returns the versions that the package index lists."""
    out = pip("index", "versions", PACKAGE, "--ignore-requires-python", *["--pre"] * everything)
    match = re.search(r"^Available versions: (.+)$", out, re.MULTILINE)
    if not match:
        raise CompatError(f"the package index lists no {PACKAGE}")
    return [v.strip() for v in match[1].split(",")]


def cached_wheels(cache: Path) -> dict[str, Path]:
    """Wheels for CPython 3.11 in the cache folder, by version."""
    paths = sorted(cache.glob(f"{PACKAGE}-*.whl"))
    return {p.name.split("-")[1]: p for p in paths if WHEEL_TAG.search(p.name)}


def check_release(version: str, cache: Path, offline: bool) -> Row:
    """Returns one release's row, its wheel downloaded when the cache lacks it."""
    try:
        if not offline and version not in cached_wheels(cache):
            tags = ["--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp"]
            tags += [a for p in PLATFORMS for a in ("--platform", p)]
            pip("download", "-q", "--no-deps", *tags, "-d", str(cache), f"{PACKAGE}=={version}")
        if path := cached_wheels(cache).get(version):
            return check(path, version)
        where = "the cache" if offline else "the package index"
        return Row(version, "no wheel", f"no CPython 3.11 wheel in {where}")
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


def print_report(rows: Sequence[Row], console: Console) -> None:
    """Prints the table, then the notes and the full list of missing names."""
    view = RichTable(title=f"{PACKAGE} releases")
    for name in ("version", "tested", "hooks", "symbols"):
        view.add_column(name, no_wrap=True, min_width=len(name))
    view.add_column("missing", overflow="ellipsis", no_wrap=True)
    for row in rows:
        checked = row.status in ("ok", "missing")
        counts = ["{}/{}".format(*c) if checked else "-" for c in (row.hooks, row.symbols)]
        names = ", ".join(m["name"].removeprefix(f"{PACKAGE}.") for m in row.missing)
        style = {"ok": "green", "missing": "red"}.get(row.status, "yellow")
        text = names if checked else f"{row.status}: {row.note}"
        view.add_row(row.version, "yes" if row.tested else "no", *counts, text, style=style)
    console.print(view)
    for row in rows:
        notes = [row.note] if row.note else []
        for text in notes + [f"{m['what']} {m['name']}: {m['reason']}" for m in row.missing]:
            console.print(f"{row.version}: {text}", soft_wrap=True, highlight=False, markup=False)


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
    if args.only:
        versions = sorted(set(args.only), key=version_key)
    else:
        known = cached_wheels(args.cache) if args.offline else index_versions(args.all)
        versions = select(known, args.all)
    if not versions:
        raise CompatError(f"no {PACKAGE} release from {FIRST} on to check")
    return [check_release(v, args.cache, args.offline) for v in versions]


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the releases that the arguments name and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(".compat-wheels"), help="folder of wheels")
    parser.add_argument("--only", nargs="+", metavar="VERSION", help="check these versions alone")
    parser.add_argument("--all", action="store_true", help="pre- and post-releases too")
    parser.add_argument("--offline", action="store_true", help="use only wheels in the cache")
    parser.add_argument("--source", type=Path, help="check this wheel, or this folder that has sglang/, alone")
    parser.add_argument("--as", dest="version", metavar="VERSION", help="the release that --source is")
    args = parser.parse_args(argv)
    rows, error = list[Row](), ""
    try:
        rows = rows_of(args)
        print_report(rows, Console())
    except CompatError as exc:
        error = str(exc)
        print(f"compat: {error}", file=sys.stderr)
    status = 2 if error else exit_status(rows)
    print(json.dumps({"exit": status, "error": error, "releases": [asdict(r) for r in rows]}), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
