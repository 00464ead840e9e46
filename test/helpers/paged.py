"""Guarded buffers for copy_pages, and a page-by-page loop that says what a call must leave in them."""

from __future__ import annotations

import torch
from guarded import DEVICE, GUARD, Contents, Memories

from triton_ops.cases.copy_pages import PAGE_SHAPES, PagesCase, slots_of
from triton_ops.copy_pages import PageTable

BLOCKS = 6
SLACK = 48  # bytes behind the last whole block
EMPTY_CASE = PagesCase(PAGE_SHAPES, BLOCKS, [])


class World(Memories):
    def __init__(self, save: bool, case: PagesCase = EMPTY_CASE, device: str = DEVICE) -> None:
        assert max(width for width, _ in case.shapes) <= GUARD
        super().__init__(save, case.shapes, case.host_blocks * case.stride + SLACK, device)
        self.case, self.table = case, PageTable.of(self.views, case.offsets, case.stride)


def expect(world: World, firsts: list[int], save: bool) -> Contents:
    """What all memory must hold afterwards: one page at a time, in plain Python."""
    devices, host = world.read()
    for block, slot in enumerate(firsts):
        page = slot // world.case.page
        for number, (width, count) in enumerate(world.case.shapes):
            if not (0 <= page < count and block < world.case.host_blocks):
                continue
            there = GUARD + page * width
            here = GUARD + block * world.case.stride + world.case.offsets[number]
            if save:
                host[here : here + width] = devices[number][there : there + width]
            else:
                devices[number][there : there + width] = host[here : here + width]
    return devices, host


def check(
    world: World, op, save: bool, firsts: list[int] | None = None, dtype: torch.dtype = torch.int64, skip: int = 0,
    last: int = 1,
) -> None:  # fmt: skip
    """Copy the pages of these first slots, or those of the world's case; no other byte changes."""
    firsts, page = world.case.firsts if firsts is None else firsts, world.case.page
    slots = slots_of(firsts, page, dtype, skip, last).to(world.buffers[0].whole.device)
    wanted, kept = expect(world, firsts, save), slots.tolist()
    op(world.table, world.memory, slots, page, save)
    assert slots.tolist() == kept
    world.assert_holds(wanted)
