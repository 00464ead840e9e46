"""Generates the engine's tables of a decode step, and whole steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from triton_ops.prep_args import VECTORS, Inputs, Outputs, Sizes

Make = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def prep_tables(
    lengths: list[int], context: int, seed: int = 0, room: int = 0
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Makes (req_to_token, full_to_swa, each request's slot): whole pages, mapped near a request's end only.

    The rest is left over from other requests. Slot 0 is the engine's padding. room: tokens behind a length that have
    slots too.
    """
    rng = np.random.default_rng(seed)
    pages_each, requests = -(-context // 256), len(lengths)
    full = rng.permutation(requests * pages_each) + 1
    swa = rng.permutation(2 * requests * 4) + 1
    slots = (rng.permutation(requests) + 1).tolist()
    table = rng.integers(0, (requests * pages_each + 1) * 256, size=(requests + 2, context), dtype=np.int32)
    mapping = np.zeros((requests * pages_each + 1) * 256 + 1, np.int64)
    mapping[-1] = -1
    for number, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        end = min(length + room, context)
        own = full[number * pages_each : (number + 1) * pages_each]
        position = np.arange(end)
        table[slot, :end] = own[position // 256] * 256 + position % 256
        tail = np.arange(max(0, length - 128) // 256 * 256, -(-end // 256) * 256)
        chosen = swa[number * 4 + (tail // 256) % 4]
        mapping[own[np.minimum(tail // 256, pages_each - 1)] * 256 + tail % 256] = chosen * 256 + tail % 256
    return table, mapping, slots


PREP_LENGTHS = (1, 2, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513)
REAL_PREP = (1, 32, 128)  # requests of up to REAL_CONTEXT tokens
REAL_CONTEXT = 16_384
PREP_SIZES = Sizes(256, 128, 256, 512, 8, 128, 0, 0)


def prep_outputs(sizes: Sizes, requests: int, queries: int, width: int, verify: bool, make: Make) -> Outputs:
    """Makes outputs for page tables of ``width`` pages. make: allocates one, of a shape and a dtype."""
    rows, wide, narrow = requests * queries, torch.int64, torch.int32
    columns = -(-width * sizes.page // 128 // 64) * 64
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((VECTORS, -(-rows // 4) * 4), narrow), ((requests + 1,), narrow), ((rows, width), narrow),
        ((rows, sizes.window), narrow), ((rows,), narrow), ((rows,), wide), ((rows, sizes.topk), narrow),
        ((rows,), wide), ((rows, columns), narrow), ((rows, 4), narrow), ((rows, 4), narrow),
    ]  # fmt: skip
    writes = [make((rows, 2), narrow) if verify else None for _ in range(2)]
    return Outputs(*(make(shape, dtype) for shape, dtype in shapes), *writes)


def prep_arguments(requests: int, seed: int = 0, device: Any = "cpu") -> tuple[Sizes, Inputs, Outputs]:
    """Makes the arguments of a plain decode step of requests of random lengths."""
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(1, REAL_CONTEXT, requests)]
    table, mapping, slots = prep_tables(lengths, REAL_CONTEXT, seed)
    locs = [int(table[slot, length - 1]) for slot, length in zip(slots, lengths, strict=True)]

    def up(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device)

    inputs = Inputs(
        up(slots, torch.int64), up(locs, torch.int64), up(lengths, torch.int64), up(table, torch.int32),
        up(mapping, torch.int64), queries=1, length_offset=0,
    )  # fmt: skip

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return PREP_SIZES, inputs, prep_outputs(PREP_SIZES, requests, 1, REAL_CONTEXT // 256, False, make)
