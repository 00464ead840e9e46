"""Imports run one way: no circle of modules, none of rooms, those inside functions included."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("sglang_dsv4", "triton_ops")
    for path in (ROOT / package).rglob("*.py")
}


def imported(path: Path) -> Iterator[str]:
    """Yields the modules of this project that a file imports, but for those that types alone need."""
    tree = ast.parse(path.read_text())
    of_types = {
        id(inside)
        for node in ast.walk(tree) if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inside in ast.walk(node)
    }  # fmt: skip
    for node in ast.walk(tree):
        if id(node) in of_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{name.name}" for name in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def edges() -> list[tuple[str, str]]:
    return [(name, other) for name, path in MODULES.items() for other in imported(path) if other in MODULES]


def test_a_retract_knows_no_store() -> None:
    """It would wait for it. What a store has are sessions and answers; a copy is in host memory."""
    known = [edge for edge in edges() if edge[0].startswith("sglang_dsv4.engine.retract.")]
    assert known and not [edge for edge in known if edge[1].startswith("sglang_dsv4.store")]


@pytest.mark.parametrize("parts", [2, 9])
def test_no_circle(parts: int) -> None:
    """parts: of a module's name; with two of them, of rooms."""
    graph: dict[str, set[str]] = {}
    for importer, other in edges():
        above, below = (".".join(name.split(".")[:parts]) for name in (importer, other))
        if above != below:
            graph.setdefault(above, set()).add(below)
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    assert order.index("sglang_dsv4.errors") < order.index("sglang_dsv4.cli" if parts == 2 else "sglang_dsv4.cli.main")
