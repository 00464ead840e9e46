"""The arena: aligned, exact in size, pinned by registration, a named error where there is no room."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem.arena import Arena


@pytest.mark.parametrize("nbytes", [1, 16, 4095, 4096, 4097, 3 * 4096, 1_000_000])
def test_size_and_alignment(nbytes):
    arena = Arena(nbytes, pin=False)
    assert arena.region.data_ptr() % 4096 == 0
    assert (arena.region.dtype, arena.region.shape, arena.nbytes) == (torch.uint8, (nbytes,), nbytes)
    assert not arena.pinned
    arena.region.fill_(7)  # all of it is memory
    assert int(arena.region[-1]) == 7


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 60])
def test_no_room_names_the_setting(nbytes):
    with pytest.raises(HostMemoryExhausted, match=rf"{re.escape(f'{nbytes / 2**30:.2f}')} GiB.*lower DSV4_HOST_GB"):
        Arena(nbytes, pin=False)


class FakeCudart:
    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple] = []

    def cudaHostRegister(self, *args):
        self.calls.append(("register", *args))
        return self.code

    def cudaHostUnregister(self, *args):
        self.calls.append(("unregister", *args))
        return 0


def fake_cuda(monkeypatch, code: int) -> FakeCudart:
    fake = FakeCudart(code)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: fake))
    return fake


def test_pinning_registers_exactly_the_region_and_closes_once(monkeypatch):
    fake = fake_cuda(monkeypatch, 0)
    arena = Arena(10_000, pin=True)
    start = arena.region.data_ptr()
    assert arena.pinned
    assert fake.calls == [("register", start, 10_000, 0)]
    arena.close()
    arena.close()
    assert not arena.pinned
    assert fake.calls[1:] == [("unregister", start)]


def test_a_refused_pin_names_the_setting_and_the_limit(monkeypatch):
    fake_cuda(monkeypatch, 2)
    with pytest.raises(HostMemoryExhausted, match=r"CUDA error 2.*DSV4_HOST_GB.*ulimit -l"):
        Arena(10_000, pin=True)


def test_closing_an_unpinned_arena_calls_nothing(monkeypatch):
    fake = fake_cuda(monkeypatch, 0)
    Arena(4096, pin=False).close()
    assert fake.calls == []
