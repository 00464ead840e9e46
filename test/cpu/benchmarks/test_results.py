"""A result names the package that ran, and the command that repeats it: with its settings, without where files lie."""

import json
import sys
from pathlib import Path

import pytest

from sglang_dsv4 import __version__
from sglang_dsv4.bench import results

ROOT = Path(results.__file__).parents[2]
SCRIPT, TOLD = f"{ROOT}/scripts/stress.py", "DSV4_HOST_GB=0.5 DSV4_VERIFY=1 python3 scripts/stress.py"


@pytest.mark.parametrize(("words", "told"), [
    (f"{SCRIPT} --out /o --model-path /m/tiny --logs /l -- --tp 2", f"{TOLD} --model-path tiny -- --tp 2"),
    (f"{SCRIPT} --out=/o --logs=/l --model-path=/m/tiny -- --tp 2", f"{TOLD} --model-path tiny -- --tp 2"),
    (f"{SCRIPT} --attach http://h:1 --log /l/decode.log", f"{TOLD} --attach http://h:1 --log decode.log"),
    ("/b/sglang-dsv4 stress --model-path tools/v4", "sglang-dsv4 stress --model-path tools/v4"),
    ("/usr/bin/sglang-dsv4 stress --name x", "sglang-dsv4 stress --name x"),
    (f"{ROOT}/sglang_dsv4/cli/main.py stress --name x", "sglang-dsv4 stress --name x"),
    (f"{ROOT}/benchmarks/steps.py --name x", "python3 -m benchmarks.steps --name x"),
])  # fmt: skip
def test_a_command_is_written_as_it_can_be_repeated(monkeypatch, tmp_path, words, told):
    environ = {"DSV4_VERIFY": "1", "DSV4_HOST_GB": "0.5"} if told.startswith("DSV4_") else {}
    for name, value in {**environ, "OTHER": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", words.split())
    assert json.loads(results.write("result", [], [], tmp_path).read_text())["command"] == told


def test_a_result_names_the_release_of_the_code_that_ran(monkeypatch):
    """Another release may be installed beside a checkout."""
    monkeypatch.setattr(results, "version", lambda _: "0.0.9")
    assert results.versions()["sglang-dsv4"] == __version__
