"""Every kernel compiles for every GPU that this Triton knows: the interpreter takes more than the compiler. A known
variant starts at once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock, call

import torch

from triton_ops._launch import Fixed, Launcher

ROOT = Path(__file__).parents[3]
KERNELS = {"copy_pages": 4, "copy_rows": 4, "locate": 2, "gather_rows": 10, "scatter_rows": 10, "prep_rows": 4}
BROKEN = """
import sys
from tools import compile_targets as tool
noted = tool.launches()
noted[0].arguments["TILE"] = 1000
tool.launches = lambda: noted[:1]
sys.exit(tool.main(sys.argv[1:]))
"""


def compiled(tmp_path: Path, *words: str) -> tuple[int, str, list[dict]]:
    """Returns the exit status of the tool, what it said, and its rows."""
    done = subprocess.run(
        [sys.executable, *words, "--out", str(tmp_path)], capture_output=True, text=True, timeout=300, check=False,
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (tmp_path / "compile-targets.json").is_file(), done.stderr[-2000:]
    return done.returncode, done.stdout, json.loads((tmp_path / "compile-targets.json").read_text())["rows"]


def test_every_kernel_compiles_for_every_target_that_is_known(tmp_path):
    """All variants for the H200, one of each kernel for the others; `tools.compile_targets` has them all."""
    status, said, rows = compiled(tmp_path, "-m", "tools.compile_targets", "--quick")
    assert status == 0, said
    assert {row["kernel"]: row["variants"] for row in rows if row["target"] == "sm_90"} == KERNELS
    names = (ROOT / "triton_ops").glob("*.py")
    written = {line[5:].split("_kernel(")[0] for name in names for line in name.read_text().splitlines()
               if line.startswith("def _") and "_kernel(" in line}  # fmt: skip
    assert written == set(KERNELS)
    known = {row["target"] for row in rows if row["known"]}
    assert known >= {"sm_90", "sm_100", "sm_120", "gfx942", "gfx950"}  # of Triton 3.4, and later ones
    for row in rows:
        assert row["compiled"] == (row["variants"] if row["known"] else 0), row
        assert row["known"] or f"{row['target']}: not known to this toolchain ({row['said']}" in said


def test_a_kernel_that_does_not_compile_is_said(tmp_path):
    status, said, (row,) = compiled(tmp_path, "-c", BROKEN, "--only", "sm_90")
    assert (status, row["compiled"]) == (1, 0)
    assert "0 of 1 variants compile" in said and "power of 2" in said


GRID, OTHER = (3, 2, 1), (7, 1, 1)


def test_the_second_call_of_a_key_goes_to_the_compiled_kernel():
    first, second = variants = [MagicMock(packed_metadata=(8,)) for _ in range(2)]
    kernel, table = MagicMock(), Fixed(torch.zeros(1))
    kernel[GRID].side_effect = variants
    launcher = Launcher(kernel, num_warps=8)
    launcher("key", GRID, 1, 2.5)
    launcher("key", OTHER, 3, 4.5)
    launcher("other", GRID, 5, 6.5, fixed=table)
    assert kernel[GRID].call_args_list == [call(1, 2.5, num_warps=8), call(*table.tensors, 5, 6.5, num_warps=8)]
    assert first[OTHER].call_args_list == [call(3, 4.5)] and not second.mock_calls
    launcher("key", OTHER, 5, 6.5, fixed=table, stream=77)
    to_driver = call(*OTHER, 77, first.function, (8,), None, None, None, table.tensors[0].data_ptr(), 5, 6.5)
    assert first.run.call_args_list == [to_driver] and not second.mock_calls
