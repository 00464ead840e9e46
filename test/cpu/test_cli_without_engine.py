"""The commands where the engine, torch, or another package that they use is not installed."""

import json
import os
import subprocess
import sys

import pytest
from fresh_process import ROOT, run_fresh

WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in GONE else self.finder.find_spec(name, path, target)

    def find_distributions(self, context):
        return [] if context.name in GONE else self.finder.find_distributions(context)

sys.meta_path[:] = [Without(finder) if hasattr(finder, "find_distributions") else finder for finder in sys.meta_path]
for name in [name for name in sys.modules if name.partition(".")[0] in GONE]:
    del sys.modules[name]
"""
COMMAND = """
import runpy
runpy.run_module("sglang_dsv4.cli.main", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(params=["torch triton sglang", "sglang"], ids=["neither", "torch alone"])
def elsewhere(request, tmp_path):
    """Runs a command in a process where the engine, or torch too, is not installed, and no package for tables."""
    without = f"GONE = {[*request.param.split(), 'rich']}\n{WITHOUT}"
    (tmp_path / "sitecustomize.py").write_text(without)  # of the processes that a command starts

    def run(*argv):
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        return run_fresh(["-c", without + COMMAND, *argv], environ, seconds=120)

    run.gone = request.param.split()
    return run


@pytest.mark.parametrize("argv", [
    ["demo"], ["serve", "--model-path", "M"], ["drill", "memory"], ["bench"],
    ["bench", "transfer", "--device", "cpu"], ["stress", "--model-path", "M"],
], ids=" ".join)  # fmt: skip
def test_without_the_engine_a_command_ends_in_a_line(elsewhere, argv, tmp_path):
    done = elsewhere(*argv, *(["--out", str(tmp_path / "out")] if argv[0] in ("bench", "stress") else []))
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.strip(), done.stdout


def test_without_the_engine_doctor_says_what_is_missing_and_how_to_get_it(elsewhere):
    done = elsewhere("doctor", "--tp", "8")
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    for text in (*(f"{name} is not installed for" for name in elsewhere.gone), "install sglang", "None starts here"):
        assert text in done.stdout


def test_without_the_engine_a_cache_can_be_planned(elsewhere):
    done = elsewhere("plan", "flash", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"][-1]["moved_bytes"] > 1_000_000_000


@pytest.mark.parametrize(("gone", "command", "said"), [
    ("psutil", [sys.executable, "scripts/run_gsm8k.py", "--url", "http://u:1"], "psutil is not installed for"),
    ("psutil", [sys.executable, "scripts/stress_retract.py", "--help"], "psutil is not installed for"),
    ("torch", ["make", "test-gpu", f"PYTHON={sys.executable}"], "torch is not installed for"),
])  # fmt: skip
def test_a_script_that_lacks_a_package_ends_in_a_line(tmp_path, gone, command, said):
    (tmp_path / "sitecustomize.py").write_text(f"GONE = [{gone!r}]\n{WITHOUT}")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environ, text=True, capture_output=True, timeout=120, check=False)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert said in done.stderr.splitlines()[0]
