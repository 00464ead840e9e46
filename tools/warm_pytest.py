"""Runs pytest in forks of a process that has imported the rest, because imports are most of a short run.

``Warm`` is the side of the caller; started as a program the file is that process: a JSON object a line on its
standard input, an exit status a line on its standard output. What is imported beforehand is neither the engine nor this
package, nor what they make up: a run still boots both, in the order in which a plain pytest does.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-m", "cpu and not gpu", "--hypothesis-seed=0")
COLD = {"sglang", "sglang_dsv4", "triton_ops", "torchvision", "__main__"}
POLL_SECONDS = 0.05


class Warm:
    """Runs a warm process of one interpreter over one folder. Stop it with ``close``."""

    def __init__(self, python: Path, folder: Path) -> None:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DSV4_")},
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",  # a mutant may have the size and the second of the file before it
            "OMP_NUM_THREADS": "1",
        }
        self._log = folder.parent / f"{folder.name}.log"
        self._process = subprocess.Popen(
            [python, Path(__file__).resolve()], cwd=folder, env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def run(self, tests: list[str], seconds: float) -> tuple[int | None, str]:
        """Returns exit status (None: out of time) and output of pytest over ``tests``."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps({"tests": tests, "seconds": seconds, "log": str(self._log)}) + "\n")
        stdin.flush()
        answer = stdout.readline()
        if not answer:
            raise RuntimeError(f"the interpreter ended by itself, exit status {self._process.wait()}")
        return json.loads(answer), self._log.read_text(errors="replace")

    def close(self) -> None:
        self._process.communicate()


def _third_party() -> list[str]:
    """Returns a run's imports before its first test, without the package under test; a child that boots once finds
    them.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _to("/dev/null")
        from sglang_dsv4.testing.standalone import boot, install_hooks  # noqa: PLC0415

        boot()
        install_hooks()
        names = [name for name in sys.modules if name.split(".")[0] not in COLD]
        with os.fdopen(writing, "w") as pipe:
            json.dump(names, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found: list[str] = json.load(pipe)
    os.waitpid(child, 0)
    return found


def _to(path: str) -> None:
    """Sends standard output and error to ``path``."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _child(job: dict[str, Any]) -> int:
    """Makes one run in the forked process; returns its exit status."""
    os.setsid()  # tests start processes of their own, which end with it
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _to(job["log"])
    import pytest  # noqa: PLC0415

    return int(pytest.main([*PYTEST, *job["tests"]]))


def _serve(job: dict[str, Any]) -> int | None:
    """Returns the exit status of one run, negative for a signal; None: it was ended when its time was over."""
    child = os.fork()
    if not child:
        status = 1
        try:
            status = _child(job)
        finally:
            sys.stdout.flush()
            os._exit(status)
    end = time.monotonic() + job["seconds"]
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_SECONDS)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    """Imports, then makes one run for each line of standard input."""
    sys.path[0] = str(Path.cwd())
    answers = os.fdopen(os.dup(1), "w")
    _to(os.devnull)  # whatever an import prints is no answer
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as the tests' conftest does it, before triton is imported
    for name in ("pytest", "hypothesis", *_third_party()):
        try:
            importlib.import_module(name)
        except (ImportError, RuntimeError):
            continue  # made up by another module, or wants what the engine's boot defines: left to each run
    for line in sys.stdin:
        answers.write(json.dumps(_serve(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
