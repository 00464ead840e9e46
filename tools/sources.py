"""Finds names in the source of a package that is not imported: a wheel, a checkout, or an installation.

A look-up follows imports, stars, aliases and base classes, and returns every definition that a name may have.
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

from sglang_dsv4.command_line import CommandError
from sglang_dsv4.engine.hooks import Parameter, Parameters

MAX_DEPTH = 16
Function = ast.FunctionDef | ast.AsyncFunctionDef
Seen = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Found:
    """Describes a definition: kind is module, class, function, value, instance or external; scope is its module."""

    kind: str
    scope: Module | None = None
    node: Any = None


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
    """Returns names that a definition or an assignment binds."""
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


class Sources:
    """Reads the sources of ``package`` in a wheel, or in a folder that has it. A look-up of what is missing finds
    nothing.
    """

    def __init__(self, path: Path, package: str) -> None:
        self.package = package
        if path.is_dir():
            found = {str(p.relative_to(path)): p for p in (path / package).rglob("*.py")}
            self.files: dict[str, Any] = {name: p.read_bytes for name, p in found.items()}
        else:
            self.files = dict(_members(path))
        self.folders = {str(p) for n in self.files for p in PurePosixPath(n).parents}
        self.modules: dict[str, Module | None] = {}

    def module(self, name: str) -> list[Found]:
        """Returns the module of that dotted name; a folder without `__init__.py` is an empty package."""
        if name not in self.modules:
            base = name.replace(".", "/")
            path = next((p for p in (f"{base}/__init__.py", f"{base}.py") if p in self.files), "")
            try:
                source = self.files[path]() if path else b""
                is_package = path.endswith("/__init__.py") or (not path and base in self.folders)
                self.modules[name] = Module(name, source, is_package) if path or is_package else None
            except (SyntaxError, ValueError, OSError, zipfile.BadZipFile) as exc:
                raise CommandError(f"{path} cannot be parsed: {exc}") from exc
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
        """Returns the definitions behind one binding."""
        if isinstance(bound, tuple):
            origin, name = bound
            if origin.split(".")[0] != self.package:
                return [Found("external")]
            found = self.module(origin)
            return [f for m in found for f in self.name_in(m.scope, name, seen)] if name else found
        alias = getattr(bound, "value", None)
        aliased = self.name_in(module, alias.id, seen) if isinstance(alias, ast.Name) else []
        return aliased or [definition(module, bound)]

    def lineage(self, cls: Found) -> list[Found]:
        """Returns the class, then its bases that the wheel defines, nearest first."""
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
        """Returns the definitions at the end of a chain of attributes, and how many of its parts exist."""
        for n, part in enumerate(parts):
            found = [m for f in found for m in self.member(f, part)]
            if not found:
                return [], n
        return found, len(parts)

    def resolve(self, dotted: str) -> tuple[list[Found], str]:
        """Returns (definitions, "") of a dotted name, or ([], reason)."""
        parts = dotted.split(".")
        cut = next((n for n in range(len(parts), 0, -1) if self.module(".".join(parts[:n]))), 0)
        found, good = self.walk(self.module(".".join(parts[:cut])), parts[cut:])
        path = list(takewhile(str.islower, parts[:-1]))
        if found:
            return found, ""
        if good == 0 and len(path) > cut:
            return [], f"no module {'.'.join(path)}"
        return [], f"{'.'.join(parts[: cut + good])} has no {parts[cut + good]}"

    def methods_of(self, cls: Found) -> Iterator[tuple[str, Found]]:
        """Yields (name, definition) of each function in the class and in the bases that these sources define."""
        for owner in self.lineage(cls):
            for stmt in statements(owner.node.body):
                if isinstance(stmt, Function):
                    yield stmt.name, definition(owner.scope, stmt)


def _members(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (path inside the package index's layout, reader) of each Python file of a wheel."""
    try:
        wheel = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as exc:
        raise CommandError(f"{path.name} is no readable wheel: {exc}") from exc
    for name in wheel.namelist():
        if name.endswith(".py"):
            yield re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", name), lambda name=name: wheel.read(name)


def parameters(function: ast.AST, skip: int) -> Parameters:
    """Returns the parameters of a function whose first ``skip`` parameters do not count."""
    a = function.args  # type: ignore[attr-defined]
    placed = (*a.posonlyargs, *a.args)
    required = len(placed) - len(a.defaults)
    named = [Parameter(x.arg, True, i >= len(a.posonlyargs), i >= required) for i, x in enumerate(placed)]
    named += [
        Parameter(x.arg, by_position=False, optional=d is not None)
        for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]
    return Parameters(tuple(named[skip:]), a.vararg is not None, a.kwarg is not None)


def has_decorator(function: ast.AST, name: str) -> bool:
    """Returns whether a function is decorated with ``name``, called or not, from any module."""
    decorators = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]  # type: ignore[attr-defined]
    return any(getattr(d, "id", getattr(d, "attr", None)) == name for d in decorators)


def definition(scope: Module | None, node: ast.stmt) -> Found:
    """Returns the look-up result for a statement that binds a name."""
    kind = "function" if isinstance(node, Function) else "value"
    return Found("class" if isinstance(node, ast.ClassDef) else kind, scope, node)
