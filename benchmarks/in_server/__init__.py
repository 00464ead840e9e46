"""Puts a benchmark's ``install(notes)`` into a server's scheduler; ``notes`` is a file of one JSON line an event.

``SGLANG_EXTERNAL_MODEL_PACKAGE=benchmarks.in_server`` with the checkout on PYTHONPATH. Never for real requests.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_dsv4.livetest import servers

MODULE, NOTES = "BENCHMARK_MODULE", "BENCHMARK_NOTES"
CHECKOUT = Path(__file__).resolve().parents[2]


def environment(module: str, notes: Path) -> dict[str, str]:
    """Returns the environment of a server that runs ``module.install(notes)``; ``notes`` begins empty."""
    notes.parent.mkdir(parents=True, exist_ok=True)
    notes.write_text("")
    package = servers.model_package("benchmarks.in_server", CHECKOUT)
    return {**package, MODULE: module, NOTES: str(notes.resolve())}


def note(notes: Path, **facts: Any) -> None:
    with notes.open("a") as out:
        out.write(json.dumps(facts) + "\n")


def read(notes: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def around(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Puts ``hook(original, ...)`` in the place of ``owner.name``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(owner, name, called)
