"""Check every release of sglang against the hook table, without importing sglang.

For each release from 0.5.17 on: take its wheel from the package index (or from the cache folder), and look
up each hook target and each used symbol of its adapter line in the wheel's source. Prints one table row per
release, then what is missing, then one line of JSON.

Exit status: 0 nothing missing, 1 something missing for a release's adapter line, 2 a release (or all of
them) could not be checked. A release without a CPython 3.11 wheel gets a row and does not change the status.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table as RichTable

PACKAGE, FIRST, TABLE_MODULE = "sglang", "0.5.17", "sglang_dsv4.engine.hooks"
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (35, 34, 31, 28, 27, 24, 17)] + ["manylinux2014_x86_64"]
WHEEL_TAG = re.compile(r"-(cp311-cp311|cp3\d+-abi3|(py2\.)?py3\d*-none)-")
NO_NETWORK = re.compile(r"Retrying \(|Connection ?Error|Max retries exceeded|timed out", re.IGNORECASE)
MAX_DEPTH = 16
Function = ast.FunctionDef | ast.AsyncFunctionDef
Seen = frozenset[tuple[str, str]]


class CompatError(Exception):
    """A release, or the whole run, could not be checked."""


class Table(Protocol):
    """What the check needs: hooks with target, lines, optionally params; optionally `line_of(version)`."""

    HOOKS: Sequence[Any]
    USED_SYMBOLS: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Found:
    """A definition: kind is module, class, function, value, instance or external; scope is its module."""

    kind: str
    scope: Module | None = None
    node: Any = None


@dataclass
class Row:
    """One release's result: status is ok, missing, unsupported, no wheel or error; counts are (ok, total)."""

    version: str
    status: str
    note: str = ""
    line: str | None = None
    wheel: str | None = None
    hooks: tuple[int, int] = (0, 0)
    symbols: tuple[int, int] = (0, 0)
    missing: list[dict[str, str]] = field(default_factory=list)
    fits: list[str] = field(default_factory=list)


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of one scope, those in nested blocks included, bodies of `if TYPE_CHECKING` left out."""
    for stmt in body:
        yield stmt
        if isinstance(stmt, Function | ast.ClassDef):
            continue
        test = getattr(stmt, "test", None)
        if getattr(test, "id", getattr(test, "attr", None)) != "TYPE_CHECKING":
            yield from statements(getattr(stmt, "body", []))
        for part in ("orelse", "finalbody"):
            yield from statements(getattr(stmt, part, []))
        for block in (*getattr(stmt, "handlers", []), *getattr(stmt, "cases", [])):
            yield from statements(block.body)


def assigned(stmt: ast.stmt) -> list[str]:
    """Names that a definition or an assignment binds."""
    if isinstance(stmt, Function | ast.ClassDef):
        return [stmt.name]
    targets = getattr(stmt, "targets", None) or [getattr(stmt, "target", None)]
    nodes = (n for t in targets if t is not None for n in ast.walk(t))
    return [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def instance_attributes(cls: ast.ClassDef) -> Iterator[str]:
    """Attributes that the methods of a class assign on their first parameter."""
    for method in (s for s in statements(cls.body) if isinstance(s, Function)):
        first = next((a.arg for a in (*method.args.posonlyargs, *method.args.args)), None)
        for n in ast.walk(method):
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store):
                yield from [n.attr] if isinstance(n.value, ast.Name) and n.value.id == first else []


class Module:
    """Bindings of one source file: a statement, or (module, name) for an import, ("a.b", "") for a module."""

    def __init__(self, name: str, source: bytes, is_package: bool) -> None:
        self.name, self.stars = name, list[str]()
        self.names: dict[str, list[ast.stmt | tuple[str, str]]] = {}
        package = name.split(".") if is_package else name.split(".")[:-1]
        for stmt in statements(ast.parse(source).body):
            if isinstance(stmt, ast.ImportFrom):
                above = package[: len(package) - stmt.level + 1] if stmt.level else []
                origin = ".".join([*above, *filter(None, [stmt.module])])
                self.stars += [origin for a in stmt.names if a.name == "*"]
                bound = [(a.asname or a.name, (origin, a.name)) for a in stmt.names]
            elif isinstance(stmt, ast.Import):
                tops = [(a, a.name.split(".")[0]) for a in stmt.names]
                bound = [(a.asname or top, (a.name if a.asname else top, "")) for a, top in tops]
            else:
                bound = [(n, stmt) for n in assigned(stmt)]
            for key, value in bound:
                self.names.setdefault(key, []).append(value)


class Wheel:
    """Name look-up in the sources of one wheel. A look-up returns all definitions, none when missing."""

    def __init__(self, path: Path) -> None:
        try:
            self.zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as exc:
            raise CompatError(f"{path.name} is not a readable wheel: {exc}") from exc
        names = (n for n in self.zip.namelist() if n.endswith(".py"))
        self.files = {re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", n): n for n in names}
        self.folders = {str(p) for n in self.files for p in PurePosixPath(n).parents}
        self.modules: dict[str, Module | None] = {}

    def module(self, name: str) -> list[Found]:
        """The module of that dotted name; a folder without `__init__.py` is an empty package."""
        if name not in self.modules:
            base = name.replace(".", "/")
            path = next((p for p in (f"{base}/__init__.py", f"{base}.py") if p in self.files), "")
            try:
                source = self.zip.read(self.files[path]) if path else b""
                is_package = path.endswith("/__init__.py") or (not path and base in self.folders)
                self.modules[name] = Module(name, source, is_package) if path or is_package else None
            except (SyntaxError, ValueError, zipfile.BadZipFile) as exc:
                raise CompatError(f"{path} cannot be parsed: {exc}") from exc
        return [Found("module", self.modules[name])] if self.modules[name] else []

    def name_in(self, module: Module, name: str, seen: Seen = frozenset()) -> list[Found]:
        """Definitions of a module-level name, followed through imports."""
        if (module.name, name) in seen or len(seen) > MAX_DEPTH:
            return []
        seen |= {(module.name, name)}
        found = [f for bound in module.names.get(name, []) for f in self.follow(module, bound, seen)]
        if not found:
            origins = [m.scope for star in module.stars for m in self.module(star)]
            found = [f for origin in origins for f in self.name_in(origin, name, seen)]
        return found or self.module(f"{module.name}.{name}")

    def follow(self, module: Module, bound: Any, seen: Seen) -> list[Found]:
        """The definitions behind one binding."""
        if isinstance(bound, tuple):
            origin, name = bound
            if origin.split(".")[0] != PACKAGE:
                return [Found("external")]
            found = self.module(origin)
            return [f for m in found for f in self.name_in(m.scope, name, seen)] if name else found
        alias = getattr(bound, "value", None)
        aliased = self.name_in(module, alias.id, seen) if isinstance(alias, ast.Name) else []
        return aliased or [definition(module, bound)]

    def lineage(self, cls: Found) -> list[Found]:
        """The class, then its bases that the wheel defines, nearest first."""
        queue, classes = [cls], list[Found]()
        while queue:
            cls = queue.pop(0)
            if cls.kind != "class" or cls in classes:
                continue
            classes.append(cls)
            for base in cls.node.bases:
                name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
                queue += self.walk([Found("module", cls.scope)], name.split("."))[0]
        return classes

    def member(self, owner: Found, name: str) -> list[Found]:
        """Definitions of an attribute of a module or a class."""
        if owner.kind == "module":
            return self.name_in(owner.scope, name)
        classes = self.lineage(owner)
        for cls in classes:
            if nodes := [s for s in statements(cls.node.body) if name in assigned(s)]:
                return [definition(cls.scope, n) for n in nodes]
        return [Found("instance") for c in classes if name in instance_attributes(c.node)]

    def walk(self, found: list[Found], parts: list[str]) -> tuple[list[Found], int]:
        """The definitions at the end of a chain of attributes, and how many of its parts exist."""
        for n, part in enumerate(parts):
            found = [m for f in found for m in self.member(f, part)]
            if not found:
                return [], n
        return found, len(parts)

    def resolve(self, dotted: str) -> tuple[list[Found], str]:
        """(definitions, "") of a dotted name, or ([], reason)."""
        parts = dotted.split(".")
        cut = next((n for n in range(len(parts), 0, -1) if self.module(".".join(parts[:n]))), 0)
        found, good = self.walk(self.module(".".join(parts[:cut])), parts[cut:])
        path = list(takewhile(str.islower, parts[:-1]))
        if found:
            return found, ""
        if good == 0 and len(path) > cut:
            return [], f"no module {'.'.join(path)}"
        return [], f"{'.'.join(parts[: cut + good])} has no {parts[cut + good]}"

    def parameters(self, found: Found) -> set[str]:
        """Parameters of a function or a class: for a class those of `__init__`, else its annotated fields."""
        if found.kind == "function":
            a = found.node.args
            return {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if x}
        if inits := self.member(found, "__init__") if found.kind == "class" else []:
            return set().union(*map(self.parameters, inits))
        fields = (s for c in self.lineage(found) for s in c.node.body if isinstance(s, ast.AnnAssign))
        return {n for s in fields for n in assigned(s)}

    def problem(self, name: str, params: Iterable[str] = (), hooked: bool = False) -> str:
        """Why a name does not fit the wheel, empty when it does."""
        found, reason = self.resolve(name)
        if found and hooked and all(f.kind == "instance" for f in found):
            return "only an instance attribute"
        lacking = min((set(params) - self.parameters(f) for f in found), key=len) if found and params else ()
        return reason or (f"no parameter {', '.join(sorted(lacking))}" if lacking else "")


def definition(scope: Module | None, node: ast.stmt) -> Found:
    """The look-up result for a statement that binds a name."""
    kind = "function" if isinstance(node, Function) else "value"
    return Found("class" if isinstance(node, ast.ClassDef) else kind, scope, node)


def check_line(wheel: Wheel, table: Table, line: str) -> Row:
    """Check one wheel against the hooks and symbols of one adapter line."""
    hooks = [h for h in table.HOOKS if line in h.lines]
    names = table.USED_SYMBOLS.get(line, ())
    bad = [("hook", h.target, wheel.problem(h.target, getattr(h, "params", ()) or (), True)) for h in hooks]
    bad += [("symbol", name, wheel.problem(name)) for name in names]
    row = Row("", "ok", line=line)
    row.missing = [{"what": what, "name": name, "reason": reason} for what, name, reason in bad if reason]
    row.status = "missing" if row.missing else "ok"
    lost = sum(m["what"] == "hook" for m in row.missing)
    row.hooks = (len(hooks) - lost, len(hooks))
    row.symbols = (len(names) - len(row.missing) + lost, len(names))
    return row


def check_wheel(path: Path, version: str, table: Table) -> Row:
    """Check one wheel against its adapter line; without `line_of`, against the line that fits best."""
    wheel = Wheel(path)
    lines = sorted({ln for h in table.HOOKS for ln in h.lines} | set(table.USED_SYMBOLS), key=version_key)
    rows = {line: check_line(wheel, table, line) for line in lines}
    unsupported = Row("", "unsupported", "no adapter line for this version")
    if line_of := getattr(table, "line_of", None):
        row = rows.get(line_of(version), unsupported)
    else:
        row = min(reversed(rows.values()), key=lambda r: len(r.missing), default=unsupported)
        row.note = f"best fit of {', '.join(lines)}"
    row.version, row.wheel = version, path.name
    row.fits = [line for line, r in rows.items() if r.status == "ok"]
    return row


def version_key(version: str) -> tuple[tuple[int, ...], int, str]:
    """Sort key: release numbers, then -1 pre-release, 0 release, 1 post-release, then the rest."""
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
    """Standard output of pip, empty when no distribution matches."""
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
    """The versions that the package index lists."""
    out = pip("index", "versions", PACKAGE, "--ignore-requires-python", *["--pre"] * everything)
    match = re.search(r"^Available versions: (.+)$", out, re.MULTILINE)
    if not match:
        raise CompatError(f"the package index lists no {PACKAGE}")
    return [v.strip() for v in match[1].split(",")]


def cached_wheels(cache: Path) -> dict[str, Path]:
    """Wheels for CPython 3.11 in the cache folder, by version."""
    paths = sorted(cache.glob(f"{PACKAGE}-*.whl"))
    return {p.name.split("-")[1]: p for p in paths if WHEEL_TAG.search(p.name)}


def check_release(version: str, table: Table, cache: Path, offline: bool) -> Row:
    """One release's row, its wheel downloaded when the cache lacks it."""
    try:
        if not offline and version not in cached_wheels(cache):
            tags = ["--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp"]
            tags += [a for p in PLATFORMS for a in ("--platform", p)]
            pip("download", "-q", "--no-deps", *tags, "-d", str(cache), f"{PACKAGE}=={version}")
        if path := cached_wheels(cache).get(version):
            return check_wheel(path, version, table)
        where = "the cache" if offline else "the package index"
        return Row(version, "no wheel", f"no CPython 3.11 wheel in {where}")
    except CompatError as exc:
        return Row(version, "error", str(exc))


