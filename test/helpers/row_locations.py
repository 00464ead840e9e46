"""Locations of rows in a buffer: shuffled, repeated, out of range in every way."""

from __future__ import annotations

import torch
from builders import DEVICE

INT32_MIN, INT64_MIN, INT64_MAX = -(2**31), -(2**63), 2**63 - 1


def locations(n: int, total: int, dtype: torch.dtype, seed: int = 2) -> torch.Tensor:
    """Shuffled, and repeated where n allows; the last row of the buffer is among them."""
    generator = torch.Generator().manual_seed(seed)
    loc = torch.randint(0, total, (n,), generator=generator)
    loc[n // 2 : n // 2 + 1] = total - 1
    return loc.to(dtype).to(DEVICE)


def distinct(n: int, total: int, dtype: torch.dtype, seed: int = 3) -> torch.Tensor:
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:n].to(dtype).to(DEVICE)


def hostile(total: int, dtype: torch.dtype) -> list[int]:
    """Bad locations, among them values that a narrowing to 32 bits would bring back into range."""
    bad = [INT32_MIN, -1, total, total + 1, 2**31 - 1]
    if dtype == torch.int64:
        bad += [INT64_MIN, INT64_MAX, 2**32, 2**32 + 1, -(2**32), 2**32 + total - 1]
    return bad


def mixed(total: int, dtype: torch.dtype) -> torch.Tensor:
    """Each bad location between two good ones."""
    good = distinct(total, total, dtype).tolist()
    mix = [good.pop()]
    for bad in hostile(total, dtype):
        mix += [bad, good.pop()]
    return torch.tensor(mix, dtype=dtype, device=DEVICE)
