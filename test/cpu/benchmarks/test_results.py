"""A result names the command that repeats it; the resume benchmark counts the right token."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest

from benchmarks.resume import run as bench
from sglang_dsv4.bench import results


def command_of(monkeypatch, tmp_path, *argv: str, **settings: str) -> str:
    """What a run started with ``argv`` writes down."""
    for name in [name for name in os.environ if name.startswith("DSV4_")]:
        monkeypatch.delenv(name)
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
    twice = ["--model-path", "/m/tiny", "--out", "/a", "--model-path", "/n/flash", "--out", "/b"]
    found = command_of(monkeypatch, tmp_path, SCRIPT, *twice)
    assert found == "python3 scripts/stress.py --model-path tiny --model-path flash"


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("/usr/bin/sglang-dsv4", "sglang-dsv4 stress --name x"),
        (str(ROOT / "sglang_dsv4" / "cli" / "main.py"), "sglang-dsv4 stress --name x"),
        (str(ROOT / "benchmarks" / "steps" / "run.py"), "python3 -m benchmarks.steps.run stress --name x"),
    ],
)
def test_a_command_and_a_module_of_the_checkout(monkeypatch, tmp_path, program, told):
    assert command_of(monkeypatch, tmp_path, program, "stress", "--name", "x") == told


def test_a_result_has_one_row_a_line_and_is_read_back(tmp_path):
    rows = [{"run": "a", "log": {"ranks": 2}, "exit": None}, {"run": "b", "errors": ["x"]}]
    path = results.write("result", rows, [results.bound("lost", "<= 0", 0)], tmp_path)
    read = json.loads(path.read_text())
    assert read["rows"] == rows and read["bounds"][0]["ok"] and read["versions"]["torch"]
    assert sum(line.startswith("  {") for line in path.read_text().splitlines()) == 3
    assert json.loads(results.text_of({"rows": [], "x": {}})) == {"rows": [], "x": {}}


# A prompt of 100 tokens; the copy of 104 was made with 5 tokens generated, the sixth came 30 ms after the admission.
RESUME = {"tokens": 104, "admitted": 1000.0, "load_ms": 2.0, "bytes": 10}
ARRIVED = {1: 999.0, 5: 1000.005, 6: 1000.030, 7: 1000.040}


def test_a_token_from_before_the_retract_that_arrives_late_does_not_count() -> None:
    assert bench.after_admission(RESUME, 100, ARRIVED) == pytest.approx(30.0, abs=0.01)


def test_a_resume_that_no_token_followed_is_not_taken_for_a_fast_one() -> None:
    assert math.isnan(bench.after_admission(RESUME, 100, {5: 1000.005}))


def test_ratios_are_of_the_median_recompute_and_judged_at_64k() -> None:
    row = {"tokens": 65536, "resumes": 4, "load_ms": 10.0, "to_token_ms": 50.0}
    (joined,) = bench.join([row], {65536: [2900.0, 9000.0, 3100.0]})
    assert joined["recompute_ms"] == 3100.0
    assert joined["load_faster"] == pytest.approx(310.0)
    assert joined["to_token_faster"] == pytest.approx(62.0)
    assert all(entry["ok"] for entry in bench.judge([joined]))
    slow = bench.judge([joined | {"load_faster": 299.0, "to_token_faster": 49.0, "resumes": 2}])
    assert not any(entry["ok"] for entry in slow)
    assert len(bench.judge([joined | {"tokens": 4096}])) == 1


def test_the_longest_request_and_the_one_that_stays_fit_the_servers() -> None:
    arguments = bench.parse(["--config", "c.json", "--experts", "4", "--tokens", "4096", "65536"])
    given = bench.room(arguments)
    context = int(given[given.index("--context-length") + 1])
    assert context >= 65536 + arguments.new_tokens
    assert int(given[given.index("--max-total-tokens") + 1]) >= context + (1 << 14) + bench.KEEPER
