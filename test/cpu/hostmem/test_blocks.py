"""BlockPool: no block is handed out while a transfer may still touch it, and none is lost."""

from __future__ import annotations

import numpy as np
import pytest
from builders import FakeEvent
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_dsv4.cache.families import Group
from sglang_dsv4.hostmem.blocks import BlockPool


def pool(total: int = 8) -> BlockPool:
    return BlockPool(Group.PAGED, total)


def test_take_waits_when_it_must_and_only_as_long_as_it_must():
    p, events = pool(4), [FakeEvent() for _ in range(4)]
    blocks = [p.take(1) for _ in events]
    for taken, event in zip(blocks, events, strict=True):
        p.give_back(taken, event)
    assert (p.available, p.returning) == (4, 4)
    assert p.take(1).tolist() == blocks[0].tolist()
    events[2].passed = True
    assert p.take(1).tolist() == blocks[2].tolist()
    assert [event.waits for event in events] == [1, 0, 0, 0]
    p.take(2)
    assert [event.waits for event in events] == [1, 1, 0, 1]
    assert p.returning == 0


@pytest.mark.parametrize(
    ("free", "count", "taken"),
    [
        ([0, 2, 4, 5, 6, 9], 3, [4, 5, 6]),
        ([1, 2, 5, 6, 7], 2, [1, 2]),
        ([1, 3], 1, [1]),
        ([0, 2, 9], 3, [0, 2, 9]),  # there is no run
    ],
)
def test_the_lowest_run_of_neighbours_is_taken(free, count, taken):
    p = pool(10)
    p.give_back(p.take(10)[free], None)
    assert p.take(count).tolist() == taken


def lose(p, held):
    p._free[int(np.flatnonzero(p._free)[0])] = False


def double(p, held):
    p._free[held[0]] = True


def swap(p, held):
    """As many blocks as there should be, but one twice and one nowhere."""
    lose(p, held), double(p, held)


@pytest.mark.parametrize(("corrupt", "free"), [(lose, 2), (double, 4), (swap, 3)])
def test_integrity_tells_both_sides(corrupt, free):
    p = pool(8)
    held = p.take(3)
    p.give_back(p.take(2), FakeEvent())
    p.check_integrity(held)
    corrupt(p, held)
    with pytest.raises(AssertionError, match=rf"paged blocks: free {free} \(counted 3\) .* returning 2 != total 8"):
        p.check_integrity(held)


def test_a_release_in_the_middle_of_a_take():
    """A handle can die in any allocation of ``take``: the collector then gives its blocks back there and then."""
    p = pool(4)
    dying = p.take(1)
    busy = p.take(1)

    class Collecting(FakeEvent):
        def query(self) -> bool:
            if self.armed:
                self.armed = False
                p.give_back(dying, FakeEvent())
            return super().query()

        armed = False

    event = Collecting()
    p.give_back(busy, event)
    event.armed = True
    held = p.take(1)
    p.check_integrity(held)


class Machine(RuleBasedStateMachine):
    """Any order of takes, releases and passing events, beside plain sets."""

    TOTAL = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(self.TOTAL)
        self.held: list[np.ndarray] = []
        self.pending: list[tuple[FakeEvent, set[int]]] = []

    @rule(count=st.integers(0, TOTAL))
    def take(self, count):
        held = sum(len(blocks) for blocks in self.held)
        assert self.pool.available == self.TOTAL - held
        if count > self.pool.available:
            return
        taken = self.pool.take(count)
        assert len(set(taken.tolist())) == count
        assert not set(taken.tolist()) & {int(b) for blocks in self.held for b in blocks}
        for event, blocks in self.pending:
            assert event.passed or not blocks & set(taken.tolist()), "handed out before its event"
        if count:
            self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 10), kind=st.sampled_from(("none", "passed", "pending")))
    def give_back(self, which, kind):
        blocks = self.held.pop(which % len(self.held))
        event = None if kind == "none" else FakeEvent()
        if event:
            event.passed = kind == "passed"
            self.pending.append((event, set(blocks.tolist())))
        self.pool.give_back(blocks, event)

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, 10))
    def event_passes(self, which):
        self.pending[which % len(self.pending)][0].passed = True

    @invariant()
    def whole(self):
        held = np.concatenate(self.held) if self.held else np.empty(0, np.int64)
        self.pool.check_integrity(held)


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
