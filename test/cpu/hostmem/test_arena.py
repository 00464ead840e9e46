"""The arena: aligned, exact in size, pinned by registration, a named error where there is no room."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem import arena
from sglang_dsv4.hostmem.arena import Arena


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 1_000_000])
def test_size_and_alignment(nbytes):
    region = Arena(nbytes, pin=False)
    assert region.region.data_ptr() % 4096 == 0
    assert (region.region.dtype, region.region.shape, region.nbytes) == (torch.uint8, (nbytes,), nbytes)
    region.region.fill_(7)  # all of it is memory
    assert int(region.region[-1]) == 7


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


def test_ram_that_went_since_it_was_measured_is_noticed_before_pinning(cuda, monkeypatch):
    monkeypatch.setattr(arena, "free_ram", lambda: 9_999)
    with pytest.raises(HostMemoryExhausted, match=r"0\.00 GiB of RAM are left; lower DSV4_HOST_GB"):
        Arena(10_000, pin=True)
    assert cuda.calls == []
    Arena(9_999, pin=True)
