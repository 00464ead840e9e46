"""The arena is pinned part by part, and names the setting where there is no room."""

from __future__ import annotations

import gc
import os
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from builders import SMALL_RATIOS

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.units import Units
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem import arena
from sglang_dsv4.hostmem import memory as memory_module
from sglang_dsv4.hostmem.arena import Arena
from sglang_dsv4.hostmem.board import Board
from sglang_dsv4.hostmem.memory import HostMemory
from sglang_dsv4.hostmem.sizing import ArenaSize
from sglang_dsv4.pools.copy_service import CopyService
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import PoolSpec, make_pool


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 60])
def test_no_room_names_the_setting(nbytes):
    with pytest.raises(HostMemoryExhausted, match=rf"{re.escape(f'{nbytes / 2**30:.2f}')} GiB.*lower DSV4_HOST_GB"):
        Arena(nbytes, pin=False)


@pytest.fixture
def cuda(monkeypatch):
    """A driver; returns its answers and what it was called with."""
    calls = []
    driver = SimpleNamespace(
        answer=0,
        calls=calls,
        cudaHostRegister=lambda *args: calls.append(("register", *args)) or driver.answer,
        cudaHostUnregister=lambda *args: calls.append(("unregister", *args)) or 0,
    )
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: driver))
    return driver


def test_pinning_registers_exactly_the_region_and_closes_once(cuda):
    region = Arena(10_000, pin=True)
    start = region.region.data_ptr()
    assert region.pinned
    assert cuda.calls == [("register", start, 10_000, 0)]
    region.close()
    region.close()
    assert not region.pinned
    assert cuda.calls[1:] == [("unregister", start)]
    Arena(4096, pin=False).close()
    assert len(cuda.calls) == 2


def test_a_refused_pin_names_the_setting_and_the_limit(cuda):
    cuda.answer = 2
    with pytest.raises(HostMemoryExhausted, match=r"CUDA error 2.*DSV4_HOST_GB.*ulimit -l"):
        Arena(10_000, pin=True)


@pytest.mark.parametrize(("most", "units_a_part"), [(4_000_000, 32), (1, 16)])
def test_parts_begin_with_a_page_where_pages_have_64_kib(cuda, monkeypatch, most, units_a_part):
    """A page cannot be registered twice, and memory gets its pages from a page's begin on. 23 pages of 4 KiB are a
    unit, so that 16 units end with a page."""
    page, populated, g = 64 << 10, [], Geometry(SMALL_RATIOS)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": page}.__getitem__)
    monkeypatch.setattr(memory_module, "CHUNK_BYTES", most)
    monkeypatch.setattr(arena, "populate", lambda address, nbytes, *_: populated.append((address, nbytes)))
    memory = HostMemory(families(g), ArenaSize(Units.of(g), 301), pin=True)
    base, part = memory.arena.region.data_ptr(), units_a_part * 23 * 4096
    assert memory.chunk == units_a_part and memory.units.nbytes == 23 * 4096
    firsts = list(range(0, 301 * 23 * 4096, part))
    nbytes = -(-301 * 23 * 4096 // page) * page
    parts = [(at - base, size) for kind, at, size, *_ in cuda.calls if kind == "register"]
    assert parts == [(first, min(part, nbytes - first)) for first in firsts]
    assert all(first % page == 0 for first in firsts) and len(parts) > 3
    assert populated == [(base, nbytes)] and memory.arena.nbytes == nbytes
    memory.check_integrity()
    assert Board.bytes_for(3) == page, "the arena that ranks share begins behind it"
    memory.close()


def test_a_start_that_fails_leaves_no_memory_behind(monkeypatch):
    """The engine freezes the garbage collector after its warm-up: a cycle with the arena in it would stay for good."""
    arenas = []

    def no_room(host, fast):
        arenas.append(weakref.ref(host.memory.arena))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CopyService, "_make_copier", no_room)
    pool = make_pool(PoolSpec())
    gc.collect()
    gc.disable()
    try:
        assert pool.attach_host(Settings()) is None and "out of memory" in pool.refusal
        assert [arena() for arena in arenas] == [None]
    finally:
        gc.enable()
