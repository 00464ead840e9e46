"""The interpreter takes more than the compiler: every kernel is compiled here, too. Known variants start at once."""

from __future__ import annotations

import os
import subprocess
import sys

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


GRID = (3, 2, 1)


class FakeCompiled:
    """What a launch through Triton returns."""

    packed_metadata = ()

    def __init__(self, log: list) -> None:
        self.log = log

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.log.append(("compiled", self, grid, arguments, options))


class FakeKernel:
    """Compiles a variant at every launch. ``compiled``: whether a launch returns it, unlike the interpreter."""

    def __init__(self, compiled: bool = True) -> None:
        self.log: list = []
        self.compiled = compiled
        self.variants: list[FakeCompiled] = []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.log.append(("triton", grid, arguments, options))
            self.variants.append(FakeCompiled(self.log))
            return self.variants[-1] if self.compiled else object()

        return launch


def test_the_second_call_of_a_key_goes_to_the_compiled_kernel():
    kernel = FakeKernel()
    launcher = Launcher(kernel, num_warps=8, num_stages=2)
    launcher("key", GRID, 1, 2.5)
    launcher("key", (7, 1, 1), 3, 4.5)
    launcher("other", GRID, 5, 6.5)
    launcher("key", (9, 1, 1), 5, 6.5, stream=77)
    assert kernel.log == [
        ("triton", GRID, (1, 2.5), {"num_warps": 8, "num_stages": 2}),
        ("compiled", kernel.variants[0], (7, 1, 1), (3, 4.5), {"stream": None}),
        ("triton", GRID, (5, 6.5), {"num_warps": 8, "num_stages": 2}),
        ("compiled", kernel.variants[0], (9, 1, 1), (5, 6.5), {"stream": 77}),
    ]
