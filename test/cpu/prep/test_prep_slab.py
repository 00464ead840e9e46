"""Slabs in rotation: none is handed out while the copy that reads it runs."""

from __future__ import annotations

from builders import FakeEvent

from sglang_dsv4.prep.slab import SMALLEST, Slabs


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
