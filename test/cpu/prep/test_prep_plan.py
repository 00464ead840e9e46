"""The plan of a step equals a plain loop, its slabs wait for their copies, and bad steps are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import FakeEvent
from random_steps import HOSTILE

from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.prep.plan import fill_lengths, head_size, pitch
from sglang_dsv4.prep.slab import SMALLEST, Slabs
from sglang_dsv4.prep.step import MOST_ROWS, PrepLayout, Step, check_step

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


@pytest.mark.parametrize(
    "change",
    [
        {"slots": torch.zeros(0).long()}, {"out_locs": torch.zeros(3).long()}, {"out_locs": torch.zeros(2)},
        {"lengths": np.zeros(3, np.int64)}, {"queries": 2}, {"queries": MOST_ROWS, "verify": True},
        {"queries": 0, "verify": True}, {"width": 3}, {"width": 0}, {"length_offset": 0},
    ],
    ids=str,
)  # fmt: skip
def test_refuses_steps_that_do_not_fit(change):
    step = Step(torch.tensor([5, 1]), torch.zeros(2).long(), np.array([3, 256]))
    assert check_step(LAYOUT, step) == 2
    with pytest.raises(IndexMismatch):
        check_step(LAYOUT, step._replace(**change))
