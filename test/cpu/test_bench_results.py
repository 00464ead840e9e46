"""A result names the command that repeats it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys

import pytest

from sglang_dsv4.bench import results, transfer
from sglang_dsv4.cli import bench


def command_of(monkeypatch, tmp_path, *argv: str, **settings: str) -> str:
    """What a run started with ``argv`` writes down."""
    for name in [name for name in os.environ if name.startswith("DSV4_")]:
        monkeypatch.delenv(name)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", list(argv))
    return json.loads(results.write("result", [], [], tmp_path).read_text())["command"]


def test_a_script_with_its_settings_and_without_its_folders(monkeypatch, tmp_path):
    given = ["/a/scripts/stress.py", "--out", "/o", "--model-path", "/m/tiny", "--logs", "/l", "--", "--tp", "2"]
    for words in (given, ["/a/scripts/stress.py", "--out=/o", "--logs=/l", "--model-path=/m/tiny", "--", "--tp", "2"]):
        found = command_of(monkeypatch, tmp_path, *words, DSV4_VERIFY="1", DSV4_HOST_GB="0.5", OTHER="x")
        assert found == "DSV4_HOST_GB=0.5 DSV4_VERIFY=1 python3 scripts/stress.py --model-path tiny -- --tp 2"
    found = command_of(
        monkeypatch, tmp_path, "/a/scripts/stress.py", "--attach", "http://h:1", "--log", "/l/decode.log"
    )
    assert found.endswith("python3 scripts/stress.py --attach http://h:1 --log decode.log")
    twice = ["--model-path", "/m/tiny", "--out", "/a", "--model-path", "/n/flash", "--out", "/b"]
    found = command_of(monkeypatch, tmp_path, "/a/scripts/stress.py", *twice)
    assert found == "python3 scripts/stress.py --model-path tiny --model-path flash"


@pytest.mark.parametrize("given", [[], ["--count", "3"], ["--device", "cpu"], ["--count", "3", "--device", "cpu"]])
def test_a_benchmark_of_the_package_as_its_command_takes_it(monkeypatch, tmp_path, given):
    words = shlex.split(command_of(monkeypatch, tmp_path, transfer.__file__, "--out", "/o", *given))
    assert words[:3] == ["sglang-dsv4", "bench", "transfer"]
    own, rest = words[2:], []
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert parser.parse_args(own).device == ("cpu" if "cpu" in given else "cuda")
    assert rest == [word for word in given if word not in ("--device", "cpu")]
