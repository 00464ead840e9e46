"""A store's client refuses what has no room, and what a store that is slow or failing should not get."""

from __future__ import annotations

import pytest
from played_store import KEY, MORE, PAGE, Played, ask, fail, found, opened_for, pieces, restarts, works

from sglang_dsv4.store.client import Limits, State
from sglang_dsv4.store.wire import MOST_PIECES, MOST_SPOTS, Code, Kind, Spot, pack


def test_credits_are_units_that_were_not_copied():
    played = Played(Limits(credits=10)).up()
    first = played.client.write(pieces(*range(6)), KEY)
    assert played.client.write(pieces(*range(6, 11)), KEY) is None
    second = played.client.write(pieces(*range(6, 10)), KEY)
    assert second is not None
    assert played.client.write(pieces(99), KEY) is None
    played.life.say(Kind.COPIED, first, 2)
    played.passes()
    assert played.client.write(pieces(99, 98, 97), KEY) is None
    third = played.client.write(pieces(99, 98), KEY)
    assert third is not None
    played.life.codes(Kind.STORED, second, [0] * 4)
    played.passes()
    assert played.client.write(pieces(*range(50, 55)), KEY) is None
    assert played.client.write(pieces(*range(50, 54)), KEY) is not None
    played.life.die()
    played.passes(1.0)
    played.life.ready()
    played.passes()
    assert played.client.write(pieces(*range(10)), KEY) is not None, "credits of a dead process"


def test_tickets_are_bounded_until_they_are_over():
    played = Played(Limits(tickets=3)).up()
    ticket = found(played)
    held = [ask(played), played.client.write(pieces(1), KEY)]
    assert None not in held
    assert (ask(played), played.client.write(pieces(2), KEY)) == (None, None)
    assert played.client.load(ticket, []), "it is one of the three"
    played.life.codes(Kind.LOADED, ticket, [])
    played.passes()
    assert ask(played) is not None


def test_the_ring_of_ids_is_bounded():
    played = Played(Limits(ids=3 * PAGE)).up()
    first = ask(played)
    second = ask(played, 2)
    assert (ask(played), ask(played, 4)) == (None, None)
    played.life.say(Kind.FOUND, second, 0)
    played.life.say(Kind.FOUND, first, 1)
    played.passes()
    assert ask(played, 3) is not None
    played.life.die()
    played.up()
    assert ask(played, 3) is not None, "ids of a dead process"


def test_loads_need_no_credits():
    played = Played(Limits(credits=4)).up()
    ticket = found(played)
    assert played.client.load(ticket, [Spot(unit, 0, 0) for unit in range(50)])
    assert played.client.write(pieces(1, 2, 3, 4), KEY) is not None
    played.life.codes(Kind.LOADED, ticket, [0] * 50)
    assert len(played.passes()[0].units) == 50
    assert played.client.write(pieces(9), KEY) is None


def test_what_does_not_fit_a_packet_is_refused():
    played = Played(MORE).up()
    assert played.client.write(pieces(1) * MOST_PIECES, KEY) is not None
    assert played.client.write(pieces(1) * (MOST_PIECES + 1), KEY) is None
    ticket = found(played)
    assert not played.client.load(ticket, [Spot(1, 0, 0)] * (MOST_SPOTS + 1))
    assert played.client.load(ticket, [Spot(1, 0, 0)] * MOST_SPOTS)


def test_a_full_socket_refuses_and_changes_nothing():
    played = Played(MORE).up()
    ticket, sent = found(played), 0
    while played.client.write(pieces(1, 2), KEY) is not None:
        sent += 1
    assert sent > 10
    assert played.client.counts["full"] == 1
    before = played.client._tickets._held, len(played.client._tickets.open), played.client._tickets.ids._head
    assert ask(played) is None
    assert not played.client.load(ticket, [Spot(5, 0, 0)])
    assert played.client.counts["full"] == 3
    after = played.client._tickets._held, len(played.client._tickets.open), played.client._tickets.ids._head
    assert (before, before[0]) == (after, 2 * sent)
    assert len(played.life.read()) == sent
    assert played.client.load(ticket, [Spot(5, 0, 0)]), "it can be tried again"


def test_a_dead_socket_refuses_and_is_looked_at_next():
    played = Played().up()
    played.life.ours.close()
    assert ask(played) is None
    played.passes()
    assert played.client.state is State.DYING
    assert (ask(played), played.client.write(pieces(1), KEY)) == (None, None)


