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
for variable in [name for name in os.environ if name.startswith("DSV4_")]:
    del os.environ[variable]  # tests say their settings themselves

from sglang_dsv4.engine.hooks import PARTS, install
from sglang_dsv4.engine.hooks.table import hooks_of
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.engine.state import server
from sglang_dsv4.testing import standalone
from sglang_dsv4.testing.standalone import boot, install_hooks

TESTS = Path(__file__).parent
NO_CUDA = pytest.mark.skip(reason="no CUDA device: compiled kernels and real streams cannot run")
NO_SERVER = pytest.mark.skip(reason="no CUDA device, or no SERVER_MODEL: no server can be started")


def pytest_configure(config):
    """Not in the process that only hands out the tests: the engine takes seconds to import."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        boot()
        # Every hook, whatever the settings say; pools are laid out as the setting says when they are built.
        with mock.patch.object(install, "hooks_for", lambda _, version: hooks_of(version, *PARTS)):
            install_hooks()
        from engine_parser import keep_parser

        keep_parser()


def pytest_report_header():
    return f"sglang {engine_version()}, torch {torch.__version__}, cuda {torch.cuda.is_available()}"


def pytest_generate_tests(metafunc):
    """A test of a module with the mark ``both_layouts`` runs with page-major pools, too."""
    if metafunc.definition.get_closest_marker("both_layouts"):
        metafunc.fixturenames.append("page_layout")
        metafunc.parametrize("page_layout", ("stock", "page-major"), indirect=True)


def _is_refused(item):
    """V4.1, an indexer with scales apart, or HiSparse in page-major pools; test_page_major_refusals shows it."""
    return _layout_of(item) == "page-major" and any(word in item.name for word in ("v41", "split", "HiSparse"))


def _layout_of(item):
    """DSV4_LAYOUT of the pools that a test builds."""
    return item.callspec.params.get("page_layout", "stock") if hasattr(item, "callspec") else "stock"


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """Marks each test by its folder, cpu, gpu or server; tests that cannot run here are skipped, and say so."""
    items[:] = [item for item in items if not _is_refused(item)]
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        item.add_marker(folder)
        if folder == "gpu" and os.environ.get("TRITON_INTERPRET") == "1":
            item.add_marker(NO_CUDA)
        if folder == "server" and not (torch.cuda.is_available() and os.environ.get("SERVER_MODEL")):
            item.add_marker(NO_SERVER)


@pytest.fixture(autouse=True)
def _page_layout(request, monkeypatch):
    """Before anything builds a pool."""
    if _layout_of(request.node) != "stock":
        monkeypatch.setenv("DSV4_LAYOUT", _layout_of(request.node))


@pytest.fixture(autouse=True)
def _engine_state():
    """Each test leaves default server arguments to the next; pools read them when they are built. Booting takes 5 ms,
    more than most tests: only what has booted otherwise, a pool for instance, is followed by it. Weights are those of
    the start again, else no later test has a store."""
    before = standalone._kept.get("override")
    yield
    server.weight_version = server.clean_version = 0
    if standalone._kept.get("override") is not before:
        boot()


@pytest.fixture
def device():
    """Where pools live: the GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
