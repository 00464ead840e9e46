"""The kernel goes through the compiler down to machine code, on a machine without a GPU: the interpreter takes more."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton_ops.prep_rows import TILE_PAGES, _prep_rows_kernel as kernel

LONGS = {"slots", "out_locs", "lengths", "full_to_swa", "c4_out_locs", "c128_out_locs"}
names = kernel.arg_names
ints = names[names.index("pitch") : names.index("DEVICE_LENGTHS")]
for on_device, verify in ((0, 0), (1, 0), (0, 1), (1, 1)):
    constants = {
        "DEVICE_LENGTHS": bool(on_device), "VERIFY": bool(verify), "PAGE": 256, "WINDOW": 128, "SWA_PAGE": 256,
        "TOPK": 512, "C4_RING": 8, "C128_RING": 128, "TILE": TILE_PAGES,
    }
    signature = {name: "i32" if name in ints else "*i64" if name in LONGS else "*i32" for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    if not on_device:
        signature["lengths"] = "*i32"
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    print(len(made.asm["cubin"]))
"""


def test_every_variant_compiles():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [int(line) > 0 for line in done.stdout.split()] == [True] * 4
