"""Compiles every kernel for GPUs that need not be here, and says which of them this toolchain does not know.

    python3 -m tools.compile_targets [--only TARGET ...] [--quick] [--out FOLDER]

Each op is called as servers call it, with its launch noted in place of the kernel: the variants are theirs. A target is
unknown to the toolchain where not even an empty kernel compiles. A kernel that compiles may still give wrong results.
Exit status 1 where a kernel does not compile for a known target.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported: what is noted below are compiled kernels

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dsv4.bench.results import add_out, bound, finish, parser
from triton_ops import copy_pages, copy_rows, locate, planar_rows, prep_rows
from triton_ops.cases import copy_pages as pages_cases
from triton_ops.cases import copy_rows as rows_cases
from triton_ops.cases import locate as locate_cases
from triton_ops.cases import planar_rows as planar_cases
from triton_ops.cases import prep_rows as prep_cases
from triton_ops.tables import BufferTable, host_words

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),  # H100, H200
    "sm_100": GPUTarget("cuda", 100, 32),  # B200, GB200
    "sm_103": GPUTarget("cuda", 103, 32),  # B300, GB300
    "sm_120": GPUTarget("cuda", 120, 32),  # RTX PRO 6000
    "gfx942": GPUTarget("hip", "gfx942", 64),  # MI300X
    "gfx950": GPUTarget("hip", "gfx950", 64),  # MI355X
}
WHOLE = "sm_90"  # where --quick compiles every variant; elsewhere one of each kernel
SLOTS = (torch.int32, torch.int64)
LINKER = """#!/bin/sh
[ "$1" = --version ] || cp "$4" "$6"  # -flavor gnu -shared OBJECT -o RESULT
"""
NOT_LINKED = "assembled, not linked: this Triton takes ld.lld from ROCm, which is not here"


class Launch(NamedTuple):
    """Holds one launch: a kernel, its arguments by name, and compile options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    def source(self) -> ASTSource:
        """Returns the variant that Triton would compile for it."""
        types, constants, attributes = {}, {}, {}
        for number, parameter in enumerate(self.kernel.params):
            value, name = self.arguments[parameter.name], parameter.name
            free = not parameter.is_constexpr and not parameter.do_not_specialize
            if parameter.is_constexpr or (free and isinstance(value, int) and value == 1):
                types[name], constants[number,] = "constexpr", value
                continue
            tensor = isinstance(value, torch.Tensor)
            types[name] = f"*i{8 * value.itemsize}" if tensor else "i32" if -(2**31) <= value < 2**31 else "i64"
            place = value.data_ptr() if tensor else value
            if free and not parameter.do_not_specialize_on_alignment and place % 16 == 0:
                attributes[number,] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, types, constants, attributes)


class _Noted:
    """Stands in for a kernel; each launch is noted and nothing runs."""

    def __init__(self, kernel: Any, into: list[Launch]) -> None:
        self._kernel, self._into = kernel, into

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._note

    def _note(self, *arguments: Any, **named: Any) -> None:
        names = self._kernel.arg_names
        given = dict(zip(names, arguments, strict=False)) | {name: named.pop(name) for name in names if name in named}
        self._into.append(Launch(self._kernel, given, named))


def launches() -> list[Launch]:
    """Returns a launch of every variant that servers use."""
    found: list[Launch] = []
    with ExitStack() as stack:
        for launcher in (copy_pages._copy_pages, copy_rows._copy_rows, locate._locate, prep_rows._prep_rows):
            stack.enter_context(mock.patch.object(launcher, "kernel", _Noted(launcher.kernel, found)))
        for name in ("_gather_rows_kernel", "_scatter_rows_kernel"):
            kernel = getattr(planar_rows, name)
            stack.enter_context(mock.patch.object(planar_rows, name, _Noted(kernel, found)))
        _copies()
        _places()
        _rows()
        _metadata()
    return found


def _copies() -> None:
    case = pages_cases.PagesCase(pages_cases.PAGE_SHAPES, 6, [1, 0])
    buffers = [torch.zeros((count, width), dtype=torch.uint8) for width, count in case.shapes]
    table, host = copy_pages.PageTable.of(buffers, case.offsets, case.stride), _host(6 * case.stride)
    for dtype, save in product(SLOTS, (True, False)):
        copy_pages.copy_pages(table, host, pages_cases.slots_of(case.firsts, dtype=dtype), case.page, save)
    segments = torch.tensor([rows_cases.run(0, 0, 0, 64)])
    for state, save in product(copy_rows.NEGATIVE_INFINITY, (True, False)):
        numbers = torch.zeros(copy_rows.PAGE_NUMBERS, dtype=torch.int64)
        copy_rows.copy_rows(BufferTable.of(buffers), host, segments, numbers, 1, 64, save, state)


def _host(nbytes: int) -> torch.Tensor:
    return host_words(torch.zeros(nbytes, dtype=torch.uint8))


