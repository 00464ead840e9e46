"""A pass does no more for sessions where more of them are kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_dsv4.hostmem.pool import UnitPool
from sglang_dsv4.metrics import SessionCounters
from sglang_dsv4.sessions.hints import Hints, Rank
from sglang_dsv4.sessions.kept import AHEAD, Kept
from sglang_dsv4.sessions.order import EvictionOrder
from sglang_dsv4.sessions.trie import Point, Trie

UNITS, PAGES, TAIL = 500_000, 40, 5


class Seconds(float):
    """Counts how often one is compared."""

    asked = 0

    def __add__(self, other: float) -> Seconds:
        return Seconds(float(self) + other)

    def __le__(self, other: float) -> bool:
        Seconds.asked += 1
        return float(self) <= float(other)

    def __lt__(self, other: float) -> bool:
        Seconds.asked += 1
        return float(self) < float(other)


@pytest.fixture
def order() -> EvictionOrder:
    """20,000 retained points, the first of which end first."""
    trie = Trie(1, False)
    found = EvictionOrder(trie)
    found.clock = lambda: Seconds(0.0)
    for number in range(20_000):
        trie.add("a", None, [number.to_bytes(8, "little")], [number])
        point = Point(number, 1, [], number + 1)
        trie.put("a", point)
        found.place(point, Hints(Rank.RETAINED, ttl_seconds=3600.0 + number))
    return found


def test_points_that_end_within_an_hour_are_not_looked_for_among_all(order: EvictionOrder) -> None:
    Seconds.asked = 0
    assert order.ended() == [] and Seconds.asked < 100
    order.clock = lambda: Seconds(3602.5)
    assert order.ended() == order.ended() == [1, 2, 3], "until the ranks agree"
    order.expire([3, 1])
    assert order.ended() == [2] and [point.number for point, _ in zip(order, range(2), strict=False)] == [1, 3]


def test_ends_that_no_longer_hold_do_not_pile_up(order: EvictionOrder) -> None:
    """A gateway renews a session's hint with each turn."""
    point = next(iter(order))
    for _ in range(100_000):
        order.place(point, Hints(Rank.RETAINED, ttl_seconds=7200.0))
    assert len(order._due) < 50_000
    order.clock = lambda: Seconds(7199.0)
    assert point.number not in order.ended()
    order.remove(point)
    order.clock = lambda: Seconds(7201.0)
    assert point.number not in order.ended()


def test_a_pass_evicts_some_thousand_units_of_a_large_arena_at_most() -> None:
    pool = UnitPool(UNITS)
    memory = SimpleNamespace(
        pool=pool, cache=None, units=SimpleNamespace(cost=1, tail=lambda page: TAIL),
        arena=SimpleNamespace(board=None), has_room=lambda count: count <= pool.available,
    )  # fmt: skip
    kept, session = Kept(memory, 256, False, None, SessionCounters()), 0  # type: ignore[arg-type]
    while kept._has_room(kept.few, for_point=True):
        units = pool.take(PAGES + TAIL)
        keys = [(session * PAGES + page).to_bytes(8, "little") for page in range(PAGES)]
        kept.add("a", None, keys, SimpleNamespace(pages=lambda first, end, units=units: units[first:end]))
        kept.put("a", units[PAGES - 1], units[PAGES:], Hints())
        pool.hand_over(units)
        session += 1
    before = pool.available
    kept.evict_ahead()
    assert AHEAD - (PAGES + TAIL) <= pool.available - before <= AHEAD + 2 * (PAGES + TAIL)
