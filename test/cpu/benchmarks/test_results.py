"""A result names the command that repeats it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sglang_dsv4.bench import results


def command_of(monkeypatch, tmp_path, *argv: str, **settings: str) -> str:
    """What a run started with ``argv`` writes down."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", list(argv))
    return json.loads(results.write("result", [], [], tmp_path).read_text())["command"]


ROOT = Path(results.__file__).parents[2]
SCRIPT = str(ROOT / "scripts" / "stress.py")


def test_a_script_with_its_settings_and_without_its_folders(monkeypatch, tmp_path):
    given = [SCRIPT, "--out", "/o", "--model-path", "/m/tiny", "--logs", "/l", "--", "--tp", "2"]
    for words in (given, [SCRIPT, "--out=/o", "--logs=/l", "--model-path=/m/tiny", "--", "--tp", "2"]):
        found = command_of(monkeypatch, tmp_path, *words, DSV4_VERIFY="1", DSV4_HOST_GB="0.5", OTHER="x")
        assert found == "DSV4_HOST_GB=0.5 DSV4_VERIFY=1 python3 scripts/stress.py --model-path tiny -- --tp 2"
    found = command_of(monkeypatch, tmp_path, SCRIPT, "--attach", "http://h:1", "--log", "/l/decode.log")
    assert found.endswith("python3 scripts/stress.py --attach http://h:1 --log decode.log")


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("/usr/bin/sglang-dsv4", "sglang-dsv4 stress --name x"),
        (str(ROOT / "sglang_dsv4" / "cli" / "main.py"), "sglang-dsv4 stress --name x"),
        (str(ROOT / "benchmarks" / "steps.py"), "python3 -m benchmarks.steps stress --name x"),
    ],
)
def test_a_command_and_a_module_of_the_checkout(monkeypatch, tmp_path, program, told):
    assert command_of(monkeypatch, tmp_path, program, "stress", "--name", "x") == told
