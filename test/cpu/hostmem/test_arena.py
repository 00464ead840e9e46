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

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem import arena, regions
from sglang_dsv4.hostmem.arena import Arena
from sglang_dsv4.hostmem.board import Board
from sglang_dsv4.hostmem.memory import HostMemory
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


def test_parts_and_regions_begin_with_a_page_where_pages_have_64_kib(cuda, monkeypatch):
    """A page cannot be registered twice, and memory gets its pages from a page's begin on."""
    page, populated = 64 << 10, []
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": page}.__getitem__)
    monkeypatch.setattr(regions, "CHUNK_BYTES", 4_000_000)
    monkeypatch.setattr(arena, "populate", lambda address, nbytes, *_: populated.append((address, nbytes)))
    counts = {Group.PAGED: 300, Group.WINDOW: 7, Group.REQUEST: 5}
    memory = HostMemory(init_groups(Geometry(SMALL_RATIOS)), counts, pin=True)
    base = memory.arena.region.data_ptr()
    parts = [(at - base, nbytes) for kind, at, nbytes, *_ in cuda.calls if kind == "register"]
    assert len(parts) > 3 and all(first % page == 0 for first, _ in parts)
    assert [first + nbytes for first, nbytes in parts] == [*(first for first, _ in parts[1:]), memory.arena.nbytes]
    assert populated == [(base, memory.arena.nbytes)]
    assert any(region.packed.block_stride % page for region in memory.regions.values())
    for region in memory.regions.values():
        stride = region.packed.block_stride
        assert region.start % page == 0 and region.chunk * stride % page == 0
        assert region.nbytes >= region.blocks * stride
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
