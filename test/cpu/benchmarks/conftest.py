"""Puts a benchmark's part into this process, and takes it out again afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import in_server


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Callable[[], list[dict[str, Any]]]]:
    """Runs ``module.install``; what it returns reads the notes."""

    def install(module: ModuleType) -> Callable[[], list[dict[str, Any]]]:
        notes = tmp_path / "notes.jsonl"

        def around(owner: Any, name: str, hook: Callable[..., Any]) -> None:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # as it was, afterwards
            in_server.around(owner, name, hook)

        monkeypatch.setattr(module, "around", around)
        module.install(notes)
        return lambda: in_server.read(notes)

    return install