@pytest.mark.parametrize("lane", ["writes", "reads"])
def test_a_slow_lane_takes_nothing_new_until_its_next_step(lane):
    played = Played(Limits(slow=1.0)).up()
    ticket = found(played)

    def send(kind):
        return played.client.write(pieces(1), KEY) if kind == "writes" else ask(played)

    other = "reads" if lane == "writes" else "writes"
    assert send(lane) is not None
    played.passes(0.9)
    assert send(lane) is not None
    played.passes(0.2)
    assert send(lane) is None
    assert played.client.load(ticket, []) == (lane == "writes")
    assert send(other) is not None
    played.life.step(lane)
    assert send(lane) is not None, "before any poll"
    played.clock.now += 1.1
    assert send(lane) is None, "without a poll"


def test_a_lane_without_work_is_not_slow():
    played = Played(Limits(slow=1.0, hang=2.0)).up()
    found(played)
    for _ in range(100):
        played.passes(1.0)
    assert played.client.state is State.UP
    assert ask(played) is not None


def test_breaker_opens_after_three_failures_in_a_row_and_doubles():
    played = Played().up()
    fail(played, 2)
    works(played)
    fail(played, 2)
    assert not played.client.breaker_open
    fail(played)
    waits = [opened_for(played)]
    for _ in range(6):
        fail(played)  # the probe
        waits.append(opened_for(played))
    assert waits == [10, 20, 40, 80, 160, 300, 300]
    works(played)
    fail(played, 2)
    assert not played.client.breaker_open
    fail(played)
    assert opened_for(played) == 10


def failed_load(played, codes, oops):
    ticket = played.spare.pop()
    assert played.client.load(ticket, [Spot(1, 0, 0), Spot(2, 0, 0)])
    if oops:
        played.life.say(Kind.OOPS, ticket, body=b"get raised")
    played.life.codes(Kind.LOADED, ticket, codes)
    played.passes()


def failed_ask(played):
    ticket = ask(played)
    played.life.say(Kind.OOPS, ticket, body=b"exists raised")
    played.life.say(Kind.FOUND, ticket, 0)
    played.passes()


FAILED_ANSWERS = {
    "a code of a write": fail,
    "a code of a load": lambda played: failed_load(played, [Code.OK, Code.FAILED], oops=False),
    "an OOPS of a load": lambda played: failed_load(played, [Code.OK], oops=True),
    "an OOPS of an ask": failed_ask,
}


@pytest.mark.parametrize("failure", FAILED_ANSWERS.values(), ids=FAILED_ANSWERS)
def test_each_kind_of_failed_answer_counts_once(failure):
    played = Played().up()
    played.spare = [found(played) for _ in range(3)]
    failure(played)
    failure(played)
    assert not played.client.breaker_open
    failure(played)
    assert played.client.breaker_open


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.FAILED])
def test_other_codes_are_answers(code):
    played = Played().up()
    fail(played, 2)
    ticket = played.client.write(pieces(1), KEY)
    played.life.codes(Kind.STORED, ticket, [code])
    played.passes()
    fail(played)
    assert not played.client.breaker_open


def test_failures_of_tickets_from_before_do_not_double_the_rest():
    played = Played().up()
    old = [played.client.write(pieces(unit), KEY) for unit in range(20)]
    for ticket in old[:15]:
        played.life.codes(Kind.STORED, ticket, [Code.FAILED])
    played.passes()
    assert opened_for(played) == 10
    for ticket in old[15:19]:
        played.life.codes(Kind.STORED, ticket, [Code.FAILED])
    played.passes()
    assert not played.client.breaker_open
    played.life.codes(Kind.STORED, old[19], [Code.OK])
    played.passes()
    fail(played, 2)
    assert not played.client.breaker_open


def test_one_probe_at_a_time_and_none_is_waited_for_that_died():
    played = Played(Limits(slow=1e9)).up()
    fail(played, 3)
    opened_for(played)
    assert played.client.write(pieces(1), KEY) is not None
    assert (ask(played), played.client.breaker_open) == (None, True)
    restarts(played, 1)
    assert not played.client.breaker_open
    ticket = ask(played)
    assert played.client.write(pieces(1), KEY) is None
    played.life.say(Kind.FOUND, ticket, 0)
    played.passes()
    assert played.client.write(pieces(1), KEY) is not None
    assert played.client.write(pieces(2), KEY) is not None


def test_a_refused_probe_is_none():
    played = Played(MORE).up()
    fail(played, 3)
    opened_for(played)
    played.life.read()
    huge = 0
    while not played.client.counts["full"]:  # DROPs fill it: they need no ticket
        played.client._send(pack(Kind.DROP, 1))
        huge += 1
    assert ask(played) is None
    played.life.read()
    assert ask(played) is not None, "the refused one was counted as the probe"
