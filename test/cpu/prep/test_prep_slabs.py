"""Slabs wait for their copies, and bad steps are refused."""

import numpy as np
import pytest
import torch
from builders import FakeEvent

from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.prep.slab import SMALLEST, Slabs
from sglang_dsv4.prep.step import MOST_ROWS, PrepLayout, Step, check_step


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
