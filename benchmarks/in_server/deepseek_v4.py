"""Provides the package's own model, which installs the benchmark's part in the scheduler's process."""

import functools
import importlib
import os
from pathlib import Path

from benchmarks.in_server import MODULE, NOTES
from sglang_dsv4.livetest.patched_model import patched

_install = importlib.import_module(os.environ[MODULE]).install
EntryClass = [patched(functools.partial(_install, Path(os.environ[NOTES])))]
