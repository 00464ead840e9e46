"""Little room: who comes back when. Requests resumed in one pass fit together, in pages; nothing waits for ever."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
from passes import RESERVED, Server, new_request, timeless
from retracting import ONE_COPY, is_503, prefill_of, world_with
from server_fixture import SPEC, World

from sglang_dsv4.testing.standalone import PoolSpec

# Tokens of which the window's tail takes two pages, the second of them hardly used.
TAIL_OF_TWO = 300


def world_of(pages: int, swa_pages: int) -> World:
    return World(PoolSpec(pages=pages, swa_pages=swa_pages, requests=SPEC.requests))


def parked(world: World, lengths: tuple[int, ...]) -> list:
    """Requests of ``lengths``, retracted one by one, so that all of them together need not fit."""
    reqs = []
    for number, n in enumerate(lengths):
        req = world.admit(n, f"r{number}")
        oracle.fill(world.pool, seed=number)
        req.expected = world.read(req)
        world.park(req)
        reqs.append(req)
    return reqs


@pytest.mark.parametrize("short", ("swa", "full"))
def test_the_second_waits_where_only_its_tokens_would_fit(short: str) -> None:
    """Three pages are free: 300 + 300 tokens are less, and two pages each are more. The reserve is less than a page."""
    world = world_of(24, 3) if short == "swa" else world_of(3, 12)
    reqs = parked(world, (TAIL_OF_TWO, TAIL_OF_TWO))
    world.queue.num_reserved_decode_tokens = 16
    assert world.resume() == [reqs[0]]
    assert world.queue.retracted_queue == [reqs[1]]
    oracle.compare(reqs[0].expected, world.read(reqs[0]))
    world.retract(reqs[0], offload_kv=False)
    assert world.resume() == [reqs[1]]
    oracle.compare(reqs[1].expected, world.read(reqs[1]))
    world.nothing_held()


POOL = 16384


def long_one_retracted(server: Server, tokens: int = 16000) -> Any:
    """The long one of two; its neighbour has finished, and another request is on its way."""
    long = server.admit(tokens, "long", prompt=POOL - RESERVED - 82)
    short = server.admit(250, "short", prompt=10)
    oracle.fill(server.pool, seed=3)
    long.expected = server.read(long)
    prefill_of(server, long)
    retract_first(server, long, short)
    server.queue.queue.append(new_request("new", 250))
    server.step()
    finish_last(server, short)
    return long


def retract_first(server: Server, long: Any, short: Any) -> None:
    """Of two running requests the engine retracts the first."""
    long.time_stats = short.time_stats = timeless()
    found, _, aborted = server.retract_decode([long, short], iter([False, True, True]))
    assert (found, aborted) == ([long], [])
    server.scheduler.running_batch.reqs = [short]
    server.queue.add(long, is_retracted=True)


def finish_last(server: Server, req: Any) -> None:
    server.finish(req)
    server.scheduler.running_batch.reqs = []


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
    long = long_one_retracted(server)
    server.step()
    assert server.scheduler.waiting_queue == [long] and server.queue.retracted_queue == []
    oracle.compare(long.expected, server.read(long))
    server.nothing_held()
    server.scheduler.waiting_queue, server.scheduler.running_batch.reqs = [], [long]
    server.step()
    assert not server.transfers.queue, "there is no room beside it"
    finish_last(server, long)
    server.step()
    assert [entry.req.rid for entry in server.transfers.queue] == ["new"]


def test_while_anything_else_holds_a_page_it_waits() -> None:
    server = Server()
    other = server.admit(10, "other")
    long = long_one_retracted(server, 15870)
    assert 15870 + RESERVED < POOL < 15870 + RESERVED + 256
    for _ in range(3):
        server.step()
    assert server.queue.retracted_queue == [long]
    server.finish(other)
    server.step()
    assert server.scheduler.waiting_queue == [long]


def full_host(monkeypatch: pytest.MonkeyPatch, **way: Any) -> Server:
    """A server whose only room for a copy is taken by a request that never comes back."""
    server = world_with(monkeypatch, ONE_COPY, Server, **way)
    first = server.admit(100, "first")
    first.time_stats = timeless()
    server.park(first)
    monkeypatch.setattr(server.queue, "retracted_queue", [])
    return server


def retracted_without_a_copy(server: Server, tokens: int, max_new: int, prompt: int = 8000, rid: str = "long") -> Any:
    """A request that was alone in the pool, and is held for its recompute. Its ``max_new_tokens`` is the client's."""
    req = server.admit(tokens, rid, prompt=min(prompt, tokens - 50))
    req.time_stats, req.sampling_params.max_new_tokens = timeless(), max_new
    prefill_of(server, req)
    server.retract(req)
    assert server.copy_of(req) is None
    server.queue.add(req, is_retracted=True)
    return req


