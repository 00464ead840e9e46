"""What locate must find, one position after the other; what lies behind its outputs stays as it was."""

from __future__ import annotations

import torch
from guarded import DEVICE

from triton_ops.cases.locate import Located
from triton_ops.copy_rows import PAGE_NUMBERS
from triton_ops.locate import NOT_MAPPED, NOTHING, OFF_PAGE, OFF_SWA_PAGE, TILE, report_size

POISON, SPARE = -77, 3
SLOT = 2**31 - 1


def fault_of(c: Located, position: int) -> int:
    """What is wrong with a position: 0, or one of the three."""
    in_page = position % c.page
    base, slot, last = c.slots[position - in_page], c.slots[position], len(c.mapping) - 1
    if not 0 <= slot < last or base % c.page or not 0 <= base // c.page < c.limits[0] or slot - base != in_page:
        return OFF_PAGE
    if position < c.start:
        return 0
    swa = c.mapping[slot]
    if swa <= 0:
        return NOT_MAPPED
    first_slot = c.slots[max(position - in_page, c.start)]
    swa_page = c.mapping[first_slot] // c.page if 0 <= first_slot < last else 0
    if swa % c.page != in_page or swa // c.page >= c.limits[1] or swa // c.page != swa_page:
        return OFF_SWA_PAGE
    return 0


def expected(c: Located) -> tuple[list[int | None], list[int]]:
    """(SWA pages of the window, entries of the tiles); None: a number below 1, whichever."""
    tokens, last = len(c.slots), len(c.mapping) - 1
    heads = {max(p // c.page * c.page, c.start): None for p in range(c.start, tokens)}  # kept in order
    swa_pages = []
    for position in heads:
        slot = c.slots[position]
        swa = c.mapping[slot] if 0 <= slot < last else 0
        swa_pages.append(swa // c.page if swa > 0 else None)
    tiles = []
    for tile in range(0, max(tokens, 1), TILE):
        faults = ((p, fault_of(c, p)) for p in range(tile, min(tile + TILE, tokens)))
        tiles.append(next((4 * p + fault for p, fault in faults if fault), NOTHING))
    return swa_pages, tiles


def tensors(c: Located, dtype: torch.dtype, skip: int = 0, device: str = DEVICE):
    """(indices, mapping, page numbers, report); the indices start ``skip`` entries behind an aligned address."""
    slots = torch.tensor([0] * skip + c.slots, dtype=dtype).to(device)[skip:]
    mapping = torch.tensor(c.mapping, dtype=torch.int64).to(device)
    numbers = torch.full((PAGE_NUMBERS + SPARE,), POISON, dtype=torch.int64, device=device)
    report = torch.full((report_size(len(c.slots)) + SPARE,), POISON, dtype=torch.int64)
    return slots, mapping, numbers, report if device == "cpu" else report.pin_memory()


def same(wanted: list[int | None], have: list[int]) -> bool:
    return all(number < 1 if want is None else number == want for want, number in zip(wanted, have, strict=True))


def check(op, c: Located, dtype: torch.dtype = torch.int64, skip: int = 0, device: str = DEVICE) -> list[int]:
    """The entries of the tiles, compared with the loop like everything else; the inputs stay as they were."""
    wanted, tiles = expected(c)
    slots, mapping, numbers, report = tensors(c, dtype, skip, device)
    op(slots, mapping, SLOT, c.page, c.start, c.limits, numbers[:PAGE_NUMBERS], report)
    if device == "cuda":
        torch.cuda.synchronize()
    assert (slots.tolist(), mapping.tolist()) == (c.slots, c.mapping)
    (slot, *swa_pages), report = numbers[:PAGE_NUMBERS].tolist(), report.tolist()
    assert slot == SLOT
    assert same(wanted, swa_pages[: len(wanted)])
    assert swa_pages[len(wanted) :] == [-1] * (PAGE_NUMBERS - 1 - len(wanted))
    assert report[:-SPARE] == tiles
    assert numbers[PAGE_NUMBERS:].tolist() == report[-SPARE:] == [POISON] * SPARE
    return tiles


def check_fault(op, c: Located, position: int, fault: int) -> None:
    """A single fault, without the loop's word for it."""
    tiles = check(op, c)
    wanted = [NOTHING] * len(tiles)
    wanted[position // TILE] = 4 * position + fault
    assert tiles == wanted
