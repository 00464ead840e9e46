"""A store's client ends a process that hangs, breaks the protocol or dies, and starts it again later."""

from __future__ import annotations

import pytest
from played_store import KEY, Played, ask, fail, found, pieces, restarts, works

from sglang_dsv4.store.client import GRACE, Limits, State
from sglang_dsv4.store.wire import BEGUN, GET, HEAD, MAIL, PUT, SPENT, Kind, Spot


def test_a_hang_is_killed_and_its_units_come_back_behind_the_reap():
    played = Played(Limits(hang=20.0)).up()
    writes, loads, asks = played.client.write(pieces(1, 2, 3), KEY), found(played), ask(played)
    played.client.load(loads, [Spot(7, 0, 0)])
    played.life.say(Kind.COPIED, writes, 1)
    assert played.passes(19.0, 100) == [("copied", writes, 1, [1])]
    for _ in range(10):
        played.life.step("writes")
        played.passes(0.09)
    assert not played.life.child.killed
    assert played.passes(0.2) == []  # the reads made none in 20 s
    assert (played.client.state, played.life.child.killed) == (State.DYING, True)
    assert played.passes(300.0, 3000) == [], "units of a process that may still write"
    assert (ask(played), played.client.write(pieces(9), KEY), len(played.lives)) == (None, None, 1)
    played.life.die()
    events = played.passes(0.003)
    why = "the store's reads made no step in 20 s"
    assert sorted(events) == sorted(
        [("failed", writes, why, [2, 3]), ("failed", loads, why, [7]), ("failed", asks, why, [])]
    )
    assert (played.client.counts["killed"], played.client.counts["died"]) == (1, 0)
    assert len(played.lives) == 2, "the first restart is at once"


def test_what_it_said_before_it_died_counts():
    played = Played(Limits(hang=20.0)).up()
    stored, lost, loads = played.client.write(pieces(1), KEY), played.client.write(pieces(2), KEY), found(played)
    played.client.load(loads, [Spot(7, 0, 0)])
    played.passes(20.0)
    assert played.client.state is State.DYING
    played.life.codes(Kind.STORED, stored, [0])
    played.life.codes(Kind.LOADED, loads, [0])
    played.life.die()
    events = played.passes(1.0)
    assert [event.name for event in events] == ["stored", "loaded", "failed"]
    assert [event.units for event in events] == [[1], [7], [2]]
    assert events[-1].ticket == lost


def test_steps_and_answers_keep_it_alive():
    played = Played(Limits(hang=20.0, slow=1e9)).up()
    ask(played)
    for _ in range(5):
        played.passes(19.0)
        played.life.step("reads")
    for _ in range(5):
        ticket = ask(played)
        played.passes(18.0)
        played.life.say(Kind.FOUND, ticket, 0)  # an answer is a step
        played.passes(1.0)
    played.passes(19.9)
    assert played.client.state is State.UP
    played.passes(0.2)
    assert played.client.state is State.DYING


def test_unread_packets_reset_the_socket_and_the_answers_are_behind_that():
    """The kernel says ECONNRESET once, before what the process sent; taken for the end it loses answers."""
    played = Played().up()
    first, second = played.client.write(pieces(1), KEY), played.client.write(pieces(2), KEY)
    played.life.codes(Kind.STORED, first, [0])
    played.life.die()  # it read nothing
    assert [event[:2] for event in played.passes(1.0)] == [("stored", first), ("failed", second)]


@pytest.mark.parametrize("kill", [False, True])
def test_a_closed_socket_ends_the_process(kill):
    """It ends by itself, with a status that tells why, or is killed when it did not in its time."""
    played = Played().up()
    ticket = played.client.write(pieces(1), KEY)
    played.life.ours.close()
    assert [*played.passes(0.1), *played.passes(GRACE if kill else GRACE - 0.1)] == []
    assert (played.client.state, played.life.child.killed) == (State.DYING, kill)
    played.life.child.status = 0
    assert [event[:2] for event in played.passes(0.1)] == [("failed", ticket)]
    assert (played.client.counts["died"], played.client.counts["killed"]) == (1, 0)


