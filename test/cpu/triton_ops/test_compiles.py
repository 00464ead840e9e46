"""Every kernel compiles: the interpreter takes more than the compiler. A known variant starts at once."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import MagicMock, call

from triton_ops._launch import Launcher

PROGRAM = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton_ops import copy_pages, copy_rows, locate, planar_rows, prep_rows

def made(kernel, types, **constants):
    names = kernel.arg_names
    given = [*types.split(), *["constexpr"] * len(constants)]
    assert len(names) == len(given) and names[len(names) - len(constants):] == list(constants), names
    source = ASTSource(kernel, dict(zip(names, given)), {(names.index(k),): v for k, v in constants.items()})
    built = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    print(kernel.__name__, len(built.asm["cubin"]))

I, L = "*i32 ", "*i64 "
for save in (True, False):
    for slots in (I, L):
        made(copy_pages._copy_pages_kernel, L * 6 + "i32 " * 4 + slots, PAGE=256, SAVE=save, TILE=1024)
    for dtype in copy_rows.NEGATIVE_INFINITY:
        made(copy_rows._copy_rows_kernel, L * 4 + "i32 *i64 i32 *i64", SCORE=copy_rows.empty_score_word(dtype),
             SAVE=save, TILE=512, CHUNK=4096, BUFFERS=3, WIDTH=10, PAGE_NUMBERS=3)
for slots in (I, L):
    made(locate._locate_kernel, slots + L * 3 + "i32 " * 6, PAGE=256, TILE=locate.TILE, NOTHING=locate.NOTHING)
for kernel in (planar_rows._gather_rows_kernel, planar_rows._scatter_rows_kernel):
    for loc, tail in ((I, 32), (L, 0)):
        made(kernel, I + loc + I * 3 + "i32 i32", PAGE_SIZE=64, PAGE_WORDS=9360, ROWS=16, HEAD_WORDS=112,
             TAIL_WORDS=tail, SCALE_WORDS=2, HEAD_BLOCK=128, TAIL_BLOCK=32, SCALE_BLOCK=2)
for on_device, verify in ((False, False), (True, False), (False, True), (True, True)):
    lengths = L if on_device else I
    made(prep_rows._prep_rows_kernel, L * 2 + lengths + I + L + I * 5 + L + I + L + I * 5 + "i32 " * 10,
         DEVICE_LENGTHS=on_device, VERIFY=verify, PAGE=256, WINDOW=128, SWA_PAGE=256, TOPK=512, C4_RING=8,
         C128_RING=128, TILE=prep_rows.TILE_PAGES)
"""
KERNELS = {"_copy_pages": 4, "_copy_rows": 4, "_locate": 2, "_gather_rows": 2, "_scatter_rows": 2, "_prep_rows": 4}


def test_every_variant_compiles():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    built = [line.split() for line in done.stdout.splitlines()]
    assert {name: [kernel for kernel, _ in built].count(f"{name}_kernel") for name in KERNELS} == KERNELS
    assert all(int(nbytes) > 0 for _, nbytes in built)


GRID, OTHER = (3, 2, 1), (7, 1, 1)


def test_the_second_call_of_a_key_goes_to_the_compiled_kernel():
    first, second = variants = [MagicMock(packed_metadata=()) for _ in range(2)]
    kernel = MagicMock()
    kernel[GRID].side_effect = variants
    launcher = Launcher(kernel, num_warps=8)
    launcher("key", GRID, 1, 2.5)
    launcher("key", OTHER, 3, 4.5)
    launcher("other", GRID, 5, 6.5)
    launcher("key", OTHER, 5, 6.5, stream=77)
    assert first.__getitem__.call_args_list == [call(OTHER)] * 2 and not second.mock_calls
    assert kernel[GRID].call_args_list == [call(1, 2.5, num_warps=8), call(5, 6.5, num_warps=8)]
    assert first[OTHER].call_args_list == [call(3, 4.5, stream=None), call(5, 6.5, stream=77)]
