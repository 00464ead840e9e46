"""Host copies of page-major pools: would the copy engine alone move a page's three pieces faster than the copier does?

    python3 -m benchmarks.transfer.pieces [--tokens N ...]

The copier gathers pages on the card and sends long runs. Pieces go from where they lie, one call to the driver each,
and need no kernel; but the host must know the pages. Host time is the scheduler's. The copier moves window and states,
too: 15 MB of its bytes at most.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sglang_dsv4.bench import results
from sglang_dsv4.bench.subject import SETS, Subject, link_limit, sync
from sglang_dsv4.engine.standalone import FLASH_RATIOS, TINY_RATIOS, boot, install_hooks
from sglang_dsv4.transfer.copy_engine import copy_to_device, copy_to_host

TOKENS = (4095, 16383, 65535)
COLUMNS = f"{'tokens':>8} {'way':>8} {'save ms':>9} {'of it host':>10} {'load ms':>9} {'of it host':>10} {'GB/s':>6}"


class Pieces:
    """Moves the pages of a request in three pieces each, in order, on a stream of their own."""

    def __init__(self, subject: Subject, tokens: int) -> None:
        self.addresses, _, self.items = subject.pool.get_contiguous_buf_infos()
        self.cuda, self.step = subject.device == "cuda", 256 * subject.pool.page_stride
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.host = torch.empty(-(-tokens // 256) * sum(self.items), dtype=torch.uint8, pin_memory=self.cuda)

    def move(self, slots: torch.Tensor, save: bool) -> None:
        """Enqueue every piece; on the CPU, copy it."""
        host = self.host.data_ptr()
        for page in (slots[::256] // self.step).tolist():
            for address, item in zip(self.addresses, self.items, strict=True):
                self._copy(host, address + page * item, item, save)
                host += item

    def _copy(self, host: int, device: int, nbytes: int, save: bool) -> None:
        if self.stream is None:
            ctypes.memmove(*((host, device) if save else (device, host)), nbytes)
        elif save:
            copy_to_host(host, device, nbytes, self.stream.cuda_stream)
        else:
            copy_to_device(device, host, nbytes, self.stream.cuda_stream)


class Clock:
    """Seconds until a call returned, and until the device was done; the first two of each way do not count."""

    def __init__(self) -> None:
        self.times: dict[str, list[tuple[float, float]]] = {"save": [], "load": []}

    def time(self, way: str, run: Callable[[], Any]) -> Any:
        """What ``run`` returns."""
        sync()
        started = time.perf_counter()
        made = run()
        returned = time.perf_counter() - started
        sync()
        self.times[way].append((returned, time.perf_counter() - started))
        return made

    def medians(self) -> dict[str, float]:
        """In milliseconds."""
        found = {}
        for way, times in self.times.items():
            host, whole = (statistics.median(column) * 1e3 for column in zip(*times[2:], strict=True))
            found |= {f"{way}_ms": whole, f"{way}_host_ms": host}
        return found


def measure(subject: Subject, tokens: int, count: int) -> dict[str, dict[str, float]]:
    """Both ways, turn by turn. The copier's save returns without a wait, as on a server."""
    places = [subject.place(tokens, seed) for seed in range(SETS)]
    pieces, clocks, pool = Pieces(subject, tokens), {"copier": Clock(), "pieces": Clock()}, subject.pool
    for i in range(count + 2):
        here, there = places[i % SETS], places[(i + 1) % SETS]
        copy = clocks["copier"].time("save", partial(pool.get_cpu_copy, here, req_pool_index=1, wait=False))
        clocks["copier"].time("load", partial(pool.load_cpu_copy, copy, there, req_pool_index=1))
        clocks["pieces"].time("save", partial(pieces.move, here, save=True))
        clocks["pieces"].time("load", partial(pieces.move, there, save=False))
    moved = {"copier": subject.live_bytes(tokens), "pieces": pieces.host.numel()}
    return {way: clock.medians() | {"bytes": moved[way]} for way, clock in clocks.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = results.parser(__doc__, "page-pieces")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--count", type=int, default=9)
    parser.add_argument("--layers", choices=("flash", "tiny"), default="flash")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    results.add_out(parser)
    arguments = parser.parse_args(argv)
    os.environ["DSV4_LAYOUT"] = "page-major"
    boot()
    install_hooks()
    ratios = FLASH_RATIOS if arguments.layers == "flash" else TINY_RATIOS
    pages = -(-max(arguments.tokens) // 256) * 5 // 4 + 8
    subject = Subject(ratios, pages, arguments.device, {}, "auto")
    link = link_limit(arguments.device)
    print(f"link: {link[0] / 1e9:.1f} GB/s to the host, {link[1] / 1e9:.1f} GB/s back\n{COLUMNS}")
    rows: list[dict[str, Any]] = []
    for tokens in arguments.tokens:
        for way, found in measure(subject, tokens, arguments.count).items():
            rows.append({"tokens": tokens, "way": way, **found})
            save, load = (f"{found[f'{name}_ms']:>9.3f} {found[f'{name}_host_ms']:>10.3f}" for name in ("save", "load"))
            print(f"{tokens:>8} {way:>8} {save} {load} {found['bytes'] / found['save_ms'] / 1e6:>6.1f}", flush=True)
    results.write(arguments.name, rows, [], arguments.out)


if __name__ == "__main__":
    main()