def _places() -> None:
    case = locate_cases.located(600)
    numbers, report = (torch.zeros(3, dtype=torch.int64) for _ in range(2))
    for dtype in SLOTS:
        slots = torch.tensor(case.slots, dtype=dtype)
        locate.locate(slots, torch.tensor(case.mapping), 1, case.page, case.start, case.limits, numbers, report)


def _rows() -> None:
    kv, fp8, fp4 = planar_cases.FORMATS
    for (form, size), dtype in product(((kv, 256), (kv, 64), (kv, 2), (fp8, 64), (fp4, 64)), SLOTS):
        pages, places = form.pages(size, 2), torch.arange(2, dtype=dtype)
        form.get(pages, places, size, *form.more)
        form.put(pages, places, *form.rows(2), size, *form.more)


def _metadata() -> None:
    sizes, inputs, outputs = prep_cases.prep_arguments(4)
    drafts = sizes._replace(c4_ring=16, c128_ring=256, c4_keep=10, c128_keep=130)
    verified = prep_cases.prep_outputs(drafts, 2, 2, 4, True, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    for lengths in (inputs.lengths, None):
        prep_rows.prep_rows(sizes, inputs._replace(lengths=lengths), outputs)
        prep_rows.prep_rows(drafts, inputs._replace(lengths=lengths, queries=2), verified)


@triton.jit
def _empty_kernel(out):  # noqa: ANN001, ANN202 - not Python's types
    tl.store(out, 0)


def compile_for(target: GPUTarget, source: ASTSource, options: dict[str, int]) -> str:
    """Compiles one variant; returns why it does not compile, or nothing."""
    try:
        triton.compile(source, target=target, options=options)
    except Exception as error:  # noqa: BLE001 - Triton raises that very class for a missing linker, and many others
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
        return next((line for line in lines if "fatal" in line), lines[0])
    return ""


def unknown(target: GPUTarget, folder: Path) -> tuple[str, str]:
    """Returns (why the toolchain does not know ``target``, a note on one that it knows in part); both may be empty."""
    empty, stand_in = ASTSource(_empty_kernel, {"out": "*i32"}), folder / "ld.lld"
    said = compile_for(target, empty, {})
    if said and target.backend == "hip" and "linker" in said:
        stand_in.write_text(LINKER)
        stand_in.chmod(0o755)
        os.environ["TRITON_HIP_LLD_PATH"] = str(stand_in)
        said = compile_for(target, empty, {})
    return said, NOT_LINKED if target.backend == "hip" and stand_in.exists() else ""


def rows_of(name: str, noted: Sequence[Launch], folder: Path) -> Iterator[dict[str, Any]]:
    """Yields a row a kernel: how many of its variants compile for target ``name``, and what was said."""
    target = TARGETS[name]
    reason, note = unknown(target, folder)
    kernels = dict.fromkeys(launch.kernel.__name__ for launch in noted)
    for kernel in kernels:
        variants = [launch for launch in noted if launch.kernel.__name__ == kernel]
        begun = time.perf_counter()
        said = [] if reason else [compile_for(target, one.source(), one.options) for one in variants]
        faults = [fault for fault in said if fault]
        yield {
            "target": name, "kernel": kernel.strip("_").removesuffix("_kernel"), "variants": len(variants),
            "compiled": len(said) - len(faults), "known": not reason, "said": (faults or [reason or note])[0],
            "seconds": round(time.perf_counter() - begun, 2),
        }  # fmt: skip


def of_each_kernel(noted: Sequence[Launch]) -> list[Launch]:
    """Returns one launch a kernel."""
    return list({launch.kernel.__name__: launch for launch in noted}.values())


def main(words: Sequence[str] | None = None) -> int:
    """Prints a line a target and writes the result; returns the exit status."""
    own = parser(__doc__, "compile-targets")
    own.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET", help="of them all")
    own.add_argument("--quick", action="store_true", help=f"one variant a kernel, but for {WHOLE}")
    add_out(own)
    arguments = own.parse_args(words)
    noted, rows = launches(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "cache")  # nothing is known from an earlier run
        for name in arguments.only:
            wanted = of_each_kernel(noted) if arguments.quick and name != WHOLE else noted
            found = list(rows_of(name, wanted, Path(folder)))
            rows += found
            compiled, variants = (sum(row[key] for row in found) for key in ("compiled", "variants"))
            state = f"{compiled} of {variants} variants compile" if found[0]["known"] else "not known to this toolchain"
            said = "; ".join(dict.fromkeys(row["said"] for row in found if row["said"]))
            print(f"{name}: {state}{said and f' ({said})'}", flush=True)
    failed = sum(row["variants"] - row["compiled"] for row in rows if row["known"])
    known = len({row["target"] for row in rows if row["known"]})
    bounds = [bound("variants that do not compile for a known target", "<= 0", failed)]
    bounds.append(
        bound("targets known to this toolchain", f">= {1 if arguments.quick else len(arguments.only)}", known)
    )
    return finish(arguments, rows, bounds)


if __name__ == "__main__":
    raise SystemExit(main())
