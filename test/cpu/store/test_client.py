"""A store's client starts its process, passes tickets to and fro, and ends it in order. The process is played."""

from __future__ import annotations

import array
import os
import struct
import time

import numpy as np
import pytest
from played_store import KEY, MORE, Played, ask, found, ids, pieces, question

from sglang_dsv4.store.client import Arena, Limits, State, StoreClient
from sglang_dsv4.store.wire import CONTROL, MAIL, Code, Kind, Spot, unpack_question, unpack_spots, unpack_write


def test_first_poll_starts_and_ready_makes_it_up():
    played = Played(Limits(ids=1000, drain=7.0), secret=b"\1\2", least_free=99, command=("run", "it"))
    client = played.client
    assert (client.state, played.lives, client.write(pieces(1), KEY)) == (State.DOWN, [], None)
    assert played.passes() == []
    hello, mine = played.life.hello, client._shared
    assert hello == {
        "arena_bytes": 1 << 20, "arena_start": 4096, "units": 200, "unit_bytes": 4096, "in_tail": 5, "backend": "file",
        "config": {"a": [1]}, "model": "model", "secret": "0102", "drain": 7.0, "least_free": 99,
        "shared_bytes": CONTROL + 4 * 1000,
    }  # fmt: skip
    assert played.life.command == ("run", "it", "file"), "what it imports depends on the backend"
    assert mine.nbytes == CONTROL + 4000
    assert (client.state, client.ask(question(), ids(4))) == (State.STARTING, None)
    played.life.ready()
    assert played.passes() == []
    assert client.state is State.UP
    assert client.counts == {"starts": 1, "killed": 0, "died": 0, "refused": 2, "full": 0}


def test_no_secret_is_null():
    assert Played().up().life.hello["secret"] is None


def test_a_config_too_long_for_a_packet_is_refused():
    with pytest.raises(ValueError, match="config is longer"):
        StoreClient(Arena(0, 0, 0, 0, 0), 5, "file", {"a": "x" * (1 << 17)}, "model")


def test_start_limit_kills_and_a_late_ready_is_none():
    played = Played(Limits(start=5.0))
    played.passes()
    played.passes(4.9)
    assert (played.client.state, played.life.child.killed) == (State.STARTING, False)
    played.passes(0.2)
    assert (played.client.state, played.life.child.killed) == (State.DYING, True)
    played.life.ready()
    played.passes(1.0)
    assert played.client.state is State.DYING
    assert len(played.lives) == 1, "started a second beside one that may still write"
    played.life.die()
    played.passes(1.0)
    assert "did not start in 5 s" in played.client.last_error
    assert (len(played.lives), played.client.counts["killed"], played.client.counts["died"]) == (2, 1, 0)


def test_a_process_that_cannot_be_started_is_tried_again():
    played = Played()
    played.unstartable = True
    starts = []
    for _ in range(200):
        before = played.client.counts["starts"]
        played.passes(0.1)
        if played.client.counts["starts"] > before:
            starts.append(round(played.clock.now - 1000.0, 1))
    assert starts == [0.1, 0.2, 1.2, 3.2, 7.2, 15.2]
    assert played.client.last_error == "the store's process cannot be started: no memory"
    played.unstartable = False
    assert played.up().client.state is State.UP


