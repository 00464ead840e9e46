"""Checks copy_pages between guards against its torch twin."""

import copy

import torch
from guarded import DEVICE, GUARD, Memories

from triton_ops.cases.copy_pages import PAGE_SHAPES, PagesCase, slots_of
from triton_ops.copy_pages import PageTable, copy_pages_torch

BLOCKS = 6
SLACK = 48  # bytes behind the last whole block
EMPTY_CASE = PagesCase(PAGE_SHAPES, BLOCKS, [])


class World(Memories):
    def __init__(self, save: bool, case: PagesCase = EMPTY_CASE, device: str = DEVICE) -> None:
        assert max(width for width, _ in case.shapes) <= GUARD
        super().__init__(save, case.shapes, case.host_blocks * case.stride + SLACK, device)
        self.case, self.table = case, PageTable.of(self.views, case.offsets, case.stride)


def check(
    world: World, op, save: bool, firsts: list[int] | None = None, dtype: torch.dtype = torch.int64, skip: int = 0,
    last: int = 1, pages: range | None = None,
) -> None:  # fmt: skip
    """Copies the pages of these first slots, or those of the world's case; no other byte changes.

    pages: of them, those that are to be copied.
    """
    firsts, page = world.case.firsts if firsts is None else firsts, world.case.page
    slots = slots_of(firsts, page, dtype, skip, last).to(world.buffers[0].whole.device)
    twin, kept = copy.deepcopy(world), slots.tolist()
    wanted = slots if pages is None else slots_of(firsts[pages.start : pages.stop], page, dtype).to(slots.device)
    copy_pages_torch(twin.table, twin.memory, wanted, page, save)
    op(world.table, world.memory, slots, page, save, *(() if pages is None else (pages,)))
    assert slots.tolist() == kept
    world.assert_holds(twin.read())
