#!/usr/bin/env python3
"""Runs the kernels' tests under compute-sanitizer, which sees reads and writes outside of tensors.

    python3 tools/sanitize_kernels.py [--tool memcheck] [--tool racecheck] [-- arguments of pytest]

Runs the smaller tests of test/gpu/test_kernels_gpu.py under each tool. Exit status 9 where a tool finds something, 3
where there is no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = "test/gpu/test_kernels_gpu.py"
SMALL = "compiled_variant or are_reset or locate or prep_rows or (hostile and 2048)"  # the others take minutes each
FOUND, ABSENT = 9, 3


def command(tool: str, more: Sequence[str]) -> list[str]:
    """Returns the command line of one tool; pytest keeps its tests in one process, which the tool watches."""
    words = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, "-m", "pytest"]
    return [*words, "-q", "-p", "no:cacheprovider", "-m", "gpu", TESTS, *(more or ["-k", SMALL])]


def main(argv: Sequence[str]) -> int:
    """Returns the first exit status that is not 0."""
    own, more = list(argv), []
    if "--" in own:
        own, more = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", help="of compute-sanitizer (memcheck, racecheck)")
    tools = parser.parse_args(own).tool or ["memcheck", "racecheck"]
    if shutil.which("compute-sanitizer") is None:
        print("no compute-sanitizer here: it comes with the CUDA toolkit", file=sys.stderr)
        return ABSENT
    return next((status for tool in tools if (status := subprocess.call(command(tool, more), cwd=ROOT))), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