def test_idle_poll_reads_one_word_and_the_clock():
    played = Played().up()

    class Words:
        def __getitem__(self, at):
            read.append(at)
            return played.client._seen

    read, calls = [], []
    played.client._words = Words()
    played.client._clock = lambda: calls.append(1) or played.clock.now
    played.client._process = played.client._tickets = None  # touched: an AttributeError
    assert played.client.poll() == ()
    assert (read, len(calls)) == ([MAIL // 8], 1)


def test_idle_poll_takes_less_than_a_microsecond():
    played = Played().up()
    played.client._clock, played.client._due = time.monotonic, time.monotonic() + 1000
    poll, best = played.client.poll, 1.0
    for _ in range(200):
        begin = time.perf_counter()
        for _ in range(100):
            poll()
        best = min(best, (time.perf_counter() - begin) / 100)
    assert best < 1e-6, f"{best * 1e6:.2f} us"


@pytest.mark.parametrize(("opens", "pause"), [(False, 0.5), (True, 0.05)])
def test_a_death_without_a_packet_is_seen(opens, pause):
    """With a socket that a fork holds open: neither a packet nor an end tells of it."""
    played = Played().up()
    if opens:
        ask(played)
    played.life.child.status = -11
    played.passes(pause * 0.98)
    assert played.client.state is State.UP
    events = played.passes(pause * 0.04)
    assert played.client.counts["died"] == 1
    assert "ended with status -11" in played.client.last_error
    assert [event.name for event in events] == ["failed"] * opens


def test_write_is_sent_copied_and_stored():
    played = Played().up()
    sent = pieces(3, 9, 4, 1)
    key = bytes(range(32))
    ticket = played.client.write(sent, key)
    ((kind, number, count, body),) = played.life.read()
    assert (kind, number, count, unpack_write(body)) == (Kind.WRITE, ticket, 4, (key, sent))
    played.life.say(Kind.COPIED, ticket, 1)
    played.life.say(Kind.COPIED, ticket, 3)
    assert played.passes() == [("copied", ticket, 1, [3]), ("copied", ticket, 3, [9, 4])]
    played.life.codes(Kind.STORED, ticket, [Code.OK, Code.KNOWN, Code.FULL, Code.OK])
    assert played.passes() == [("stored", ticket, bytes([0, 1, 7, 0]), [1])]
    assert played.client._tickets.open == {}


def test_ask_is_sent_found_loaded():
    played = Played(Limits(ids=64)).up()
    tokens = array.array("q", [5, 2**31 - 1, 7, 8, 9, 10, 11, 12, 13, 999])
    ticket = played.client.ask(question(2, ahead=1), tokens)
    ((kind, number, _, body),) = played.life.read()
    asked = unpack_question(body)
    assert (kind, number, asked) == (Kind.ASK, ticket, question(2, ahead=1)._replace(at=asked.at))
    seen = struct.unpack_from("<9i", played.life.shared, CONTROL + 4 * asked.at)
    assert list(seen) == list(tokens)[:9]
    assert not played.client.load(ticket, [Spot(1, 0, 0)]), "nothing was found yet"
    played.life.say(Kind.FOUND, ticket, 2)
    assert played.passes() == [("found", ticket, 2, [])]
    spots = [Spot(8, 0, 0), Spot(6, 0, 1), Spot(7, 1, 1)]
    assert played.client.load(ticket, spots)
    assert not played.client.load(ticket, spots), "it is loading"
    ((kind, number, count, body),) = played.life.read()
    assert (kind, number, count, list(unpack_spots(body))) == (Kind.LOAD, ticket, 3, spots)
    played.life.codes(Kind.LOADED, ticket, [Code.OK, Code.MISSING])
    assert played.passes() == [("loaded", ticket, bytes([0, 2]), [8, 6, 7])]
    assert not played.client.load(ticket, spots), "it is over"


def test_tokens_of_any_buffer_of_int64():
    played = Played(Limits(ids=64)).up()
    for tokens in (ids(4), np.arange(4), memoryview(ids(4)), bytes(ids(4))):
        ticket = played.client.ask(question(), tokens)
        at = unpack_question(played.life.read()[0][3]).at
        assert struct.unpack_from("<4i", played.life.shared, CONTROL + 4 * at) == (0, 1, 2, 3)
        played.life.say(Kind.FOUND, ticket, 0)
        played.passes()


def test_what_finds_nothing_is_over():
    played = Played().up()
    ticket = ask(played)
    played.life.say(Kind.FOUND, ticket, 0)
    assert played.passes() == [("found", ticket, 0, [])]
    played.client.drop(ticket)
    assert [message[0] for message in played.life.read()] == [Kind.ASK]
    assert not played.client.load(ticket, [])


def test_drop_of_an_ask_says_no_more():
    played = Played().up()
    found_something, found_nothing, killed = ask(played), ask(played), ask(played)
    for ticket in (found_something, found_nothing, killed, killed):
        played.client.drop(ticket)
    assert [message[0] for message in played.life.read()] == [Kind.ASK] * 3, "each is answered all the same"
    played.life.say(Kind.FOUND, found_something, 1)
    played.life.say(Kind.FOUND, found_nothing, 0)
    assert played.passes() == []
    assert [message[:2] for message in played.life.read()] == [(Kind.DROP, found_something)]
    played.life.die()
    assert played.passes(1.0) == [], "nobody wants it"


def test_drop_of_what_was_found():
    played = Played().up()
    ticket = found(played)
    played.client.drop(ticket)
    played.client.drop(ticket)
    assert [message[:2] for message in played.life.read()] == [(Kind.DROP, ticket)]
    assert not played.client.load(ticket, [])
    played.life.die()
    assert played.passes(1.0) == []


@pytest.mark.parametrize("dies", [False, True])
def test_drop_of_a_load_answers_for_its_units(dies):
    played = Played().up()
    ticket = found(played)
    played.client.load(ticket, [Spot(3, 0, 0), Spot(4, 0, 1)])
    played.client.drop(ticket)
    played.client.drop(ticket)
    assert [message[0] for message in played.life.read()] == [Kind.LOAD, Kind.DROP]
    if dies:
        played.life.die()
    else:
        played.life.codes(Kind.LOADED, ticket, [Code.OK])
    ((name, number, _, units),) = played.passes(1.0)
    assert (name, number, units) == ("failed" if dies else "loaded", ticket, [3, 4])


def test_drop_of_a_write_does_nothing():
    played = Played().up()
    ticket = played.client.write(pieces(1), KEY)
    played.client.drop(ticket)
    assert [message[0] for message in played.life.read()] == [Kind.WRITE]
    played.life.codes(Kind.STORED, ticket, [Code.OK])
    assert played.passes() == [("stored", ticket, b"\0", [1])]


def test_drops_that_find_the_socket_full_are_sent_later():
    played = Played(MORE).up()
    tickets = [found(played) for _ in range(3)]
    while played.client.write(pieces(1), KEY) is not None:
        pass
    for ticket in tickets:
        played.client.drop(ticket)
    played.life.read()
    played.passes(0.06)
    assert [message[:2] for message in played.life.read()] == [(Kind.DROP, ticket) for ticket in tickets]


def test_drops_that_found_the_socket_full_are_not_for_the_next_process():
    played = Played(MORE).up()
    ticket = found(played)
    while played.client.write(pieces(1), KEY) is not None:
        pass
    played.client.drop(ticket)
    played.life.die()
    played.up()
    played.passes(1.0)
    assert played.life.read() == []


def test_close_drains_and_returns_what_comes():
    played = Played().up()
    writes, asks = played.client.write(pieces(1, 2), KEY), found(played)
    waited = []

    def waits(life):
        waited.append([message[:3] for message in life.read()])
        if len(waited) == 3:
            life.say(Kind.COPIED, writes, 2)
        if len(waited) == 4:
            life.codes(Kind.STORED, writes, [0, 0])
            life.say(Kind.BYE)
            life.die(0)

    played.waits = waits
    events = played.client.close(10.0)
    drains = [message for messages in waited for message in messages if message[0] is Kind.DRAIN]
    assert drains == [(Kind.DRAIN, 0, 10_000)]
    assert [event[:2] for event in events] == [("copied", writes), ("stored", writes), ("failed", asks)]
    assert not played.life.child.killed or played.life.child.status == 0
    assert_off(played)


def assert_off(played):
    client = played.client
    assert client.state is State.OFF
    assert (client.write(pieces(1), KEY), ask(played), client.load(1, []), client.close(5.0)) == (None, None, False, [])
    lives = len(played.lives)
    assert played.passes(1000.0, 10) == []
    assert len(played.lives) == lives, "started again"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(client._shared.fd)


def test_close_kills_what_does_not_drain_in_time():
    played = Played().up()
    ticket = played.client.write(pieces(1), KEY)

    def waits(life):
        if life.child.killed:
            life.die()

    played.waits = waits
    begin = played.clock.now
    events = played.client.close(3.0)
    assert 3.0 < played.clock.now - begin <= 6.0
    assert [event[:2] for event in events] == [("failed", ticket)]
    assert_off(played)


def test_close_tells_a_full_socket_later():
    played = Played(MORE).up()
    while played.client.write(pieces(1), KEY) is not None:
        pass
    told = []

    def waits(life):
        told.extend(message for message in life.read() if message[0] is Kind.DRAIN)
        if told:
            life.die(0)

    played.waits = waits
    played.client.close(3.0)
    assert len(told) == 1


def test_a_process_that_ends_in_the_drain_is_not_killed():
    """It closed its socket and still flushes what it wrote."""
    played = Played().up()
    killed = []

    def waits(life):
        life.ours.close()
        killed.append(life.child.killed)
        if len(killed) == 5:
            life.child.status = 0

    played.waits = waits
    played.client.close(3.0)
    assert killed == [False] * 5


@pytest.mark.parametrize("state", [State.DOWN, State.STARTING, State.DYING, State.UP])
def test_close_without_a_drain(state):
    played = Played(Limits(start=5.0))
    if state is State.UP:
        played.up()
    elif state is not State.DOWN:
        played.passes()
        played.passes(6.0 * (state is State.DYING))
    assert played.client.state is state
    played.waits = lambda life: life.die()
    assert played.client.close(0.0 if state is State.UP else 10.0) == []
    assert all(life.child.killed and life.read() == [] for life in played.lives if state is not State.UP)
    assert_off(played)


def test_what_cannot_be_killed_keeps_its_units():
    played = Played().up()
    ticket = played.client.write(pieces(1, 2), KEY)
    assert played.client.close(1.0) == []
    assert played.passes(100.0, 100) == []
    played.life.die()
    assert [event[:2] + event[3:] for event in played.passes(0.1)] == [("failed", ticket, [1, 2])]
    assert_off(played)
