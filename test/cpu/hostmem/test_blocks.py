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


def test_take_hands_out_each_block_once():
    p = pool(8)
    taken = [p.take(count).tolist() for count in (3, 0, 1, 4)]
    assert [len(blocks) for blocks in taken] == [3, 0, 1, 4]
    assert sorted(block for blocks in taken for block in blocks) == list(range(8))
    assert (p.available, p.held, p.high_water) == (0, 8, 8)


def test_given_back_without_an_event_is_free_at_once():
    p = pool(2)
    first = p.take(2)
    p.give_back(first, None)
    assert (p.available, p.held, p.returning, p.high_water) == (2, 0, 0, 2)
    assert sorted(p.take(2).tolist()) == [0, 1]


def test_a_passed_event_frees_at_once():
    p, event = pool(2), FakeEvent()
    event.passed = True
    p.give_back(p.take(2), event)
    assert p.returning == 0
    assert event.waits == 0


def test_a_block_is_never_handed_out_before_its_event():
    p, event = pool(4), FakeEvent()
    busy = p.take(2)
    p.give_back(busy, event)
    assert p.returning == 2
    others = p.take(2)
    assert not set(others.tolist()) & set(busy.tolist())
    assert event.waits == 0, "waited although two blocks were free"
    event.passed = True
    assert sorted(p.take(2).tolist()) == sorted(busy.tolist())
    assert event.waits == 0, "waited for an event that had passed"


def test_take_waits_when_it_must_and_only_as_long_as_it_must():
    p, events = pool(3), [FakeEvent() for _ in range(3)]
    blocks = [p.take(1) for _ in range(3)]
    for taken, event in zip(blocks, events, strict=True):
        p.give_back(taken, event)
    assert p.available == 3
    first = p.take(1)
    assert [event.waits for event in events] == [1, 0, 0]
    assert first.tolist() == blocks[0].tolist()
    p.take(2)
    assert [event.waits for event in events] == [1, 1, 1]
    assert p.returning == 0


def test_waiting_for_one_event_frees_all_that_passed_meanwhile():
    p, events = pool(3), [FakeEvent() for _ in range(3)]
    for event, taken in zip(events, [p.take(1) for _ in range(3)], strict=True):
        p.give_back(taken, event)
    events[2].passed = True
    assert len(p.take(2)) == 2
    assert [event.waits for event in events] == [1, 0, 0]
    assert p.returning == 1


def test_neighbours_are_preferred():
    p = pool(10)
    taken = p.take(10)
    p.give_back(taken[[0, 2, 4, 5, 6, 9]], None)
    assert p.take(3).tolist() == [4, 5, 6]
    assert p.take(3).tolist() == [0, 2, 9], "scattered blocks when there is no run"


def test_the_lowest_run_is_taken():
    p = pool(10)
    taken = p.take(10)
    p.give_back(taken[[1, 2, 5, 6, 7]], None)
    assert p.take(2).tolist() == [1, 2]


def test_a_single_block_is_the_lowest_free_one():
    p = pool(5)
    taken = p.take(5)
    p.give_back(taken[[3, 1]], None)
    single = [p.take(1) for _ in range(2)]
    assert [blocks.tolist() for blocks in single] == [[1], [3]]
    assert {blocks.dtype for blocks in (*single, taken)} == {np.dtype(np.int64)}


@pytest.mark.parametrize("passed", [True, False])
def test_available_does_not_depend_on_the_streams(passed):
    """Ranks whose streams are at different points must give the same answer."""
    p, event = pool(5), FakeEvent()
    event.passed = passed
    p.give_back(p.take(3), event)
    p.take(1)
    assert p.available == 4


def test_giving_nothing_back_keeps_no_event():
    p, event = pool(2), FakeEvent()
    p.give_back(np.empty(0, np.int64), event)
    assert p.returning == 0
    p.take(2)
    assert event.waits == 0


def test_high_water():
    p = pool(6)
    first = p.take(4)
    p.give_back(first, None)
    p.take(1)
    assert p.high_water == 4


def corrupt_lost(p, held):
    p._free[int(np.flatnonzero(p._free)[0])] = False


def corrupt_doubled(p, held):
    p._free[held[0]] = True


def corrupt_counter(p, held):
    p.held += 1


def corrupt_free_counter(p, held):
    p._free_count += 1


def corrupt_returning(p, held):
    p._returning.append((FakeEvent(), held[:1]))


def corrupt_swapped(p, held):
    """As many blocks as there should be, but one twice and one nowhere."""
    p._free[int(np.flatnonzero(p._free)[0])] = False
    p._free[held[0]] = True


@pytest.mark.parametrize(
    ("corrupt", "numbers"),
    [
        (corrupt_lost, r"free 2 \(counted 3\) \+ held 3 \(counted 3\) \+ returning 2 != total 8"),
        (corrupt_doubled, r"free 4 \(counted 3\) \+ held 3 \(counted 3\) \+ returning 2 != total 8"),
        (corrupt_counter, r"free 3 \(counted 3\) \+ held 3 \(counted 4\) \+ returning 2 != total 8"),
        (corrupt_free_counter, r"free 3 \(counted 4\) \+ held 3 \(counted 3\) \+ returning 2 != total 8"),
        (corrupt_returning, r"free 3 \(counted 3\) \+ held 3 \(counted 3\) \+ returning 3 != total 8"),
        (corrupt_swapped, r"free 3 \(counted 3\) \+ held 3 .* one block is in two places"),
    ],
)
def test_integrity_tells_both_sides(corrupt, numbers):
    p = pool(8)
    held = p.take(3)
    p.give_back(p.take(2), FakeEvent())
    p.check_integrity(held)
    corrupt(p, held)
    with pytest.raises(AssertionError, match=f"paged blocks: {numbers}"):
        p.check_integrity(held)


def test_integrity_wants_the_blocks_of_the_copies():
    p = pool(4)
    held = p.take(2)
    with pytest.raises(AssertionError, match=r"held 1 \(counted 2\)"):
        p.check_integrity(held[:1])
    with pytest.raises(AssertionError, match="two places"):
        p.check_integrity(np.array([2, 3]))


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
