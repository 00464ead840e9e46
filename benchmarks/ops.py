#!/usr/bin/env python3
"""Times each op alone, and a plain device copy of as many bytes beside it, in one run.

    python3 -m benchmarks.ops [--only OP ...] [--rounds N]

The cases are those of triton_ops/cases, which test/gpu compares. Every call takes other buffers than the last ones,
together larger than the L2 cache; times are device events, the median of many calls, op and copy in turn. Needs a GPU:
without one nothing is measured, exit status 3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from triton_ops.cases.copy_pages import REAL_PAGES, PagesCase, slots_of
from triton_ops.cases.copy_rows import REAL_ROWS, RowsCase
from triton_ops.cases.locate import REAL_LOCATED, located
from triton_ops.cases.planar_rows import REAL_PLANAR, PlanarCase
from triton_ops.cases.prep_rows import REAL_PREP, prep_arguments
from triton_ops.copy_pages import PageTable, copy_pages
from triton_ops.copy_rows import PAGE_NUMBERS, copy_rows
from triton_ops.locate import locate, report_size
from triton_ops.prep_rows import prep_rows
from triton_ops.tables import BufferTable, host_words

MOST_SETS = 64
Call = Callable[[], object]


class Measured(NamedTuple):
    """Holds one row. nbytes: bytes that the op must move, each once. sets: its calls, each on buffers of its own."""

    op: str
    case: str
    nbytes: int
    sets: list[Call]


def sets_of(nbytes: int, make: Callable[[int], Call]) -> list[Call]:
    """Returns enough calls on buffers of their own to fill the L2 cache four times over."""
    cache = torch.cuda.get_device_properties("cuda").L2_cache_size
    return [make(seed) for seed in range(min(MOST_SETS, 2 + 4 * cache // max(nbytes, 1)))]


def planar(case: PlanarCase) -> Iterator[Measured]:
    """Yields reading and writing of a case's rows."""
    fmt, page_size, n, _ = case
    nbytes = n * sum(width for width, _ in fmt.parts)

    def get(seed: int) -> Call:
        buf, loc, out = fmt.pages(page_size, case.count, "cuda", seed), case.distinct("cuda"), fmt.rows(n, "cuda")
        return lambda: fmt.get(buf, loc, page_size, *fmt.more, out=out)

    def put(seed: int) -> Call:
        buf, loc, parts = fmt.pages(page_size, case.count, "cuda", seed), case.distinct("cuda"), fmt.rows(n, "cuda")
        return lambda: fmt.put(buf, loc, *parts, page_size, *fmt.more)

    yield Measured("get_k_and_s", str(case), nbytes, sets_of(nbytes, get))
    yield Measured("put_k_and_s", str(case), nbytes, sets_of(nbytes, put))


def pages(case: PagesCase) -> Iterator[Measured]:
    """Yields saving and loading of a case's pages, from and to a staging image on the card."""
    nbytes = len(case.pages) * sum(width for width, _ in case.shapes)
    slots = slots_of(case.firsts, case.page).to("cuda")
    for save in (True, False):

        def make(_: int, save: bool = save) -> Call:
            buffers = [torch.zeros(count, width, dtype=torch.uint8, device="cuda") for width, count in case.shapes]
            table = PageTable.of(buffers, case.offsets, case.stride)
            image = host_words(torch.zeros(case.host_blocks * case.stride, dtype=torch.uint8, device="cuda"))
            return lambda: copy_pages(table, image, slots, case.page, save)

        yield Measured("copy_pages " + ("save" if save else "load"), str(case), nbytes, sets_of(nbytes, make))


def rows(case: RowsCase) -> Iterator[Measured]:
    """Yields saving and loading of a case's rows, likewise."""
    for save in (True, False):
        nbytes = case.saved if save else case.nbytes

        def make(_: int, save: bool = save) -> Call:
            buffers = [torch.zeros(count, width, dtype=torch.uint8, device="cuda") for width, count in case.shapes]
            table = BufferTable.of(buffers)
            image = host_words(torch.zeros(case.host_bytes, dtype=torch.uint8, device="cuda"))
            segments, numbers = (torch.tensor(values, device="cuda") for values in (case.segments, case.page_numbers))
            return lambda: copy_rows(table, image, segments, numbers, *case.bounds, save)

        yield Measured("copy_rows " + ("save" if save else "load"), str(case), nbytes, sets_of(nbytes, make))


def locates(tokens: int) -> Iterator[Measured]:
    """Yields finding a request: its slots are read."""
    case = located(tokens, full_pages=tokens // 256 + 9)

    def make(_: int) -> Call:
        slots = torch.tensor(case.slots, dtype=torch.int32, device="cuda")
        mapping = torch.tensor(case.mapping, device="cuda")
        numbers = torch.zeros(PAGE_NUMBERS, dtype=torch.int64, device="cuda")
        report = torch.zeros(report_size(tokens), dtype=torch.int64, device="cuda")
        return lambda: locate(slots, mapping, 1, case.page, case.start, case.limits, numbers, report)

    yield Measured("locate", str(case), 4 * tokens, sets_of(4 * tokens, make))


def prepared(requests: int) -> Iterator[Measured]:
    """Yields the metadata of a decode step: its outputs are written."""

    def make(seed: int) -> Call:
        arguments = prep_arguments(requests, seed=seed, device="cuda")
        return lambda: prep_rows(*arguments)

    outputs = prep_arguments(requests, device="cuda")[2]
    nbytes = sum(tensor.nbytes for tensor in outputs if tensor is not None)
    yield Measured("prep_rows", f"{requests} requests", nbytes, sets_of(nbytes, make))


OPS = {
    "get_put": (planar, REAL_PLANAR),
    "copy_pages": (pages, REAL_PAGES),
    "copy_rows": (rows, REAL_ROWS),
    "locate": (locates, REAL_LOCATED),
    "prep_rows": (prepared, REAL_PREP),
}


def plain_copies(nbytes: int) -> list[Call]:
    """Returns copies of as many bytes from one flat buffer to another."""

    def make(_: int) -> Call:
        source, target = (torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
        return lambda: target.copy_(source)

    return sets_of(nbytes, make)


def microseconds(call: Call) -> float:
    """Returns microseconds of one call on the device, behind other work: its launch on the host does not count."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000)
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def measure(row: Measured, rounds: int) -> tuple[float, float]:
    """Returns median microseconds of the op and of the plain copy, in turn."""
    copies = plain_copies(row.nbytes)
    for call in (*row.sets, *copies):
        call()
    times = [(microseconds(row.sets[k % len(row.sets)]), microseconds(copies[k % len(copies)])) for k in range(rounds)]
    return statistics.median(op for op, _ in times), statistics.median(copy for _, copy in times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return 3
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, median of {options.rounds}, device time")
    print(f"{'op':<16} {'case':<44} {'MB':>8} {'us':>9} {'GB/s':>7} {'copy GB/s':>9} {'share':>6}")
    for make, cases in (OPS[name] for name in options.only):
        for row in (row for case in cases for row in make(case)):
            ours, plain = measure(row, options.rounds)
            # A copy reads and writes each byte, and so does an op that moves them.
            speed, limit = (2 * row.nbytes / 1e3 / us for us in (ours, plain))
            print(
                f"{row.op:<16} {row.case:<44} {row.nbytes / 1e6:>8.3f} {ours:>9.1f} {speed:>7.0f} {limit:>9.0f}"
                f" {plain / ours:>6.2f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
