"""UnitPool numbers units by what was taken and given back alone, and loses none."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_dsv4.hostmem.pool import COOLING, UnitNumbers, UnitPool


def test_units_that_rest_long_enough_come_first_then_the_oldest():
    p = UnitPool(4)
    units = [p.take(1)[0] for _ in range(4)]
    for ticket, unit in enumerate(units, 1):
        p.touch([unit], ticket)
    p.give_back(units[1:])
    now = 3 + COOLING  # ticket 4 is too near
    assert p.take(2, now) == units[1:3]
    p.give_back(units[:1])
    assert p.take(1, 4) == units[:1], "the oldest of those that hardly rest"
    last = p.take(1, 4)
    assert (last, p.last_ticket(last)) == (units[3:], 4)


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
    p = UnitPool(10)
    p.take(10)
    p.give_back(free)
    assert p.take(count) == taken


class Machine(RuleBasedStateMachine):
    """Any order of takes, tickets and releases, beside plain sets."""

    TOTAL = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = UnitPool(self.TOTAL)
        self.now = 0
        self.last = dict.fromkeys(range(self.TOTAL), 0)
        self.held: list[UnitNumbers] = []

    @rule(count=st.integers(0, TOTAL))
    def take(self, count):
        held = {unit for units in self.held for unit in units}
        assert self.pool.available == self.TOTAL - len(held)
        if count > self.pool.available:
            return
        units = self.pool.take(count, self.now)
        last = self.pool.last_ticket(units)
        taken = set(units)
        assert len(taken) == count and not taken & held
        if taken:
            assert last == max(self.last[unit] for unit in taken)
            free = sorted(self.last[unit] for unit in range(self.TOTAL) if unit not in held)
            assert last <= max(self.now - COOLING, free[count - 1]), "younger ones than needed"
            self.held.append(units)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 10), tickets=st.integers(1, 3))
    def touch(self, which, tickets):
        self.now += tickets
        units = self.held[which % len(self.held)]
        self.pool.touch(units, self.now)
        self.last.update(dict.fromkeys(units, self.now))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 10))
    def give_back(self, which):
        self.pool.give_back(self.held.pop(which % len(self.held)))

    @invariant()
    def whole(self):
        self.pool.check_integrity([unit for units in self.held for unit in units], ())


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
