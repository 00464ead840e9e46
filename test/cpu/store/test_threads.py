"""The thread that reads takes loads in the order in which they are due, and what is in doubt behind them."""

import os
import queue
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_dsv4.store import threads
from sglang_dsv4.store.threads import Channel, Getter, Packet
from sglang_dsv4.store.wire import (
    BEGUN,
    CONTROL,
    GET,
    MAIL,
    PUT,
    SPENT,
    Code,
    Kind,
    Question,
    Spot,
    pack_question,
    pack_spots,
    unpack,
)


@pytest.mark.parametrize(("sizes", "at_once", "ends"), [
    ([64, 48, 32, 48], 4, [3, 2, 4, 1]),  # by turns all would end late
    ([160, *[16] * 13], 2, [*range(2, 11), 1, *range(11, 15)]),  # one that others pass for ever would never end
])  # fmt: skip
def test_the_load_that_is_due_first_is_read(sizes, at_once, ends):
    """Later ones come when another ends."""
    ended, steps, inbox = [], [], queue.SimpleQueue()
    loads = [Packet(Kind.LOAD, number, pack_spots([Spot(0, 0, 0)] * size)) for number, size in enumerate(sizes, 1)]

    def get(jobs):
        for done in range(16, len(jobs) + 1, 16):
            steps.append(len(jobs))
            yield [Code.OK] * done

    def end(kind, ticket, codes):
        ended.append(ticket)
        apart = [sizes[one - 1] for one in ended for _ in range(sizes[one - 1] // 16)]
        assert set(codes) == {Code.OK} and steps == apart
        inbox.put(loads.pop(0) if loads else None if len(ended) == len(sizes) else Packet(Kind.DROP, 99, b""))

    lanes = SimpleNamespace(chain=lambda *_: [bytes(32)], ask=lambda *_: 1, get=get, in_doubt=lambda: False)
    getter = Getter(lanes, SimpleNamespace(send=lambda *_: None, codes=end), np.zeros(8, np.int32), inbox)
    question = pack_question(Question(bytes(32), 0, 0, 1, 1, 0, 0))
    for number in range(1, len(sizes) + 1):
        getter._answer(Packet(Kind.ASK, number, question))
    for _ in range(at_once):
        inbox.put(loads.pop(0))
    getter.run()
    assert ended == ends


def test_what_is_in_doubt_is_read_when_no_load_waits():
    done, inbox, doubt = [], queue.SimpleQueue(), [1, 2, 3]

    def survey():
        done.append(doubt.pop(0))
        if done[-1] == 1:
            inbox.put(Packet(Kind.LOAD, 5, pack_spots([Spot(0, 0, 0)] * 2)))
            raise OSError("of the backend")
        if not doubt:
            inbox.put(None)

    lanes = SimpleNamespace(
        chain=lambda *_: [bytes(32)], ask=lambda *_: 1, in_doubt=lambda: bool(doubt), survey=survey,
        get=lambda jobs: ([Code.OK] * count for count in (1, 2)),
    )  # fmt: skip
    channel = SimpleNamespace(send=lambda *_: None, codes=lambda kind, ticket, codes: done.append((ticket, codes)))
    getter = Getter(lanes, channel, np.zeros(8, np.int32), inbox)
    getter._answer(Packet(Kind.ASK, 5, pack_question(Question(bytes(32), 0, 0, 1, 1, 0, 0))))
    end = threading.Timer(5, inbox.put, [None])
    end.start()
    getter.run()
    end.cancel()
    assert done == [1, (5, [Code.OK] * 2), 2, 3]


def test_the_time_of_calls_counts_by_lane(monkeypatch):
    calls = [(1, GET), (2, PUT), (5, GET), (9, GET), (10, PUT), (12, GET), (20, PUT)]
    shared = np.zeros(CONTROL, np.uint8)
    channel, clock = Channel(None, shared), iter(now for now, _ in calls)
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic_ns=lambda: next(clock)))
    for _, lane in calls:
        channel.beat(lane)
    words = shared.view(np.int64)
    assert [words[(lane + at) // 8] for lane in (GET, PUT) for at in (0, SPENT, BEGUN)] == [4, 4 + 3, 0, 3, 8, 20]


def test_trouble_with_a_folder_whose_name_is_no_utf_8_is_told():
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, ours:
        shared = np.zeros(CONTROL, np.uint8)
        Channel(theirs, shared).oops("no room in " + os.fsdecode(b"/caf\xe9"), 7)
        assert unpack(ours.recv(4096)) == (Kind.OOPS, 7, 0, b"no room in /caf?")
        assert shared.view(np.int64)[MAIL // 8] == 1
