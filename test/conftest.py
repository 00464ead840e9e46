"""Boots the engine once, with this package's hooks installed the way a server installs them."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported anywhere

torch.set_num_threads(1)  # tests run side by side; small copies gain nothing from more

from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.engine.standalone import boot, install_hooks


def pytest_configure(config):
    """Not in the process that only hands out the tests: the engine takes seconds to import."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        boot()
        install_hooks()


def pytest_report_header():
    """Names the engine under test."""
    return f"sglang {engine_version()}, torch {torch.__version__}, cuda {torch.cuda.is_available()}"


@pytest.fixture(autouse=True)
def _engine_state():
    """Each test leaves default server arguments to the next; pools read them when they are built."""
    yield
    boot()


@pytest.fixture
def device():
    """Where pools live: the GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
