"""Checks locate against its torch twin; nothing behind its outputs may change."""

import torch
from guarded import DEVICE

from triton_ops.cases.locate import Located
from triton_ops.copy_rows import PAGE_NUMBERS
from triton_ops.locate import locate, locate_torch, report_size

POISON, SPARE = -77, 3
SLOT = 2**31 - 1


def tensors(c: Located, dtype: torch.dtype, skip: int = 0, device: str = DEVICE):
    """Gives (indices, mapping, page numbers, report); the indices start ``skip`` entries behind an aligned address."""
    slots = torch.tensor([0] * skip + c.slots, dtype=dtype).to(device)[skip:]
    mapping = torch.tensor(c.mapping, dtype=torch.int64).to(device)
    numbers = torch.full((PAGE_NUMBERS + SPARE,), POISON, dtype=torch.int64, device=device)
    report = torch.full((report_size(len(c.slots)) + SPARE,), POISON, dtype=torch.int64)
    return slots, mapping, numbers, report if device == "cpu" else report.pin_memory()


def run(op, c: Located, dtype: torch.dtype, skip: int, device: str) -> tuple[list[int], list[int]]:
    """Returns (page numbers, report), the bytes behind them included; the inputs stay as they were."""
    slots, mapping, numbers, report = tensors(c, dtype, skip, device)
    op(slots, mapping, SLOT, c.page, c.start, c.limits, numbers[:PAGE_NUMBERS], report)
    if device == "cuda":
        torch.cuda.synchronize()
    assert (slots.tolist(), mapping.tolist()) == (c.slots, c.mapping)
    return numbers.tolist(), report.tolist()


def check(c: Located, dtype: torch.dtype = torch.int64, skip: int = 0, device: str = DEVICE) -> list[int]:
    """Returns the entries of the tiles; these and the page numbers (below 1: no page) are those of the twin."""
    wanted, found = (run(op, c, dtype, skip, device) for op in (locate_torch, locate))
    assert all(want == have or max(want, have) < 1 for want, have in zip(wanted[0], found[0], strict=True))
    assert found[0][0] == SLOT and found[0][PAGE_NUMBERS:] == found[1][-SPARE:] == [POISON] * SPARE
    assert found[1] == wanted[1]
    return found[1][:-SPARE]
