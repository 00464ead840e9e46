"""A forward reads a request's rows and writes new ones: here it does just that, and names what it would read wrong."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dsv4.cli.ledger import left_by_prefill, locations, parts
from sglang_dsv4.miniature.content import PrefixLedger


class WrongRows(AssertionError):
    """A step would have read, or the tree would have handed out, bytes that are not those of the tokens."""


def check_reads(pool: Any, ledger: PrefixLedger, slots: torch.Tensor, row: int, whom: str) -> None:
    """What the step after ``slots`` reads is right; raises WrongRows that names the first bytes."""
    wrong = ledger.mismatches(pool, slots, row)
    if wrong:
        raise WrongRows(f"{whom}, {len(slots)} tokens: {'; '.join(wrong[:4])}")


def write(pool: Any, ledger: PrefixLedger, slots: torch.Tensor, first: int, row: int, decode: bool) -> None:
    """Write positions first..len(slots)-1 as a prefill does, or a decode step."""
    for part in parts(pool):
        positions, rows = locations(part, pool, slots, first, row)
        if part.ring and not decode:
            kept = left_by_prefill(part, positions, len(slots))
            positions, rows = positions[kept], rows[kept]
        ledger.put(part, positions, rows)
