#!/usr/bin/env python3
"""Save and load of one request against the pinned copy and the peers: a table, a plot, one JSON line last.

    python3 scripts/bench_transfer.py [--model flash|pro|tiny] [--tokens 2047 16383 ...] [--out FOLDER]

End to end: ``get_cpu_copy`` until the bytes are on the host; ``load_cpu_copy`` until the device has them. Pages are
scattered at random, another set each time. Every figure is a ratio to the 1 GiB pinned copy of the same run.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import results
import torch

from sglang_dsv4.engine.standalone import (
    FLASH_RATIOS,
    PRO_RATIOS,
    TINY_RATIOS,
    PoolSpec,
    boot,
    install_hooks,
    make_allocator,
    make_pool,
)
from sglang_dsv4.settings import Settings

MODELS = {"flash": FLASH_RATIOS, "pro": PRO_RATIOS, "tiny": TINY_RATIOS}
SETS = 4  # page sets in rotation
BOUNDS = {2047: ">= 0.65", 16383: ">= 0.87", 65535: ">= 0.90", 262143: ">= 0.90"}


def sync() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wall(run: Callable[[int], Any], count: int) -> float:
    """Median seconds of ``run(i)`` until the device is done, after warm-up."""
    times = []
    for i in range(count + 3):
        sync()
        started = time.perf_counter()
        run(i)
        sync()
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


def link_limit(device: str) -> tuple[float, float]:
    """Bytes a second of the 1 GiB pinned copy: to the host, to the device."""
    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.empty(2**30, dtype=torch.uint8, device=device).random_(0, 256)
    save = wall(lambda _: host.copy_(there, non_blocking=True), 9)
    load = wall(lambda _: there.copy_(host, non_blocking=True), 9)
    return 2**30 / save, 2**30 / load


class Subject:
    """A pool with requests scattered over it."""

    def __init__(self, ratios: tuple[int, ...], pages: int, device: str, spec: dict[str, Any], transfer: str) -> None:
        self.device = device
        self.spec = PoolSpec(ratios=ratios, pages=pages, swa_pages=24, requests=8, device=device, **spec)
        self.pool: Any = make_pool(self.spec)
        make_allocator(self.spec, self.pool)
        self.pool.attach_host(Settings(host_gb=pages * 1.6e6 / 2**30 + 0.4, host_copies=8, transfer=transfer))
        self.host = self.pool.host
        for buffers in self.host.side.buffers.values():
            for buffer in buffers:
                buffer.random_(0, 256)

    def place(self, tokens: int, seed: int) -> torch.Tensor:
        """Slots of a request over random pages, its window mapped to random SWA pages."""
        generator = torch.Generator().manual_seed(seed)
        count = -(-tokens // 256)
        pages = torch.randperm(self.spec.pages, generator=generator)[:count] + 1
        slots = (pages[:, None] * 256 + torch.arange(256)).reshape(-1)[:tokens]
        first = max(0, tokens - 128) // 256
        swa = torch.randperm(self.spec.swa_pages, generator=generator)[: count - first] + 1
        tail = slots[first * 256 :]
        where = (swa[:, None] * 256 + torch.arange(256)).reshape(-1)[: len(tail)]
        self.pool.full_to_swa_index_mapping[tail.to(self.device)] = where.to(self.device)
        return slots.to(self.device, torch.int32)

    def page_bytes(self, tokens: int) -> int:
        """Bytes of the whole pages."""
        pages = -(-tokens // 256)
        return sum(pages * f.page_bytes * len(f.layers) for f in self.host.side.families if f.whole_pages)

    def live_bytes(self, tokens: int) -> int:
        """Bytes that have to move: whole pages, and the live rows of window and states."""
        total = self.page_bytes(tokens)
        for family in self.host.side.families:
            if not family.whole_pages:
                rows = {"swa_kv": min(tokens, 127), "c128_state": tokens % 128}.get(
                    family.name, min(tokens, tokens % 4 + 4)
                )
                total += rows * family.row_bytes * len(family.layers)
        return total

    def measure(self, tokens: int, count: int) -> tuple[float, float]:
        """Median seconds of a save and of a load."""
        places = [self.place(tokens, seed) for seed in range(SETS)]
        saves, loads = [], []
        for i in range(count + 3):
            sync()
            started = time.perf_counter()
            copy = self.pool.get_cpu_copy(places[i % SETS], req_pool_index=1 + i % 4)
            saves.append(time.perf_counter() - started)
            sync()
            started = time.perf_counter()
            self.pool.load_cpu_copy(copy, places[(i + 1) % SETS], req_pool_index=1 + (i + 1) % 4)
            sync()
            loads.append(time.perf_counter() - started)
        return statistics.median(saves[3:]), statistics.median(loads[3:])

    def describing(self, tokens: int, count: int = 50) -> tuple[float, float]:
        """Median host seconds to describe a request and enqueue its load: without and with the wait for its place."""
        slots = self.place(tokens, 1)
        locator = self.host._mover.locator
        event, times, waits = locator._event, [], []
        waited = 0.0

        def wait() -> None:
            nonlocal waited
            started = time.perf_counter()
            event.synchronize()
            waited = time.perf_counter() - started

        locator._event = SimpleNamespace(record=event.record, synchronize=wait)
        for _ in range(count):
            copy = self.pool.get_cpu_copy(slots, req_pool_index=1)
            sync()
            started = time.perf_counter()
            self.pool.load_cpu_copy(copy, slots, req_pool_index=1)
            times.append(time.perf_counter() - started)
            waits.append(times[-1] - waited)
            sync()
        locator._event = event
        return statistics.median(waits), statistics.median(times)

    def blocked(self, tokens: int, count: int = 15) -> tuple[float, float]:
        """Median host seconds of a save: before it only waits for the copies, and in all."""
        slots = self.place(tokens, 1)
        mover, times, enqueued = self.host._mover, [], []
        real = mover._end

        def end() -> Any:
            event = real()
            enqueued.append(time.perf_counter() - started)
            return event

        mover._end = end
        for _ in range(count):
            sync()
            enqueued.clear()
            started = time.perf_counter()
            copy = self.pool.get_cpu_copy(slots, req_pool_index=1)
            times.append((enqueued[0], time.perf_counter() - started))
            copy.release()
        del mover._end
        return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)

    def launches(self, tokens: int) -> dict[str, tuple[int, int]]:
        """(kernels, copies) of a save and of a load, from the profiler."""
        slots = self.place(tokens, 1)
        counts = {}
        copy: Any = None

        def save() -> None:
            nonlocal copy
            copy = self.pool.get_cpu_copy(slots, req_pool_index=1)

        def load() -> None:
            self.pool.load_cpu_copy(copy, slots, req_pool_index=1)

        for name, run in (("save", save), ("load", load)):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                run()
                sync()
            events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            copies = sum("memcpy" in e.name.lower() for e in events)
            counts[name] = (len(events) - copies, copies)
        return counts


def reference(subject: Subject, tokens: int, count: int) -> tuple[float, float]:
    """The reference design: per-layer gathers to pageable tensors and scatters back (block families only)."""
    side = subject.host.side
    members = [f for f in side.families if f.whole_pages]

    def rows(slots: torch.Tensor, family: Any) -> tuple[torch.Tensor, torch.Tensor]:
        full = slots.long()
        where = full[(full + 1) % family.ratio == 0] // family.ratio
        return where // family.rows, where % family.rows

    def columns(family: Any, inner: torch.Tensor) -> list[torch.Tensor]:
        return [
            plane.offset + inner[:, None] * plane.row_bytes + torch.arange(plane.row_bytes, device=inner.device)
            for plane in family.planes
        ]

    def save(slots: torch.Tensor) -> list[list[list[torch.Tensor]]]:
        kept = []
        for family in members:
            page, inner = rows(slots, family)
            cells = columns(family, inner)
            kept.append([[b[page[:, None], c].cpu() for c in cells] for b in side.buffers[family.name]])
        return kept

    def load(kept: list[list[list[torch.Tensor]]], slots: torch.Tensor) -> None:
        for family, layers in zip(members, kept, strict=True):
            page, inner = rows(slots, family)
            cells = columns(family, inner)
            for buffer, planes in zip(side.buffers[family.name], layers, strict=True):
                for cell, values in zip(cells, planes, strict=True):
                    buffer[page[:, None], cell] = values.to(buffer.device)

    places = [subject.place(tokens, seed) for seed in range(SETS)]
    kept = save(places[0])
    return wall(lambda i: save(places[i % SETS]), count), wall(lambda i: load(kept, places[i % SETS]), count)


def engine_kernels(subject: Subject, tokens: int, count: int) -> tuple[float, float] | None:
    """The engine's page-transfer kernels for its hierarchical cache, moving the same pages; None without them."""
    try:
        from sgl_kernel.kvcacheio import transfer_kv_all_layer_mla  # noqa: PLC0415
    except ImportError:
        return None
    side, device = subject.host.side, subject.device
    pages = -(-tokens // 256)
    families = [f for f in side.families if f.whole_pages and f.layers]
    host = {
        f.name: [torch.empty(pages, f.page_bytes, dtype=torch.uint8, pin_memory=True) for _ in f.layers]
        for f in families
    }

    def table(tensors: Any) -> torch.Tensor:
        return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64, device=device)

    there = {f.name: table(side.buffers[f.name]) for f in families}
    here = {f.name: table(host[f.name]) for f in families}
    local = torch.arange(pages, device=device)
    places = [(subject.place(tokens, seed)[::256] // 256).long() for seed in range(SETS)]

    def move(i: int, save: bool) -> None:
        for f in families:
            sides = (there, here, places[i % SETS], local) if save else (here, there, local, places[i % SETS])
            transfer_kv_all_layer_mla(
                sides[0][f.name], sides[1][f.name], sides[2], sides[3], f.page_bytes, len(f.layers)
            )

    return wall(lambda i: move(i, True), count), wall(lambda i: move(i, False), count)


def gather(device: str) -> dict[str, float]:
    """get_k_and_s of 64K rows against a torch gather and against a device copy of the same bytes."""
    from triton_ops.get_k_and_s import get_k_and_s, get_k_and_s_torch  # noqa: PLC0415

    rows, page_size = 65536, 256
    buffer = torch.empty(1024, 149760, dtype=torch.uint8, device=device).random_(0, 256)
    places = [torch.randperm(1024 * page_size, device=device)[:rows] for _ in range(SETS)]
    out = get_k_and_s(buffer, places[0], page_size)
    ours = events(lambda i: get_k_and_s(buffer, places[i % SETS], page_size, out=out))
    plain = events(lambda i: get_k_and_s_torch(buffer, places[i % SETS], page_size))
    size = 2**30
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    copy = events(lambda _: target.copy_(source))
    moved = 2 * rows * 584 / ours
    return {
        "ours_ms": ours * 1e3,
        "torch_ms": plain * 1e3,
        "x_torch": plain / ours,
        "of_copy": moved / (2 * size / copy),
    }


def events(run: Callable[[int], Any], count: int = 31) -> float:
    """Median device seconds of ``run``."""
    times = []
    for i in range(count + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # the device is busy while the launch is prepared
        start.record()
        run(i)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def profile(subject: Subject, tokens: int) -> None:
    """cProfile of loads."""
    slots = subject.place(tokens, 1)
    profiler = cProfile.Profile()
    for i in range(120):
        copy = subject.pool.get_cpu_copy(slots, req_pool_index=1)
        sync()
        if i >= 20:
            profiler.enable()
        subject.pool.load_cpu_copy(copy, slots, req_pool_index=1)
        profiler.disable()
        sync()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> None:
    """Measure, print the table, write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="flash")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1023, 2047, 4095, 8191, 16383, 32767, 65535, 131071, 262143]
    )
    parser.add_argument("--count", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--profile", action="store_true", help="where the host time of a load goes, then stop")
    parser.add_argument("--bf16-states", action="store_true")
    parser.add_argument("--fp4-indexer", action="store_true")
    parser.add_argument("--name", default="transfer")
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    arguments = parser.parse_args()
    boot()
    install_hooks()
    cuda = arguments.device == "cuda"
    limit_save, limit_load = link_limit(arguments.device)
    print(f"limit: save {limit_save / 1e9:.1f} GB/s, load {limit_load / 1e9:.1f} GB/s")
    spec = {"fp4_indexer": arguments.fp4_indexer}
    if arguments.bf16_states:
        spec["state_dtype"] = torch.bfloat16
    pages = -(-max(arguments.tokens) // 256) * 5 // 4 + 8
    subject = Subject(MODELS[arguments.model], pages, arguments.device, spec, arguments.transfer)
    if arguments.profile:
        profile(subject, arguments.tokens[0])
        return
    rows, bounds = [], []
    print(
        f"{'tokens':>8} {'MB':>8} {'save ms':>9} {'GB/s':>6} {'%':>5} {'load ms':>9} {'GB/s':>6} {'%':>5}"
        "  peers (save/load ms)"
    )
    for tokens in arguments.tokens:
        row = measure(subject, tokens, arguments.count, (limit_save, limit_load), cuda)
        rows.append(row)
        limit = BOUNDS.get(tokens)
        if limit and cuda:
            bounds += [
                results.bound(f"{way} {tokens + 1} of the link", limit, row[f"{way}_of_link"])
                for way in ("save", "load")
            ]
        bounds += peer_bounds(row)
    if cuda:
        bounds += device_bounds(subject, arguments, rows)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = results.write(arguments.name, rows, bounds, arguments.out)
    # In a process of its own: the engine may have imported modules that change what matplotlib does.
    reporter = Path(__file__).with_name("report_transfer.py")
    subprocess.run([sys.executable, reporter, path], check=True)


def measure(subject: Subject, tokens: int, count: int, limits: tuple[float, float], cuda: bool) -> dict[str, Any]:
    """One line of the table."""
    nbytes = subject.live_bytes(tokens)
    save, load = subject.measure(tokens, count)
    row = {"tokens": tokens, "bytes": nbytes}
    for way, seconds, limit in (("save", save, limits[0]), ("load", load, limits[1])):
        row |= {
            f"{way}_ms": seconds * 1e3, f"{way}_gbps": nbytes / seconds / 1e9,
            f"{way}_of_link": nbytes / seconds / limit, f"{way}_limit_gbps": limit / 1e9,
        }  # fmt: skip
    peers = ""
    if 2047 <= tokens <= 16383:
        found = reference(subject, tokens, 3)
        row |= {"reference_save_ms": found[0] * 1e3, "reference_load_ms": found[1] * 1e3}
        peers += f"  reference {found[0] * 1e3:.1f}/{found[1] * 1e3:.1f}"
    if cuda and tokens <= 65535 and (found := engine_kernels(subject, tokens, 5)):
        paged = subject.page_bytes(tokens)  # they move the pages alone
        row |= {"engine_save_ms": found[0] * 1e3, "engine_load_ms": found[1] * 1e3}
        row |= {"engine_save_gbps": paged / found[0] / 1e9, "engine_load_gbps": paged / found[1] / 1e9}
        peers += f"  engine {found[0] * 1e3:.2f}/{found[1] * 1e3:.2f}"
    print(
        f"{tokens:>8} {nbytes / 1e6:>8.1f} "
        f"{save * 1e3:>9.3f} {row['save_gbps']:>6.1f} {row['save_of_link'] * 100:>5.1f} "
        f"{load * 1e3:>9.3f} {row['load_gbps']:>6.1f} {row['load_of_link'] * 100:>5.1f}{peers}",
        flush=True,
    )
    return row


def peer_bounds(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Ratios to the peers of one line."""
    found = []
    if row["tokens"] == 16383 and "reference_save_ms" in row:
        found.append(results.bound("save 16384 x reference", ">= 15", row["reference_save_ms"] / row["save_ms"]))
        found.append(results.bound("load 16384 x reference", ">= 8", row["reference_load_ms"] / row["load_ms"]))
    if "engine_save_ms" in row and row["tokens"] >= 16383:
        for way in ("save", "load"):
            ratio = row[f"{way}_gbps"] / row[f"engine_{way}_gbps"]
            found.append(results.bound(f"{way} {row['tokens'] + 1} x engine kernels", ">= 1.0", ratio))
    return found


def device_bounds(subject: Subject, arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Launch counts, describing cost and the gather."""
    found = []
    by_tokens = {row["tokens"]: row for row in rows}
    for tokens in (2047, 65535):
        if tokens not in by_tokens:
            continue
        seconds, with_wait = subject.describing(tokens)
        row = by_tokens[tokens]
        row |= {"describe_us": seconds * 1e6, "describe_and_wait_us": with_wait * 1e6}
        row["save_enqueue_us"], row["save_blocked_us"] = (second * 1e6 for second in subject.blocked(tokens))
        if tokens == 2047:
            found.append(results.bound("describe 2048, us", "<= 150", seconds * 1e6))
        else:
            found.append(results.bound("describe 65536, share of the load", "<= 0.05", seconds * 1e3 / row["load_ms"]))
        row["launches"] = subject.launches(tokens)
        print(
            f"{tokens}: describing {seconds * 1e6:.0f} us ({with_wait * 1e6:.0f} with the wait for the place), "
            f"a save is enqueued after {row['save_enqueue_us']:.0f} us, (kernels, copies) {row['launches']}"
        )
    if arguments.model == "flash":
        row = gather(arguments.device)
        print("get_k_and_s, 65536 rows:", {key: round(value, 3) for key, value in row.items()})
        rows.append({"tokens": 0, "get_k_and_s": row})
        found.append(results.bound("get_k_and_s x torch gather", ">= 20", row["x_torch"]))
        found.append(results.bound("get_k_and_s of the device copy", ">= 0.70", row["of_copy"]))
        rows.pop()
    return found


if __name__ == "__main__":
    main()
