"""Runs programs in processes that have nothing of the engine or of this package, but the imports of all that both use.

Those are most of a short run: one process of each test worker makes them, and forks for each program, which loads the
engine and this package as its own interpreter would.
"""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What is tested, what takes threads or its environment when it is imported, and what runs tests.
COLD = ("sglang", "sglang_dsv4", "triton_ops", "torchvision", "prometheus_client", "mooncake", "nixl")
COLD += ("transformers", "safetensors", "compressed_tensors")  # which take torch, where it is to be missing
COLD += ("pytest", "_pytest", "xdist", "execnet", "hypothesis")
SERVES = """
import atexit, contextlib, gc, importlib, json, os, runpy, sys, threading, traceback
(imported, root), job = json.loads(sys.stdin.readline()), None
for name in imported:
    with contextlib.suppress(Exception):  # made up by the engine, or by a test
        importlib.import_module(name)
gc.freeze()  # else a child copies all of it at its first collection
for line in sys.stdin:
    if child := os.fork():
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    job = json.loads(line)
    break
if job is not None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(os.open(job["out"][number - 1], os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(job["environ"])
    os.chdir(job["folder"])
    sys.path[:] = [place for place in sys.path if place != root]
    sys.path[:1] = ["", *filter(None, job["environ"].get("PYTHONPATH", "").split(os.pathsep))]
    how, what, *argv = job["words"]
    sys.argv, status = [how, *argv], 1
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        print(end.code, file=sys.stderr) if isinstance(end.code, str) else None
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # waits for threads, as the end of an interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the end of an interpreter with so many modules takes seconds
"""


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    """Starts the process that forks; it ends with this one, whose end of its input is closed then."""
    there = [name for name, module in sys.modules.items() if "site-packages" in (getattr(module, "__file__", "") or "")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}  # select sees all that was not read
    process = subprocess.Popen([sys.executable, "-c", SERVES], env=environ, **pipes)
    names = [name for name in there if name.partition(".")[0] not in COLD]
    process.stdin.write(json.dumps((names, str(ROOT))).encode() + b"\n")
    return process


def run_fresh(
    words: Sequence[str], environ: Mapping[str, str] = os.environ, folder: Path = ROOT, seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """Runs ``python WORDS``, of which the first one is -m or -c, in ``folder``; returns what became of it."""
    server = _server()
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as errors:
        job = {"words": words, "environ": dict(environ), "folder": str(folder), "out": (out.name, errors.name)}
        server.stdin.write(json.dumps(job).encode() + b"\n")
        pid = int(server.stdout.readline())
        if not select.select([server.stdout], [], [], seconds)[0]:
            os.killpg(pid, 9)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess([*words], status, out.read(), errors.read())
