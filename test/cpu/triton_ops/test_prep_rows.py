"""prep_rows against its torch twin: outputs poisoned, memory between and behind them watched."""

from __future__ import annotations

import pytest
import torch
from guarded import DEVICE
from random_steps import DRAFTS, HOSTILE, LAYOUT, make_world

from sglang_dsv4.prep.step import PrepLayout
from triton_ops import prep_rows as module
from triton_ops.cases.prep_rows import prep_outputs
from triton_ops.prep_args import Inputs, Sizes, check_prep_rows, fill_vectors_torch
from triton_ops.prep_rows import prep_rows, prep_rows_torch

POISON = -559038737
SPARE = 8  # entries behind each output


def sizes_of(layout: PrepLayout) -> Sizes:
    return Sizes(
        layout.page, layout.window, layout.swa_page, layout.topk,
        layout.c4_ring, layout.c128_ring, layout.c4_keep, layout.c128_keep,
    )  # fmt: skip


class Memory:
    """Outputs, each in poisoned memory of its own that is larger than it."""

    def __init__(self, layout: PrepLayout, requests: int, queries: int, width: int, verify: bool) -> None:
        self.all = []
        self.outputs = prep_outputs(sizes_of(layout), requests, queries, width, verify, self.make)

    def make(self, shape, dtype):
        count = torch.Size(shape).numel()
        self.all.append(torch.full((count + SPARE,), POISON, dtype=dtype, device=DEVICE))
        return self.all[-1][:count].view(*shape)


def run_both(world, queries=1, verify=False, on_device=True, width=None, lead=None):
    layout = world.layout
    step = world.step(DEVICE, queries, verify, on_device)
    width = layout.most_pages if width is None else width
    memories = []
    for op in (prep_rows, prep_rows_torch):
        memory = Memory(layout, step.requests, queries, width, verify)
        inputs = Inputs(
            step.slots,
            step.out_locs,
            step.lengths if on_device else None,
            *world.tables,
            queries,
            int(verify) if lead is None else lead,
        )
        if not on_device:
            fill_vectors_torch(sizes_of(layout), torch.from_numpy(step.lengths).to(DEVICE), memory.outputs.vectors)
        check_prep_rows(sizes_of(layout), inputs, memory.outputs)
        op(sizes_of(layout), inputs, memory.outputs)
        memories.append(memory)
    return memories


def assert_equal(memories):
    ours, wanted = memories
    for number, (got, want) in enumerate(zip(ours.all, wanted.all, strict=True)):
        bad = (got != want).nonzero()
        assert not len(bad), f"output {number}[{int(bad[0])}] is {int(got[bad[0]])}, not {int(want[bad[0]])}"


@pytest.mark.parametrize("on_device", [False, True])
def test_decode(on_device):
    assert_equal(run_both(make_world([*HOSTILE, 0, 1299, 1300], device=DEVICE), on_device=on_device))


@pytest.mark.parametrize("queries", [1, 2, 9])
def test_verify(queries):
    lengths = [1, 3, 6, 120, 127, 255] if queries > 2 else [1, 2, 3, 6, 7, 126, 127, 128, 254, 255, 256, 511]
    assert_equal(run_both(make_world(lengths, DRAFTS, device=DEVICE, room=queries), queries, verify=True))


@pytest.mark.parametrize("width", [1, 2, 5])
def test_narrow_page_table(width):
    assert_equal(run_both(make_world([1, 255, 256, 257, 300, 900], device=DEVICE), width=width))


def test_tiles_of_a_long_table():
    """More pages than one program makes; live C128 rows on both sides of the seam."""
    tiny = PrepLayout(context=(module.TILE_PAGES + 3) * 256 - 5, topk=64)
    seam = module.TILE_PAGES * 256
    assert_equal(run_both(make_world([seam - 1, seam, seam + 300, tiny.context, 1], tiny, device=DEVICE)))


@pytest.mark.parametrize("slot", [-1, -(2**31), 2**31 - 1])
def test_full_slots_outside_the_mapping_have_no_swa_slot(slot):
    world = make_world([300, 40], device=DEVICE)
    world.tables.req_to_token[world.slots[0], 250:260] = slot
    memories = run_both(world)
    for memory in memories:
        window = memory.outputs.swa_indices[0].tolist()
        assert [k for k, swa in enumerate(window) if swa == -1] == list(range(40, 50))
    assert torch.equal(memories[0].outputs.swa_indices, memories[1].outputs.swa_indices)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("slots", lambda i, o: (i._replace(slots=i.slots.float()), o)),
        ("lengths", lambda i, o: (i._replace(lengths=i.lengths[:1]), o)),
        ("req_to_token", lambda i, o: (i._replace(req_to_token=i.req_to_token.T), o)),
        ("swa_indices", lambda i, o: (i, o._replace(swa_indices=o.swa_indices[:, ::2]))),
        ("pages", lambda i, o: (i, o._replace(c128_indices=o.c128_indices[:, :2].contiguous()))),
        ("drafts", lambda i, o: (i, o._replace(c4_write=o.c4_plan[:, :2].contiguous()))),
    ],
)
def test_refuses_by_name(name, change):
    world = make_world([5, 300], device=DEVICE)
    step = world.step(DEVICE, on_device=True)
    memory = Memory(LAYOUT, 2, 1, LAYOUT.most_pages, False)
    inputs = Inputs(step.slots, step.out_locs, step.lengths, *world.tables, 1, 0)
    with pytest.raises((TypeError, ValueError), match=name):
        check_prep_rows(sizes_of(LAYOUT), *change(inputs, memory.outputs))
