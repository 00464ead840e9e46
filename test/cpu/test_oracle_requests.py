"""Requests of the oracle take, lose and give back pages as the engine's do."""

from __future__ import annotations

import oracle
import pytest
import torch
from oracle_pools import DEVICE, build


def test_grow_in_pieces_evict_and_release() -> None:
    _, allocator = build()
    full, swa = allocator.full_available_size(), allocator.swa_available_size()
    request = oracle.new_request(allocator, 1)
    for piece in (3, 1, 252, 1, 300, 443):
        oracle.grow(allocator, request, piece)
    assert request.n == len(request.slots) == 1000
    assert len(request.slots.unique()) == 1000
    assert torch.equal(request.slots % 256, torch.arange(1000, device=DEVICE) % 256)
    mapped = allocator.full_to_swa_index_mapping[request.slots]
    assert torch.equal(mapped % 256, request.slots % 256)
    assert allocator.full_available_size() == full - 4 * 256
    assert allocator.swa_available_size() == swa - 4 * 256
    oracle.evict(allocator, request.slots, 872)
    oracle.evict_out_of_window(allocator, request)  # the same, once more
    mapped = allocator.full_to_swa_index_mapping[request.slots]
    assert bool((mapped[:768] == 0).all())
    assert bool((mapped[768:] > 0).all())
    assert allocator.swa_available_size() == swa - 256
    oracle.release(allocator, request.slots)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (full, swa)


@pytest.mark.parametrize(
    ("n", "tail"),
    ((1, 1), (127, 127), (383, 383), (384, 128), (385, 129), (639, 383), (640, 128), (1000, 232)),
)
def test_resume_maps_the_tail(n: int, tail: int) -> None:
    pool, allocator = build()
    full, swa = allocator.full_available_size(), allocator.swa_available_size()
    slots = oracle.resume(allocator, n)
    assert oracle.swa_tail(allocator, n) == tail
    mapped = allocator.full_to_swa_index_mapping[slots]
    assert bool((mapped[: n - tail] == 0).all())
    assert bool((mapped[n - tail :] > 0).all())
    assert len(oracle.read(pool, slots, n, 1)) > 0
    request = oracle.Request(slots, 1, n)
    oracle.grow(allocator, request, 1)
    assert len(request.slots) == n + 1
    oracle.release(allocator, request.slots)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (full, swa)
