#!/usr/bin/env python3
"""Times a HiSparse retract and resume, which leave the c4 rows where they lie, and counts their bytes.

    python3 -m benchmarks.hisparse_transfer --name hisparse-transfer [--model flash|pro|tiny] [--tokens 16384 65536 ...]

Two pools of the same model and the same requests, by turns in one process: an ordinary one, and one with
the engine's HiSparse coordinator. There a retract is: wait for the rows, back the newest one up, detach them, copy the
rest, give the hot rows back. A resume is: adopt the rows, load the rest, get hot rows, put the newest row in its place.
The result is written after each length.
Bytes are those of whole pages and live rows. Just before a multiple of 128 the pending states of 127 tokens are live,
which HiSparse does not touch; those lengths are measured, too, and have no bound. The first round compares the rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from sglang_dsv4.bench import results
from sglang_dsv4.bench.subject import Subject, sync
from sglang_dsv4.bench.transfer import MODELS
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import PoolSpec, boot, install_hooks, make_allocator, make_pool

TOKENS = (16384, 65536, 16383, 65535)
BOUND = "<= 0.3"  # of the bytes, where nothing but the rows makes the difference
HOT = 512  # rows of a request on the device
SLOTS = (1, 2, 3, 4)

SERVER = {"disaggregation_mode": "decode", "disable_radix_cache": True, "enable_hisparse": True}  # its arguments


class Kept(Subject):
    """Builds a pool whose c4 history lies in the coordinator's host pool."""

    def __init__(self, ratios: tuple[int, ...], pages: int, device: str, transfer: str) -> None:
        from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator  # noqa: PLC0415
        from sglang.srt.mem_cache.allocator.hisparse import (  # noqa: PLC0415
            DeepSeekV4HiSparseTokenToKVPoolAllocator,
        )

        self.device = device
        self.spec = PoolSpec(ratios, pages, swa_pages=24, requests=8, hisparse=True, device=device, server_args=SERVER)
        self.pool: Any = make_pool(self.spec)
        allocator = DeepSeekV4HiSparseTokenToKVPoolAllocator(make_allocator(self.spec, self.pool))
        self.table = torch.zeros(len(SLOTS) + 1, pages * 256, dtype=torch.int32, device=device)
        self.coordinator = HiSparseCoordinator(
            req_to_token_pool=SimpleNamespace(req_to_token=self.table, max_context_len=pages * 256),
            token_to_kv_pool_allocator=allocator, top_k=HOT, device_buffer_size=HOT, device=device, tp_group=None,
        )  # fmt: skip
        self.kept = self.pool.kept_rows
        if self.kept is None:
            raise SystemExit("no pages could be added to the host pool: too little free RAM, or DSV4_HOST_GB too small")
        settings = Settings(host_gb=pages * 1.6e6 / 2**30 + 0.4, host_copies=8, transfer=transfer)
        self.host = self.pool.attach_host(settings)
        for buffers in (*self.host.buffers.buffers.values(), self.coordinator.mem_pool_host.kv_buffer):
            for buffer in buffers:
                buffer.random_(0, 256)

    def request(self, slot: int, tokens: int) -> Any:
        kv = SimpleNamespace(kv_allocated_len=tokens, req_pool_idx=slot)
        end = SimpleNamespace(end=tokens)
        return SimpleNamespace(rid=f"{slot}", kv=kv, req_pool_idx=slot, extend_range=end, extend_end=tokens)

    def enter(self, slot: int, tokens: int) -> None:
        """Gives the request in ``slot`` host pages and hot rows; its pages are another set each time."""
        owner = self.coordinator
        owner.mem_pool_host.alloc_paged_token_slots(
            owner.req_to_host_pool, owner.req_to_host_pool_allocated_len, slot, 0, tokens // 4
        )

    def admit(self, slot: int, tokens: int) -> None:
        self.coordinator.admit_request_direct(self.request(slot, tokens))
        self.kept.load_newest(slot, tokens)

    def measure(self, tokens: int, count: int) -> tuple[float, float]:
        """Returns median seconds of a retract and of a resume, as a server does them."""
        for slot in SLOTS:
            self.table[slot, :tokens] = self.place(tokens, slot)
        saves, loads, slot = [], [], SLOTS[0]
        self.enter(slot, tokens)
        self.admit(slot, tokens)
        for i in range(count + 3):
            self.kept.verify = i == 0
            sync()
            started = time.perf_counter()
            with self.kept.detaching(slot, tokens, computed=True):
                copy = self.pool.get_cpu_copy(self.table[slot, :tokens], req_pool_index=slot)
                self.coordinator.request_finished(self.request(slot, tokens))
            saves.append(time.perf_counter() - started)
            sync()
            slot = SLOTS[(i + 1) % len(SLOTS)]
            started = time.perf_counter()
            with self.kept.adopting(copy):
                self.enter(slot, tokens)
            self.pool.load_cpu_copy(copy, self.table[slot, :tokens], req_pool_index=slot)
            self.admit(slot, tokens)
            sync()
            loads.append(time.perf_counter() - started)
        self.coordinator.request_finished(self.request(slot, tokens))
        return statistics.median(saves[3:]), statistics.median(loads[3:])


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row a length, as it is known."""
    ratios = MODELS[arguments.model][0]
    pages = max(arguments.tokens) // 256 + 2
    subjects = {
        "usual": Subject(ratios, pages, arguments.device, {}, arguments.transfer),
        "hisparse": Kept(ratios, pages, arguments.device, arguments.transfer),
    }
    for tokens in arguments.tokens:
        row: dict[str, Any] = {"tokens": tokens}
        for name, subject in subjects.items():
            save, load = subject.measure(tokens, arguments.count)
            row |= {f"{name}_bytes": subject.live_bytes(tokens)}
            row |= {f"{name}_retract_ms": save * 1e3, f"{name}_resume_ms": load * 1e3}
        yield row | {"share_of_bytes": row["hisparse_bytes"] / row["usual_bytes"]}
    for subject in subjects.values():
        subject.host.close()


def judge(rows: list[dict[str, Any]], tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the bounds of the bytes; times are shown. tokens: the lengths that are to be measured."""
    shares = [
        results.bound(f"share of the bytes, {row['tokens']} tokens", BOUND, row["share_of_bytes"])
        for row in rows
        if row["tokens"] % 128 == 0
    ]
    return [*shares, results.bound("lengths not measured yet", "<= 0", len(tokens) - len(rows))]


def one_process() -> None:
    """Starts a process group of one: the coordinator asks how many ranks there are."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = results.parser(__doc__, "hisparse-transfer")
    parser.add_argument("--model", choices=[name for name in MODELS if name != "v41"], default="flash")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--count", type=int, default=15, help="retracts and resumes of each length")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--transfer", default="auto", help="as DSV4_TRANSFER")
    results.add_out(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    boot()
    install_hooks()
    one_process()
    rows = []
    for row in measure(arguments):
        rows.append(row)
        results.show([row])
        bounds = judge(rows, arguments.tokens)
        results.write(arguments.name, rows, bounds, arguments.out)  # what there is, should this be ended early
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
