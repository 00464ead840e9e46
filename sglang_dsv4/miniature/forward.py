"""A forward reads a request's rows and writes new ones: here it does just that, and names what it would read wrong.

A prefill leaves few rows in the state rings, as the engine's planner has it (c_plan.cuh): those that the next step
reads, and in rings that lie with the window the last four of every window page. The engine may keep more; nobody may
count on it.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dsv4.cli.ledger import WINDOWED, Part, live_from, locations, parts
from sglang_dsv4.miniature.content import PrefixLedger
from sglang_dsv4.miniature.server import PAGE


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
            kept = _planned(part, positions, len(slots))
            positions, rows = positions[kept], rows[kept]
        ledger.put(part, positions, rows)


def _planned(part: Part, positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """Which of ``positions`` a prefill up to ``tokens`` writes into a state ring."""
    kept = positions >= live_from(part.family, tokens)
    return kept | (positions % PAGE >= PAGE - 4) if part.family in WINDOWED else kept
