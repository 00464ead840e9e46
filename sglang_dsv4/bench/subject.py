"""Builds the subject of the transfer benchmarks: a pool with requests scattered over it, and the machine's link."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any

import torch

from sglang_dsv4.pools.copy_service import whole_every
from sglang_dsv4.sessions.store import SessionStore
from sglang_dsv4.settings import Settings, read_settings
from sglang_dsv4.testing.standalone import PoolSpec, make_allocator, make_pool
from sglang_dsv4.transfer.copier import Copier

SETS = 4  # page sets in rotation
TURN = 2560  # tokens that a turn adds to a session


def sync() -> None:
    """Waits for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wall(run: Callable[[int], Any], count: int) -> float:
    """Returns the median seconds of ``run(i)`` until the device is done, after warm-up."""
    times = []
    for i in range(count + 3):
        sync()
        started = time.perf_counter()
        run(i)
        sync()
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


def link_limit(device: str, host: torch.Tensor | None = None) -> tuple[float, float]:
    """Returns the bytes a second of one copy: to the host, to the device. Without a GPU they have no meaning.

    host: pinned memory, which is written to; without it 1 GiB that torch pins, less without a GPU.
    """
    if host is None:
        size = 2**30 if device == "cuda" else 2**26
        host = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    nbytes = len(host)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device).random_(0, 256)
    save = wall(lambda _: host.copy_(there, non_blocking=True), 9)
    load = wall(lambda _: there.copy_(host, non_blocking=True), 9)
    return nbytes / save, nbytes / load


class Subject:
    """Holds a pool with requests scattered over it."""

    def __init__(self, ratios: tuple[int, ...], pages: int, device: str, sources: tuple[int, ...] = ()) -> None:
        """sources: of ``PoolSpec``. The copier is that of DSV4_TRANSFER."""
        self.device = device
        self.spec = PoolSpec(ratios=ratios, pages=pages, swa_pages=24, requests=8, device=device, sources=sources)
        self.pool: Any = make_pool(self.spec)
        make_allocator(self.spec, self.pool)
        self.pool.attach_host(Settings(host_gb=pages * 1.6e6 / 2**30 + 0.4, transfer=read_settings().transfer))
        self.host = self.pool.host
        for buffers in self.host.buffers.buffers.values():
            for buffer in buffers:
                buffer.random_(0, 256)

    def place(self, tokens: int, seed: int) -> torch.Tensor:
        """Returns slots of a request over random pages, its window mapped to random SWA pages."""
        generator = torch.Generator().manual_seed(seed)
        count = -(-tokens // 256)
        pages = (torch.randperm(self.spec.pages, generator=generator)[:count] + 1) * self.pool.page_stride
        slots = (pages[:, None] * 256 + torch.arange(256)).reshape(-1)[:tokens]
        first = max(0, tokens - 128) // 256
        swa = torch.randperm(self.spec.swa_pages, generator=generator)[: count - first] + 1
        tail = slots[first * 256 :]
        where = (swa[:, None] * 256 + torch.arange(256)).reshape(-1)[: len(tail)]
        self.pool.full_to_swa_index_mapping[tail.to(self.device)] = where.to(self.device)
        return slots.to(self.device, torch.int32)

    def page_bytes(self, tokens: int) -> int:
        """Returns bytes of the whole pages."""
        pages = -(-tokens // 256)
        return sum(pages * f.page_bytes * len(f.layers) for f in self.host.buffers.families if f.whole_pages)

    def live_bytes(self, tokens: int) -> int:
        """Returns the bytes that have to move: whole pages, and the live rows of window and states."""
        buffers = self.host.buffers
        return sum(family.moved_bytes(buffers.geometry.page_size, tokens) for family in buffers.families)

    def measure(self, tokens: int, count: int) -> tuple[float, float]:
        """Returns median seconds of a save and of a load."""
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

    def measure_point(self, tokens: int, count: int) -> tuple[float, float] | None:
        """Measures a session at ``tokens``; None where there can be no point.

        Returns median seconds of a load, and of the host's work for the save of a turn that goes on from there.
        """
        whole = whole_every(self.host.buffers)
        if not whole or tokens % whole:
            return None
        store = SessionStore(self.host, lambda: self.pool.full_to_swa_index_mapping, False, None)
        places = [self.place(tokens, seed) for seed in range(SETS)]
        later, ids, saves = self.place(tokens + TURN, 0), array("q", [0]) * (tokens + TURN), []
        point = store.keep("", lambda first: ids[first:], places[0])
        assert point is not None
        load = wall(lambda i: store.load(point, places[i % SETS], 0), count)
        for i in range(count):
            ids[tokens:] = array("q", [1 + i]) * TURN
            sync()
            started = time.perf_counter()
            turn = store.keep("", lambda first: ids[first:], later, behind=point)
            saves.append(time.perf_counter() - started)
            assert turn is not None
            store.supersede(turn)  # the first to go when there is no room
        store.clear("flush")
        self.host.memory.cache = None
        return load, statistics.median(saves)

    def arena_limit(self) -> tuple[float, float]:
        """Measures as ``link_limit`` does, with the memory that copies lie in; there must be none."""
        memory = self.host.memory
        nbytes = min(memory.pool.total, memory.chunk) * memory.units.nbytes
        return link_limit(self.spec.device, memory.arena.region[: min(nbytes, 2**30)])

    @property
    def has_copier(self) -> bool:
        """Returns whether its copies go the way of a GPU."""
        return isinstance(self.host._copier, Copier)

    def enqueuing(self, tokens: int) -> tuple[float, float]:
        """Returns median host seconds until a save only waits for its copies, and until a load returns."""
        slots, copier = self.place(tokens, 1), self.host._copier
        saves, loads, ends, end = [], [], list[float](), copier._end

        def ended(*transfer: Any) -> Any:
            event = end(*transfer)
            ends.append(time.perf_counter())
            return event

        copier._end = ended
        for _ in range(50):
            sync()
            ends.clear()
            started = time.perf_counter()
            copy = self.pool.get_cpu_copy(slots, req_pool_index=1)
            saves.append(ends[0] - started)
            sync()
            started = time.perf_counter()
            self.pool.load_cpu_copy(copy, slots, req_pool_index=1)
            loads.append(time.perf_counter() - started)
        copier._end = end
        sync()
        return statistics.median(saves), statistics.median(loads)
