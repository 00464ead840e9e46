"""Builds fake events, host memory and small pools for several test files."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import torch
from guarded import DEVICE, POISON

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.rows import Place, Spans, find_spans
from sglang_dsv4.cache.units import Units
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.hostmem.sizing import ArenaSize
from sglang_dsv4.pools.describe import DraftPool, describe
from sglang_dsv4.testing.standalone import PoolSpec, make_allocator, make_draft_pool, make_pool
from sglang_dsv4.transfer.buffers import DeviceBuffers
from sglang_dsv4.transfer.locate import Request

SMALL_RATIOS = (0, 4, 128, 4)


class FakeEvent:
    """Plays an event that passes when it is told to, or when it is waited for."""

    def __init__(self) -> None:
        self.passed = False
        self.waits = 0

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waits += 1
        self.passed = True


# ------------------------------------------------------------------------------- host memory, requests


def host_memory(count: int = 64) -> tuple[HostMemory, Geometry]:
    """Returns host memory of ``count`` units."""
    g = Geometry(SMALL_RATIOS)
    return HostMemory(families(g), ArenaSize(Units.of(g), count), pin=False), g


def place(tokens: int, seed: int = 0, slot: int = 2, reach: int = 127, page: int = 256) -> Place:
    """Places a request on scattered full and SWA pages; each SWA page keeps its order. reach: of the window."""
    rng = np.random.default_rng(seed)
    count = -(-tokens // page)
    pages = 1 + rng.permutation(2 * count + 3)[:count]
    swa_pages = 1 + rng.permutation(2 * count + 3)[:count]
    swa = [int(swa_pages[p // page]) * page + p % page for p in range(max(0, tokens - reach), tokens)]
    return Place(tokens, pages.astype(np.int64), np.array(swa, dtype=np.int64), slot)


# ---------------------------------------------------------------------------------------- real pools


@dataclass
class Served:
    """Holds a real pool with its allocator, its device side, and host memory beside it."""

    pool: Any
    allocator: Any
    side: DeviceBuffers
    memory: HostMemory

    def start(self, tokens: int, slot: int) -> oracle.Request:
        """Returns a request of ``tokens`` saved tokens, window evicted as in decode."""
        request = oracle.new_request(self.allocator, slot, tokens)
        oracle.evict_out_of_window(self.allocator, request)
        return request

    def resume(self, tokens: int, slot: int) -> oracle.Request:
        """Returns the same request in new pages, with only the window mapped."""
        return oracle.Request(oracle.resume(self.allocator, tokens), slot, tokens)

    def place(self, request: oracle.Request) -> Place:
        """Reads token by token where the request lies."""
        n, mapping = request.n, self.pool.full_to_swa_index_mapping.cpu()
        slots = request.slots.cpu().tolist()
        pages = [slots[position] // 256 for position in range(0, n, 256)]
        swa = [int(mapping[slots[position]]) for position in range(max(0, n - 127), n)]
        return Place(n, np.array(pages, np.int64), np.array(swa, np.int64), request.req_slot)

    def request(self, request: oracle.Request) -> Request:
        """Returns ``request`` as the copier takes it: int32 slots, as the engine keeps them."""
        return Request(
            request.slots[: request.n].to(torch.int32), self.pool.full_to_swa_index_mapping, request.req_slot
        )

    def plan(self, request: oracle.Request) -> tuple[Spans, ...]:
        return find_spans(self.side.geometry, self.side.families, self.place(request))


def served(ratios: tuple[int, ...] = SMALL_RATIOS, units: int = 64, draft: int = 0, **spec: Any) -> Served:
    """Returns a real pool, and host memory of ``units`` not attached to it. draft: rows that a draft model reads."""
    made = PoolSpec(ratios, **{"pages": 9, "swa_pages": 9, "requests": 4, "device": DEVICE, **spec})
    pool = make_pool(made)
    allocator = make_allocator(made, pool)
    beside = oracle.DraftBeside(make_draft_pool(made, allocator), draft) if draft else None
    pool.draft_beside = beside
    side = describe(pool, draft=beside and DraftPool(beside.pool, beside.rows))
    memory = HostMemory(side.families, ArenaSize(Units.of(side.geometry), units), pin=DEVICE == "cuda")
    memory.arena.region.fill_(POISON)
    return Served(pool, allocator, side, memory)


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
