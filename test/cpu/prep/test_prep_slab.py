"""Slabs in rotation: none is handed out while the copy that reads it runs."""

from __future__ import annotations

import pytest
import torch
from builders import FakeEvent, needs_cuda

from sglang_dsv4.prep.slab import SMALLEST, Slabs

pytestmark = pytest.mark.cpu


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


def test_tensor_and_array_are_one_memory():
    slab, array = Slabs(pin=False).take(5)
    array[:] = range(5)
    assert slab.tolist() == [0, 1, 2, 3, 4]


@needs_cuda
@pytest.mark.gpu
def test_slab_outlives_a_slow_stream():
    """Copies wait behind a sleeping stream; each must still find what was planned for it."""
    slabs, stream = Slabs(pin=True), torch.cuda.Stream()
    entries = 1024
    found = [torch.zeros(entries, dtype=torch.int32, device="cuda") for _ in range(3 * Slabs.COUNT)]
    torch.cuda.synchronize()
    for number, target in enumerate(found):
        slab, array = slabs.take(entries)
        array[:] = number
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)
            target.copy_(slab, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        slabs.guard(event)
    torch.cuda.synchronize()
    assert [int(target.min()) for target in found] == [int(target.max()) for target in found] == list(range(len(found)))
