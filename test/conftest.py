"""Boots the engine once, with this package's hooks installed the way a server installs them."""

import os
from pathlib import Path
from unittest import mock

# Before numpy and torch are imported, here and in every process that a test starts: tests run side by side, and small
# copies gain nothing from more threads.
for library in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{library}_NUM_THREADS"] = "1"

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported anywhere

torch.set_num_threads(1)

from sglang_dsv4.engine import standalone
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.engine.standalone import boot, install_hooks

TESTS = Path(__file__).parent
NO_CUDA = pytest.mark.skip(reason="no CUDA device: compiled kernels and real streams cannot run")


def pytest_configure(config):
    """Not in the process that only hands out the tests: the engine takes seconds to import."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        boot()
        with mock.patch.dict(os.environ, DSV4_PREP="graph"):  # every hook, whatever auto means on this release
            install_hooks()


def pytest_report_header():
    """Names the engine under test."""
    return f"sglang {engine_version()}, torch {torch.__version__}, cuda {torch.cuda.is_available()}"


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """A test is marked by the folder that it lies in, cpu or gpu; where there is no GPU those of gpu say so."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        item.add_marker(folder)
        if folder == "gpu" and os.environ.get("TRITON_INTERPRET") == "1":
            item.add_marker(NO_CUDA)


@pytest.fixture(autouse=True)
def _engine_state():
    """Each test leaves default server arguments to the next; pools read them when they are built. Booting takes 5 ms,
    more than most tests: only what has booted otherwise, a pool for instance, is followed by it."""
    before = standalone._kept.get("override")
    yield
    if standalone._kept.get("override") is not before:
        boot()


@pytest.fixture
def device():
    """Where pools live: the GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