def test_last_words_are_kept():
    played = Played()
    played.passes()
    played.life.say(Kind.OOPS, body=b"no such \xff backend")
    played.passes()
    assert played.client.last_error == "no such \N{REPLACEMENT CHARACTER} backend"
    played.life.die(1)
    played.passes(0.1)
    assert played.client.last_error.endswith("ended with status 1, after: no such \N{REPLACEMENT CHARACTER} backend")
    played.life.die(2)
    played.passes(0.1)
    assert played.client.last_error.endswith("ended with status 2")


def test_a_new_process_begins_anew():
    played = Played().up()
    ticket = ask(played)
    for lane in ("reads", "writes", "writes"):
        played.life.step(lane)
    old, shared = played.life, played.life.words
    shared[(GET + SPENT) // 8] = 1_500_000_000
    shared[(PUT + BEGUN) // 8] = int((played.clock() - 2.0) * 1e9)  # a call that hangs
    assert played.client.seconds(PUT) == pytest.approx(2.0)
    old.die()
    played.passes(1.0)
    assert [shared[at // 8] for at in (MAIL, PUT, GET, GET + SPENT, PUT + BEGUN)] == [0] * 5
    spent = played.client.seconds(GET), played.client.seconds(PUT)
    assert spent[0] == 1.5 and 2.0 <= spent[1] <= 3.0, "but they count on"
    played.passes(1.0)
    assert (played.client.seconds(GET), played.client.seconds(PUT)) == spent, "and no longer than the process lived"
    played.life.ready()
    played.passes()
    assert played.client.state is State.UP
    assert ask(played) > ticket, "numbers are of one process only"


BROKEN = {
    "an unknown kind": lambda life, write, read: life.say_raw(HEAD.pack(99, 0, write)),
    "the scheduler's kind": lambda life, write, read: life.say(Kind.ASK, write),
    "a short packet": lambda life, write, read: life.say_raw(b"abc"),
    "an unknown ticket": lambda life, write, read: life.codes(Kind.STORED, 10**6, [0]),
    "an answer to another stage": lambda life, write, read: life.codes(Kind.LOADED, write, [0]),
    "loaded before the load": lambda life, write, read: life.codes(Kind.LOADED, read, [0]),
    "found twice": lambda life, write, read: [life.say(Kind.FOUND, read, 1) for _ in range(2)],
    "too many copied": lambda life, write, read: life.say(Kind.COPIED, write, 4),
    "fewer copied than before": lambda life, write, read: life.say(Kind.COPIED, write, 0),
    "too many codes": lambda life, write, read: life.codes(Kind.STORED, write, [0] * 4),
}


@pytest.mark.parametrize("breaks", BROKEN.values(), ids=BROKEN)
def test_a_broken_protocol_ends_the_process_and_is_not_read_on(breaks):
    played = Played().up()
    writes, reads = played.client.write(pieces(1, 2, 3), KEY), ask(played)
    played.life.say(Kind.COPIED, writes, 1)
    assert [event.units for event in played.passes()] == [[1]]
    breaks(played.life, writes, reads)
    played.life.codes(Kind.STORED, writes, [0] * 3)
    assert [event for event in played.passes(0.1) if event.name != "found"] == []
    assert (played.client.state, played.life.child.killed) == (State.DYING, True)
    assert played.passes(1.0, 10) == []
    played.life.die()
    events = played.passes(0.1)
    assert sorted(event[:2] for event in events) == [("failed", writes), ("failed", reads)]
    assert sorted(unit for event in events for unit in event.units) == [2, 3]
    assert "broke the protocol" in played.client.last_error
    assert played.client.counts["killed"] == 1


def test_back_off_doubles_and_ready_does_not_reset_it():
    played = Played(Limits(back_off=(1.0, 10.0))).up()
    assert restarts(played, 7) == [0, 1, 2, 4, 8, 10, 10]
    fail(played)
    assert restarts(played, 1) == [10], "an answer that is not good"
    works(played)
    assert restarts(played, 3) == [0, 1, 2]


def test_a_found_nothing_is_a_good_answer_unless_the_store_failed():
    played = Played().up()
    restarts(played, 3)
    ticket = ask(played)
    played.life.say(Kind.OOPS, ticket, body=b"exists raised")
    played.life.say(Kind.FOUND, ticket, 0)
    played.passes()
    assert restarts(played, 1) == [4]
    ticket = ask(played)
    played.life.say(Kind.FOUND, ticket, 0)
    played.passes()
    assert restarts(played, 1) == [0]