def transferring(server: Server) -> list[str]:
    return [entry.req.rid for entry in server.transfers.queue]


@pytest.mark.parametrize("tokens", [12032, 12033, 12600, POOL - RESERVED, POOL - RESERVED + 1, 15900, POOL - 1])
@pytest.mark.parametrize("max_new", [1, 8000])
def test_a_recompute_that_an_empty_pool_has_room_for_is_admitted(
    monkeypatch: pytest.MonkeyPatch, tokens: int, max_new: int
) -> None:
    """The engine would ask for its length and for all that it was to decode from its prompt on, which is more."""
    server = full_host(monkeypatch)
    long = retracted_without_a_copy(server, tokens, max_new)
    server.step()
    server.shake_hands()
    server.queue.queue.append(new_request("new", 250))
    server.step()
    assert transferring(server)[:1] == ["long"] and not server.streamed
    assert long.kv.kv_allocated_len == tokens
    server.transfers.arrived = True
    server.step()
    server.finish(long)
    server.scheduler.waiting_queue, server.transfers.arrived = [], False
    server.step()
    assert not server.queue.queue, "the new one went with it, or after it"


def test_a_recompute_that_exceeds_the_pool_is_answered_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are all there are, and its next token needs one more."""
    server = full_host(monkeypatch)
    long = retracted_without_a_copy(server, POOL, 8000)
    server.queue.queue.append(new_request("new", 250))
    server.step()
    assert server.streamed == [long] and is_503(long.finished_reason)
    assert "DSV4_HOST_GB" in long.finished_reason.message
    assert transferring(server) == ["new"]


def test_recomputes_that_do_not_fit_together_come_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    server = full_host(monkeypatch)
    reqs = {
        rid: retracted_without_a_copy(server, tokens, 8000, rid=rid)
        for rid, tokens in [("a", 12600), ("b", POOL), ("c", 15900), ("d", 300)]
    }
    seen = []
    for _ in range(6):
        server.step()
        server.shake_hands()
        server.step()
        seen.append(transferring(server))
        server.transfers.arrived = True
        server.step()
        for req in server.scheduler.waiting_queue:
            server.finish(req)
        server.scheduler.waiting_queue, server.transfers.arrived = [], False
    assert server.streamed == [reqs["b"]] and is_503(reqs["b"].finished_reason)
    assert [rids for rids in seen if rids] == [["a"], ["c"], ["d"]] and not server.queue.queue


def test_a_recompute_waits_while_others_hold_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    server = full_host(monkeypatch)
    retracted_without_a_copy(server, 15900, 8000)
    other = server.admit(600, "other")
    server.scheduler.running_batch.reqs = [other]
    server.step()
    server.shake_hands()
    server.step()
    assert transferring(server) == []
    finish_last(server, other)
    server.step()
    assert transferring(server) == ["long"]


def test_a_recompute_whose_window_and_answer_exceed_the_window_pool_is_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was admitted beside others, whose windows the engine would have retracted for it."""
    server = full_host(monkeypatch, swa_pages=8)
    retracted_without_a_copy(server, 1000, 8000)
    server.step()
    server.shake_hands()
    server.step()
    assert transferring(server) == ["long"]


def crowded(refuse: str | None = None) -> tuple[Server, Any]:
    """The long one of two running requests is retracted, while what was admitted beside them holds the rest."""
    server = Server(refuse)
    long, short = server.admit(6000, "long", prompt=5990), server.admit(300, "short", prompt=250)
    server.scheduler.running_batch.reqs = [long, short]
    server.queue.queue.extend(new_request(f"new{number}", 250) for number in range(16))
    for _ in range(3):
        server.step()
    assert server.transfers.queue
    while server.grow(short, 128) and server.grow(long, 128):
        server.step()
    retract_first(server, long, short)
    finish_last(server, short)
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
