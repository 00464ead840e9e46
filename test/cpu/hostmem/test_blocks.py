"""BlockPool numbers blocks by what was taken and given back alone, and loses none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_dsv4.cache.family import Group
from sglang_dsv4.hostmem.blocks import RESTING, BlockPool


def pool(total: int = 8) -> BlockPool:
    return BlockPool(Group.PAGED, total)


def test_blocks_that_rest_long_enough_come_first_then_the_oldest():
    p = pool(4)
    blocks = [int(p.take(1)[0]) for _ in range(4)]
    for turn, block in enumerate(blocks, 1):
        p.touch(np.array([block]), turn)
    p.give_back(np.array(blocks[1:]))
    now = 3 + RESTING  # turn 4 is too near
    assert p.take(2, now).tolist() == blocks[1:3]
    p.give_back(np.array([blocks[0]]))
    assert p.take(1, 4).tolist() == blocks[:1], "the oldest of those that hardly rest"
    last = p.take(1, 4)
    assert (last.tolist(), p.last_turn(last)) == (blocks[3:], 4)


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
    p.give_back(p.take(10)[free])
    assert p.take(count).tolist() == taken


class Machine(RuleBasedStateMachine):
    """Any order of takes, turns and releases, beside plain sets."""

    TOTAL = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(self.TOTAL)
        self.now = 0
        self.last = dict.fromkeys(range(self.TOTAL), 0)
        self.held: list[np.ndarray] = []

    @rule(count=st.integers(0, TOTAL))
    def take(self, count):
        held = {int(b) for blocks in self.held for b in blocks}
        assert self.pool.available == self.TOTAL - len(held)
        if count > self.pool.available:
            return
        blocks = self.pool.take(count, self.now)
        last = self.pool.last_turn(blocks)
        taken = set(blocks.tolist())
        assert len(taken) == count and not taken & held
        if taken:
            assert last == max(self.last[block] for block in taken)
            free = sorted(self.last[b] for b in range(self.TOTAL) if b not in held)
            assert last <= max(self.now - RESTING, free[count - 1]), "younger ones than needed"
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 10), turns=st.integers(1, 3))
    def touch(self, which, turns):
        self.now += turns
        blocks = self.held[which % len(self.held)]
        self.pool.touch(blocks, self.now)
        self.last.update(dict.fromkeys(blocks.tolist(), self.now))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 10))
    def give_back(self, which):
        self.pool.give_back(self.held.pop(which % len(self.held)))

    @invariant()
    def whole(self):
        held = np.concatenate(self.held) if self.held else np.empty(0, np.int64)
        self.pool.check_integrity(held, np.empty(0, np.int64))


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
