"""Generates the cases of each op, the same for the interpreter and the card.

A case holds plain numbers, which a slow loop in a test can follow; tensors are made of it for a device. Each op has
small cases of awkward sizes, for the interpreter, and REAL ones, as large as a server's: those are compared on a GPU
by test/gpu. TRITON_OPS_WIDE=1 widens the small grids.
"""

from __future__ import annotations

import os
from typing import Any

import torch

WIDE = os.environ.get("TRITON_OPS_WIDE") == "1"
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def bad_indices(end: int, dtype: torch.dtype = torch.int64) -> list[int]:
    """Lists indices outside [0, end), among them those that a narrowing to 32 bits would bring back into range."""
    bad = [INT32_MIN, -1, end, end + 1, INT32_MAX]
    if dtype == torch.int64:
        bad += [INT64_MIN, INT64_MIN + 1, INT64_MAX, 2**31, 2**32, 2**32 + 1, -(2**32), 2**32 + end - 1]
    return bad


def noise(*shape: int, seed: int, device: Any = "cpu") -> torch.Tensor:
    """Makes random bytes on ``device``."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device=device)
