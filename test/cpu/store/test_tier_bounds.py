"""Whatever a store loses or refuses is offered again; what is read and written at once has bounds."""

from __future__ import annotations

import pytest
from memory_store import MemoryStore
from test_tier import Life, stored

from sglang_dsv4.engine.plain.serving import PlainServing
from sglang_dsv4.store import tier as tier_module
from sglang_dsv4.store.tickets import LIMITS
from sglang_dsv4.store.wire import GET, PUT


def read_again(store: MemoryStore, pages: int) -> int:
    """Returns the pages of prompt 1 that the next life has of the store."""
    life = Life(store)
    life.ask(1, pages)
    life.passes(4)
    return life.found(1)


def test_a_slice_that_was_refused_comes_again_though_later_ones_were_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the chain has a hole for ever, and every later window is written for nobody."""
    monkeypatch.setattr(tier_module, "SLICE", 4)
    store = MemoryStore()
    life = Life(store)
    real, calls = life.client.write, 0

    def write(pieces: list, group: bytes) -> int | None:
        nonlocal calls
        calls += 1
        return None if calls == 1 else real(pieces, group)

    life.client.write = write
    for pages in (9, 10, 11, 12):
        life.finish(1, pages)
        life.passes(6)
    assert read_again(store, 12) == 12


def test_a_window_is_written_behind_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last unit is what is asked for: it tells that the rest is there."""
    monkeypatch.setattr(tier_module, "SLICE", 4)
    life, parts = Life(MemoryStore()), []
    real = life.client.write
    life.client.write = lambda pieces, group: parts.extend(one.part for one in pieces) or real(pieces, group)
    life.finish(1, 9)
    life.passes(6)
    assert parts == [*[0] * 9, *range(1, 1 + life.sessions.kept.in_tail)]


def test_what_waits_and_the_seconds_of_calls_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(MemoryStore())
    counters = life.tier.counters
    monkeypatch.setattr(life.tier, "_borrow_slices", lambda: None)
    for number in (1, 2, 3):
        life.finish(number, 9)
    for spent in (0.1, 0.3, 0.3):
        life.client.seconds = {PUT: spent, GET: 0.0}.__getitem__
        life.passes(1)
        assert counters.seconds == {"put": pytest.approx(spent)}
    assert counters.waiting == 3


def test_what_one_turn_adds_is_a_group_whatever_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that evicts a slice alone keeps the rest for nobody."""
    monkeypatch.setattr(tier_module, "SLICE", 4)
    store = MemoryStore()
    life = Life(store)
    life.finish(1, 11)
    life.passes(9)
    first = dict(store.groups)
    assert len(first) == 11 + life.sessions.kept.in_tail and len(set(first.values())) == 1
    life.finish(1, 16)
    life.passes(9)
    added = {name: group for name, group in store.groups.items() if name not in first}
    assert len(added) == 5 + life.sessions.kept.in_tail and len({*added.values(), *first.values()}) == 2


@pytest.mark.parametrize("lost", ["pages", "all"])
def test_what_the_store_lost_is_written_again_with_later_turns(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used pages of a full disk, or all of a master that started again."""
    monkeypatch.setattr(tier_module, "REFRESH", 2)
    store = MemoryStore()
    life = Life(store)
    life.finish(1, 8)
    life.passes(4)
    for name in [name for name in store.objects if lost == "all" or name.endswith("p")][
        : 2 if lost == "pages" else None
    ]:
        del store.objects[name]
    for pages in (9, 10, 11, 12):
        life.finish(1, pages)
        life.passes(4)
    assert read_again(store, 12) == 12


def test_a_read_that_finds_a_hole_has_all_offered_anew() -> None:
    store = stored()
    other = Life(store)
    ask = other.ask(1, 12)
    other.passes(1)
    del store.objects[next(name for name in store.objects if name.endswith("p"))]
    other.passes(3)
    assert not ask.waits and not other.found(1) and other.tier._epoch == 2


def test_equal_prompts_are_read_once_and_all_have_it() -> None:
    store = stored()
    life = Life(store)
    asks = [life.ask(1, pages) for pages in (12, 12, 11, 10)]
    life.passes(1)
    assert len(life.tier.units()) == 9 + life.sessions.kept.in_tail
    life.passes(3)
    assert life.found(1) == 9 and not any(ask.waits for ask in asks)
    assert life.tier.counters.asks == {"hit": 4} and not life.client.open and not life.tier._open


def test_equal_prompts_of_a_read_that_fails_are_all_let_go() -> None:
    store = stored()
    life = Life(store)
    asks = [life.ask(1, 12) for _ in range(3)]
    life.passes(1)
    life.client.fail()
    life.passes(4)
    assert not any(ask.waits for ask in asks) and not life.memory.pool.held and not life.tier._open


def test_reads_at_once_take_no_more_than_half() -> None:
    store = MemoryStore()
    first = Life(store, units=200)
    for number in (1, 2, 3, 4):
        first.finish(number, 9)
        first.passes(4)
    life = Life(store)
    for number in (1, 2, 3, 4):
        life.ask(number, 12)
    life.passes(1)
    assert 0 < 2 * len(life.tier.units()) <= life.memory.pool.total
    life.passes(4)
    assert life.tier.counters.asks["hit"] and life.tier.counters.asks["room"] and not life.tier._loading


def test_an_ask_that_is_refused_is_sent_when_the_client_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored()
    life = Life(store)
    real, life.client.ask = life.client.ask, lambda question, tokens: None
    ask = life.ask(1, 12)
    life.passes(2)
    assert ask.waits
    life.client.ask = real
    life.passes(3)
    assert not ask.waits and life.found(1) == 9
    life.client.ask, life.client.breaker_open = (lambda question, tokens: None), True
    ask = life.ask(2, 12)
    life.passes(1)
    assert not ask.waits, "nobody waits for a store that is not there"


def test_a_role_switch_leaves_no_unit_borrowed() -> None:
    life = Life(MemoryStore())
    life.finish(1, 9)
    life.client.hangs = True
    life.passes(2)
    assert life.tier.units()
    plain = PlainServing(life.pool, life.host, True)
    plain.sessions, plain.tier = life.sessions, life.tier
    plain.end()
    assert not life.memory.pool.held
    life.memory.check_integrity()


def test_units_of_a_process_that_cannot_be_reaped_stay_taken() -> None:
    life = Life(MemoryStore())
    life.finish(1, 9)
    life.client.hangs, life.client.ended = True, False
    life.passes(2)
    plain = PlainServing(life.pool, life.host, True)
    plain.sessions, plain.tier = life.sessions, life.tier
    plain.end()
    assert life.memory.pool.held == len(life.tier.units()) > 0


def test_writes_stay_within_the_credits_of_the_client() -> None:
    life = Life(MemoryStore(), units=300)
    life.client.hangs = True
    for number in range(20):
        life.finish(number, 9)
        life.passes(1)
        assert life.tier._borrowed <= tier_module.MOST_BORROWED <= LIMITS.credits