def load_table() -> Table:
    """The project's hook table."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    try:
        return importlib.import_module(TABLE_MODULE)  # type: ignore[return-value]
    except ImportError as exc:
        raise CompatError(f"cannot import the hook table {TABLE_MODULE}: {exc}") from exc


def print_report(rows: Sequence[Row], console: Console) -> None:
    """The table, then the notes and the full list of what is missing."""
    view = RichTable(title=f"{PACKAGE} releases")
    for name in ("version", "adapter line", "hooks", "symbols"):
        view.add_column(name, no_wrap=True, min_width=len(name))
    view.add_column("missing", overflow="ellipsis", no_wrap=True)
    for row in rows:
        counts = ["{}/{}".format(*c) if row.line else "-" for c in (row.hooks, row.symbols)]
        names = ", ".join(m["name"].removeprefix(f"{PACKAGE}.") for m in row.missing)
        style = {"ok": "green", "missing": "red"}.get(row.status, "yellow")
        text = names if row.line else f"{row.status}: {row.note}"
        view.add_row(row.version, row.line or "-", *counts, text, style=style)
    console.print(view)
    for row in rows:
        fits = f"; lines that fit: {', '.join(row.fits) or 'none'}" if row.wheel else ""
        notes = [row.note + fits] if row.note else []
        for text in notes + [f"{m['what']} {m['name']}: {m['reason']}" for m in row.missing]:
            console.print(f"{row.version}: {text}", soft_wrap=True, highlight=False, markup=False)


def exit_status(rows: Sequence[Row]) -> int:
    """1 when a row misses something, else 2 when a release or all of them went unchecked, else 0."""
    statuses = {r.status for r in rows}
    if "missing" in statuses:
        return 1
    return 2 if "error" in statuses or statuses <= {"no wheel"} else 0


def main(argv: Sequence[str] | None = None, table: Table | None = None) -> int:
    """Check the releases that the arguments name and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--cache", type=Path, default=Path(".compat-wheels"), help="folder of wheels")
    parser.add_argument("--only", nargs="+", metavar="VERSION", help="check these versions alone")
    parser.add_argument("--all", action="store_true", help="pre- and post-releases too")
    parser.add_argument("--offline", action="store_true", help="use only wheels in the cache")
    args = parser.parse_args(argv)
    rows, error = list[Row](), ""
    try:
        table = table or load_table()
        args.cache.mkdir(parents=True, exist_ok=True)
        if args.only:
            versions = sorted(set(args.only), key=version_key)
        else:
            known = cached_wheels(args.cache) if args.offline else index_versions(args.all)
            versions = select(known, args.all)
        if not versions:
            raise CompatError(f"no {PACKAGE} release from {FIRST} on to check")
        rows = [check_release(v, table, args.cache, args.offline) for v in versions]
        print_report(rows, Console())
    except CompatError as exc:
        error = str(exc)
        print(f"compat: {error}", file=sys.stderr)
    status = 2 if error else exit_status(rows)
    print(json.dumps({"exit": status, "error": error, "releases": [asdict(r) for r in rows]}), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
