"""The parts of a step: plan, slabs in rotation, the worked example of the docstring, and the refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import FakeEvent
from random_steps import HOSTILE, make_world

from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.prep.plan import fill_lengths, head_size, pitch
from sglang_dsv4.prep.slab import SMALLEST, Slabs
from sglang_dsv4.prep.step import MOST_ROWS, PrepLayout, Step, Tables, check_step
from triton_ops.cases.prep_rows import prep_outputs
from triton_ops.prep_args import Inputs, Sizes, check_prep_rows

LONG = PrepLayout(context=1 << 20)
LENGTHS = (*HOSTILE, 0, 2047, 2048, 2049, (1 << 20) - 9)
SPARE = 16


@pytest.mark.parametrize("queries", [1, 2, 8])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_plan_equals_a_loop(queries, dtype):
    lengths = np.array(LENGTHS, dtype)
    verify = queries > 1
    rows = len(lengths) * queries
    head = np.full(head_size(len(lengths), rows) + SPARE, -77, np.int32)
    fill_lengths(LONG, lengths, queries, verify, head[:-SPARE])
    causal = [int(n) + verify + query for n in lengths for query in range(queries)]
    wanted = [
        causal,
        [n - 1 for n in causal],
        [min(n, 128) for n in causal],
        [n // 4 for n in causal],
        [max(1, n // 4) for n in causal],
        [min(512, max(1, n // 4)) for n in causal],
        [max(1, n // 128) for n in causal],
    ]
    step = pitch(rows)
    assert [head[k * step : k * step + rows].tolist() for k in range(len(wanted))] == wanted
    assert head[7 * step : -SPARE].tolist() == [k * queries for k in range(len(lengths) + 1)]
    assert (head[-SPARE:] == -77).all()


def test_waits_for_the_copy_of_this_slab_and_no_other():
    slabs = Slabs(pin=False)
    events, arrays = [], []
    for _ in range(Slabs.COUNT):
        arrays.append(slabs.take(8)[1])
        events.append(FakeEvent())
        slabs.guard(events[-1])
    assert [event.waits for event in events] == [0] * Slabs.COUNT
    assert len({array.ctypes.data for array in arrays}) == Slabs.COUNT
    for turn in range(Slabs.COUNT):
        again = slabs.take(8)[1]
        assert again.ctypes.data == arrays[turn].ctypes.data
        assert [event.waits for event in events] == [1] * (turn + 1) + [0] * (Slabs.COUNT - turn - 1)


def test_waits_before_it_lets_go_of_a_slab_that_is_too_small():
    slabs = Slabs(pin=False)
    slabs.take(8)
    event = FakeEvent()
    slabs.guard(event)
    for _ in range(Slabs.COUNT):
        slab, array = slabs.take(SMALLEST + 1)
        assert slab.shape == array.shape == (SMALLEST + 1,)
    assert event.waits == 1


LAYOUT = PrepLayout(context=512)


def example(device):
    table = torch.zeros(6, 512, dtype=torch.int32, device=device)
    mapping = torch.zeros(8 * 256 + 1, dtype=torch.int64, device=device)
    mapping[-1] = -1
    inside = torch.arange(256, device=device)
    for slot, page, swa in ((5, 7, 2), (1, 4, 9)):
        table[slot, :256] = page * 256 + inside
        mapping[page * 256 + inside] = swa * 256 + inside
    step = Step(torch.tensor([5, 1], device=device), torch.tensor([1794, 1279], device=device), np.array([3, 256]))
    return step, Tables(table, mapping)


@pytest.mark.parametrize(
    "change",
    [
        {"slots": torch.zeros(0, dtype=torch.int64)},
        {"out_locs": torch.zeros(3, dtype=torch.int64)},
        {"out_locs": torch.zeros(2)},
        {"lengths": np.zeros(3, np.int64)},
        {"queries": 2},
        {"queries": MOST_ROWS, "verify": True},
        {"queries": 0, "verify": True},
        {"width": 3},
        {"width": 0},
        {"length_offset": 0},
    ],
    ids=str,
)
def test_refuses_steps_that_do_not_fit(change):
    step = Step(torch.tensor([5, 1]), torch.zeros(2, dtype=torch.int64), np.array([3, 256]))
    assert check_step(LAYOUT, step) == 2
    with pytest.raises(IndexMismatch):
        check_step(LAYOUT, step._replace(**change))


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
def test_the_kernel_refuses_by_name(name, change):
    world = make_world([5, 300])
    step, layout = world.step(on_device=True), world.layout
    sizes = Sizes(
        layout.page, layout.window, layout.swa_page, layout.topk,
        layout.c4_ring, layout.c128_ring, layout.c4_keep, layout.c128_keep,
    )  # fmt: skip
    outputs = prep_outputs(sizes, 2, 1, layout.most_pages, False, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    inputs = Inputs(step.slots, step.out_locs, step.lengths, *world.tables, 1, 0)
    with pytest.raises((TypeError, ValueError), match=name):
        check_prep_rows(sizes, *change(inputs, outputs))
