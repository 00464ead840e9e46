"""Builders that several test files share: guarded memory, counted kernels, fake events, small pools."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import torch

from sglang_dsv4.cache.families import Geometry, Group
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.cache.rows import Place, Spans, plan
from sglang_dsv4.engine.standalone import PoolSpec, make_allocator, make_pool
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.pools.describe import describe
from sglang_dsv4.transfer.buffers import DeviceBuffers
from sglang_dsv4.transfer.locate import Request
from triton_ops._launch import Launcher

FLASH_RATIOS = (0, 0, *((4, 128) * 20), 4)
PRO_RATIOS = (128, *((128, 4) * 30))
SMALL_RATIOS = (0, 4, 128, 4)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NO_CUDA = INTERPRETED or not torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(NO_CUDA, reason="no CUDA device: compiled kernels cannot run")

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
POISON = 0xA5
# Wider than any page or host block of a kernel test, so that one step past either end still lands in a guard;
# a multiple of 16, so that what lies between two guards keeps the alignment of an allocation.
GUARD = 1 << 16


# ------------------------------------------------------------------------------------- guarded memory


class Guarded:
    """``nbytes`` bytes between two guards; ``read`` returns the guards too."""

    def __init__(self, nbytes: int, device: str, pin: bool = False) -> None:
        self.whole = torch.empty(nbytes + 2 * GUARD, dtype=torch.uint8, device=device, pin_memory=pin)
        self.inner = self.whole[GUARD : GUARD + nbytes]
        assert self.inner.data_ptr() % 16 == 0

    def noise(self, seed: int) -> None:
        """Random bytes everywhere, guards included."""
        generator = torch.Generator().manual_seed(seed)
        self.whole.copy_(torch.randint(0, 256, self.whole.shape, dtype=torch.uint8, generator=generator))

    def poison(self) -> None:
        """One byte everywhere, guards included."""
        self.whole.fill_(POISON)

    def read(self) -> bytearray:
        """All bytes."""
        if self.whole.is_cuda:
            torch.cuda.synchronize()
        return bytearray(self.whole.cpu().numpy().tobytes())


def assert_bytes(name: str, wanted: bytes | bytearray, found: bytes | bytearray) -> None:
    """Name the first byte that differs; offsets count from the end of the first guard."""
    assert len(wanted) == len(found), f"{name}: {len(found)} bytes, wanted {len(wanted)}"
    if bytes(wanted) == bytes(found):
        return
    where = next(i for i in range(len(wanted)) if wanted[i] != found[i])
    raise AssertionError(f"{name}, byte {where - GUARD}: wanted {wanted[where]}, found {found[where]}")


# ------------------------------------------------------------------------------------------- launches


class Counted:
    """Stands for a kernel: counts the launches, and runs them where it has a kernel to run."""

    def __init__(self, kernel: Any = None) -> None:
        self.kernel = kernel
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.grids.append(grid)
            if self.kernel is not None:
                self.kernel[grid](*args, **kwargs)

        return launch


def count_launches(patch: pytest.MonkeyPatch, launcher: Launcher, run: bool = True) -> Counted:
    """Put a Counted in the place of ``launcher``'s kernel, and let it forget its variants. ``run``: launch it too."""
    counted = Counted(launcher.kernel if run else None)
    patch.setattr(launcher, "kernel", counted)
    patch.setattr(launcher, "_variants", {})
    return counted


class FakeEvent:
    """An event that passes when it is told to, or when it is waited for."""

    def __init__(self) -> None:
        self.passed = False
        self.waits = 0

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waits += 1
        self.passed = True


# ------------------------------------------------------------------------------- host memory, requests


def host_memory(
    ratios: tuple[int, ...] = SMALL_RATIOS, blocks: int = 8, copies: int = 3, pin: bool = False, **geometry: Any
) -> tuple[HostMemory, Geometry]:
    """Host memory of ``blocks`` token blocks and room for ``copies`` copies."""
    g = Geometry(ratios, **geometry)
    counts = {Group.PAGED: blocks, Group.WINDOW: copies, Group.REQUEST: copies}
    return HostMemory(init_groups(g), counts, pin), g


def place(tokens: int, seed: int = 0, slot: int = 2, pool_pages: int = 0, window: int = 128) -> Place:
    """A request on scattered full and SWA pages; every SWA page keeps its slots in order."""
    rng = np.random.default_rng(seed)
    count = -(-tokens // 256)
    pool_pages = pool_pages or 2 * count + 4
    pages = 1 + rng.permutation(pool_pages - 1)[:count]
    swa_pages = 1 + rng.permutation(pool_pages - 1)[:count]
    swa = [int(swa_pages[p // 256]) * 256 + p % 256 for p in range(max(0, tokens - (window - 1)), tokens)]
    return Place(tokens, pages.astype(np.int64), np.array(swa, dtype=np.int64), slot)


def int64(values: Iterable[int]) -> torch.Tensor:
    """A 1-D int64 tensor that the device under test can read."""
    tensor = torch.tensor(list(values), dtype=torch.int64)
    return tensor if INTERPRETED else tensor.pin_memory()


# ---------------------------------------------------------------------------------------- real pools


@dataclass
class Served:
    """A real pool with its allocator, its device side, and host memory beside it."""

    pool: Any
    allocator: Any
    side: DeviceBuffers
    memory: HostMemory

    def start(self, tokens: int, slot: int) -> oracle.Request:
        """A request of ``tokens`` saved tokens, window evicted as in decode."""
        request = oracle.new_request(self.allocator, slot, tokens)
        oracle.evict_out_of_window(self.allocator, request)
        return request

    def resume(self, tokens: int, slot: int) -> oracle.Request:
        """The same request in new pages, with only the window mapped."""
        return oracle.Request(oracle.resume(self.allocator, tokens), slot, tokens)

    def place(self, request: oracle.Request) -> Place:
        """Read token by token where the request lies."""
        n, mapping = request.n, self.pool.full_to_swa_index_mapping.cpu()
        slots = request.slots.cpu().tolist()
        pages = [slots[position] // 256 for position in range(0, n, 256)]
        swa = [int(mapping[slots[position]]) for position in range(max(0, n - 127), n)]
        return Place(n, np.array(pages, np.int64), np.array(swa, np.int64), request.req_slot)

    def request(self, request: oracle.Request) -> Request:
        """``request`` as the copier takes it: int32 slots, as the engine keeps them."""
        return Request(
            request.slots[: request.n].to(torch.int32), self.pool.full_to_swa_index_mapping, request.req_slot
        )

    def plan(self, request: oracle.Request) -> tuple[Spans, ...]:
        """The spans of ``request``."""
        return plan(self.side.geometry, self.side.families, self.place(request))


def served(ratios: tuple[int, ...] = SMALL_RATIOS, blocks: int = 8, copies: int = 3, **spec: Any) -> Served:
    """A real pool of the installed engine and unattached host memory for it."""
    made = PoolSpec(ratios, **{"pages": 9, "swa_pages": 9, "requests": 4, "device": DEVICE, **spec})
    pool = make_pool(made)
    allocator = make_allocator(made, pool)
    side = describe(pool)
    counts = {Group.PAGED: blocks, Group.WINDOW: copies, Group.REQUEST: copies}
    memory = HostMemory(init_groups(side.geometry), counts, pin=DEVICE == "cuda")
    memory.arena.region.fill_(POISON)
    return Served(pool, allocator, side, memory)


def wait() -> None:
    """Until the device under test is idle."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
