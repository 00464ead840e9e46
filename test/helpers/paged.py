"""Guarded buffers for copy_pages, and a page-by-page loop that says what a call must leave in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from guarded import DEVICE, GUARD, Guarded, assert_bytes

from triton_ops.cases.copy_pages import PAGE_SHAPES, PagesCase, slots_of
from triton_ops.copy_pages import PageTable
from triton_ops.tables import host_words

BLOCKS = 6
SLACK = 48  # bytes behind the last whole block
EMPTY_CASE = PagesCase(PAGE_SHAPES, BLOCKS, [])


@dataclass
class World:
    buffers: list[Guarded]
    case: PagesCase
    host: Guarded
    table: PageTable

    @property
    def memory(self) -> torch.Tensor:
        return host_words(self.host.inner)

    def read(self) -> tuple[list[bytearray], bytearray]:
        return [buffer.read() for buffer in self.buffers], self.host.read()


def build(save: bool, case: PagesCase = EMPTY_CASE, device: str = DEVICE) -> World:
    """Random source, poisoned destination."""
    assert max(width for width, _ in case.shapes) <= GUARD
    buffers = [Guarded(width * count, device) for width, count in case.shapes]
    host = Guarded(case.host_blocks * case.stride + SLACK, "cpu", pin=device == "cuda")
    for number, buffer in enumerate(buffers):
        buffer.noise(number) if save else buffer.poison()
    host.poison() if save else host.noise(99)
    views = [b.inner.view(count, width) for b, (width, count) in zip(buffers, case.shapes, strict=True)]
    return World(buffers, case, host, PageTable.of(views, case.offsets, case.stride))


def expect(world: World, firsts: list[int], save: bool) -> tuple[list[bytearray], bytearray]:
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
    before, kept = world.read(), slots.tolist()
    wanted = expect(world, firsts, save)
    op(world.table, world.memory, slots, page, save)
    found = world.read()
    assert slots.tolist() == kept
    for number, (want, have) in enumerate(zip(wanted[0], found[0], strict=True)):
        assert_bytes(f"buffer {number}", want, have)
    assert_bytes("host", wanted[1], found[1])
    unchanged = found[0] == before[0] if save else found[1] == before[1]
    assert unchanged, "the source changed"
