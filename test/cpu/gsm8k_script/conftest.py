"""Servers that end with their test, and the script to run on them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_server import Run, Server


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str, dict], Any]], Server]]:
    servers = []

    def start(reply: Callable[[str, dict], Any]) -> Server:
        servers.append(Server(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(tmp_path, capsys)


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> Callable[[], ModuleType]:
    """Imports the script and its modules once more; the ones from before are back after the test."""

    def load() -> ModuleType:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("gsm8k", "run_gsm8k")]:
            monkeypatch.delitem(sys.modules, name)
        return importlib.import_module("run_gsm8k")

    return load
