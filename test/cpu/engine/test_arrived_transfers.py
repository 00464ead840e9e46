"""A retracted request may wait for pages that finished transfers hold: they must be taken out, or nothing moves."""

from __future__ import annotations

from typing import Any

import pytest
from passes import Server, new_request, timeless


def crowded(refuse: str | None = None) -> tuple[Server, Any]:
    """The long one of two running requests is retracted, while what was admitted beside them holds the rest."""
    server = Server(refuse)
    queue, running = server.queue, server.scheduler.running_batch
    long, short = server.admit(6000, "long", prompt=5990), server.admit(300, "short", prompt=250)
    running.reqs = [long, short]
    queue.queue.extend(new_request(f"new{number}", 250) for number in range(16))
    for _ in range(3):
        server.step()
    assert server.transfers.queue
    while server.grow(short, 128) and server.grow(long, 128):
        server.step()
    long.time_stats = short.time_stats = timeless()
    retracted, _, aborted = server.retract_decode([long, short], iter([False, True, True]))
    assert (retracted, aborted) == ([long], [])
    running.reqs = [short]
    queue.add(long, is_retracted=True)
    server.finish(short)
    running.reqs = []
    return server, long


@pytest.mark.parametrize("refuse", [None, "not covered"])
def test_the_server_goes_on_with_what_has_arrived(refuse):
    """``refuse``: no copies are made, and its request is on its way to be computed again."""
    server, long = crowded(refuse)
    server.transfers.arrived = True
    server.step()
    assert server.scheduler.waiting_queue and not server.transfers.queue
    if refuse:
        return
    assert server.queue.retracted_queue == [long]
    for req in server.scheduler.waiting_queue:
        server.finish(req)
    server.scheduler.waiting_queue, server.transfers.arrived = [], False
    server.step()
    assert server.scheduler.waiting_queue == [long], "their pages are free now"


def test_nothing_new_is_admitted_while_a_request_waits():
    server, long = crowded()
    waiting = len(server.queue.queue)
    assert waiting
    server.transfers.arrived = True
    server.step()
    assert len(server.queue.queue) == waiting and server.queue.retracted_queue == [long]


def test_the_ranks_of_a_pipeline_agree_on_what_has_arrived_elsewhere():
    server, long = crowded()
    server.transfers.arrived = True
    held = list(server.transfers.queue)
    server.queue.resume_retracted_reqs([long.rid])
    assert server.transfers.queue == held and not server.scheduler.waiting_queue


def test_what_has_not_arrived_stays():
    server, _ = crowded()
    held = list(server.transfers.queue)
    server.step()
    assert server.transfers.queue == held and not server.scheduler.waiting_queue
