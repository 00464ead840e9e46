"""A request that has grown to nearly all of the pool: with the engine's reserve for decoding it is more than the pool.

It was admitted, as its prompt and the reserve fitted, and is retracted because its neighbour has more output tokens.
"""

from __future__ import annotations

from typing import Any

import oracle
import pytest
from passes import RESERVED, Server, new_request, timeless
from retracting import ONE_COPY, is_503, prefill_of, world_with

POOL = 16384


def retracted(server: Server, tokens: int = 16000) -> Any:
    """The long one of two; its neighbour has finished, and another request is on its way."""
    long = server.admit(tokens, "long", prompt=POOL - RESERVED - 82)
    short = server.admit(250, "short", prompt=10)
    oracle.fill(server.pool, seed=3)
    long.expected = server.read(long)
    long.time_stats = short.time_stats = timeless()
    prefill_of(server, long)
    running = server.scheduler.running_batch
    running.reqs = [long, short]
    found, _, aborted = server.retract_decode([long, short], iter([False, True, True]))
    assert (found, aborted) == ([long], [])
    running.reqs = [short]
    server.queue.add(long, is_retracted=True)
    server.queue.queue.append(new_request("new", 250))
    server.step()
    server.finish(short)
    running.reqs = []
    return long


@pytest.mark.parametrize("tokens", [POOL - RESERVED + more for more in (0, 1, 255, 256, 257, 511, 512)])
def test_it_comes_back_to_an_empty_pool(tokens: int) -> None:
    server = Server()
    long = server.admit(tokens, "long", prompt=POOL - RESERVED - 82)
    oracle.fill(server.pool, seed=3)
    expected = server.read(long)
    server.park(long)
    assert server.resume() == [long]
    oracle.compare(expected, server.read(long))
    server.nothing_held()


def test_its_neighbour_ends_and_the_server_goes_on() -> None:
    server = Server()
    long = retracted(server)
    server.step()
    assert server.scheduler.waiting_queue == [long] and server.queue.retracted_queue == []
    oracle.compare(long.expected, server.read(long))
    server.nothing_held()
    server.scheduler.waiting_queue, server.scheduler.running_batch.reqs = [], [long]
    server.step()
    assert not server.transfers.queue, "there is no room beside it"
    server.finish(long)
    server.scheduler.running_batch.reqs = []
    server.step()
    assert [entry.req.rid for entry in server.transfers.queue] == ["new"]


def test_while_anything_else_holds_a_page_it_waits() -> None:
    server = Server()
    other = server.admit(10, "other")
    long = retracted(server, 15870)
    assert 15870 + RESERVED < POOL < 15870 + RESERVED + 256
    for _ in range(3):
        server.step()
    assert server.queue.retracted_queue == [long]
    server.finish(other)
    server.step()
    assert server.scheduler.waiting_queue == [long]


def test_what_is_behind_it_is_not_let_past() -> None:
    server = Server()
    long = retracted(server)
    second = server.admit(300, "second")
    server.park(second)
    server.step()
    assert server.scheduler.waiting_queue == [long] and server.queue.retracted_queue == [second]


def test_without_a_copy_it_is_answered_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server = world_with(monkeypatch, ONE_COPY, Server)
    first = server.admit(100, "first")
    first.time_stats = timeless()
    server.park(first)
    monkeypatch.setattr(server.queue, "retracted_queue", [])  # away, with the only room for a copy
    long = retracted(server)
    assert server.copy_of(long) is None
    assert server.streamed == [long] and is_503(long.finished_reason)
    assert [entry.req.rid for entry in server.transfers.queue] == ["new"]
