"""Pools and requests as the oracle's own tests use them."""

from __future__ import annotations

from typing import Any

import oracle
import torch

from sglang_dsv4.engine import standalone
from sglang_dsv4.engine.standalone import PoolSpec

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 511, 512, 513, 1000)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = PoolSpec(pages=8, swa_pages=7, device=DEVICE)


def build(spec: PoolSpec = SPEC) -> tuple[Any, Any]:
    """A pool and its allocator."""
    pool = standalone.make_pool(spec)
    return pool, standalone.make_allocator(spec, pool)


def request_of(allocator: Any, n: int, req_slot: int = 2) -> oracle.Request:
    """A request that does not start on the first page, with window eviction done as in decode."""
    request = oracle.new_request(allocator, req_slot, n)
    oracle.evict_out_of_window(allocator, request)
    return request
