"""Little room: who comes back when. Requests resumed in one pass fit together, in pages; nothing waits for ever."""

from typing import Any

import oracle
import pytest
from passes import RESERVED, Server, new_request, timeless
from server_fixture import ONE_COPY, SPEC, World, is_503, prefill_of, world_with

from sglang_dsv4.testing.standalone import PoolSpec


@pytest.mark.parametrize(("pages", "swa_pages"), [(24, 3), (3, 12)])
def test_the_second_waits_where_only_its_tokens_would_fit(pages: int, swa_pages: int) -> None:
    """Three pages are free: 300 + 300 tokens are less, and two pages each, the window's tail too, are more."""
    world, expected = World(PoolSpec(pages=pages, swa_pages=swa_pages, requests=SPEC.requests)), []
    for number in range(2):
        req = world.admit(300, f"r{number}")
        oracle.fill(world.pool, seed=number)
        expected.append(world.read(req))
        world.park(req)
    first, second = world.queue.retracted_queue
    world.queue.num_reserved_decode_tokens = 16  # less than a page
    assert world.resume() == [first]
    assert world.queue.retracted_queue == [second]
    oracle.compare(expected[0], world.read(first))
    world.retract(first, offload_kv=False)
    assert world.resume() == [second]
    oracle.compare(expected[1], world.read(second))
    world.nothing_held()


POOL = 16384


@pytest.mark.parametrize("tokens", [POOL - RESERVED + more for more in (0, 1, 255, 256, 257, 511, 512)])
def test_it_comes_back_to_an_empty_pool(tokens: int) -> None:
    """While anything else holds a page, it waits: there is no room beside it."""
    server = Server()
    long = server.admit(tokens, "long", prompt=POOL - RESERVED - 82)
    oracle.fill(server.pool, seed=3)
    expected = server.read(long)
    server.park(long)
    other = server.admit(10, "other")
    assert server.resume() == []
    server.finish(other)
    assert server.resume() == [long]
    oracle.compare(expected, server.read(long))
    server.nothing_held()


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
    """The engine would ask for all that it was to decode, too, which is more. While another holds pages, it waits."""
    server = full_host(monkeypatch)
    long = retracted_without_a_copy(server, tokens, max_new)
    other = server.admit(200, "other")
    server.scheduler.running_batch.reqs = [other]
    server.step()
    server.shake_hands()
    server.step()
    assert transferring(server) == []
    finish_last(server, other)
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


@pytest.mark.parametrize("paused", [False, True])
def test_a_recompute_that_exceeds_the_pool_is_answered_and_the_server_goes_on(
    monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    """Its pages are all there are, and its next token needs one more. A pause may come and go before the next pass."""
    server = full_host(monkeypatch)
    long = retracted_without_a_copy(server, POOL, 8000)
    if paused:
        server.queue.enqueue_held_rebootstrap()  # the engine, when generation continues
    server.queue.queue.append(new_request("new", 250))
    server.step()
    assert server.streamed == [long] and is_503(long.finished_reason)
    assert "DSV4_HOST_GB" in long.finished_reason.message
    assert transferring(server) == ["new"]


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


def finish_last(server: Server, req: Any) -> None:
    server.finish(req)
    server.scheduler.running_batch.reqs = []


def test_the_server_goes_on_with_what_has_arrived() -> None:
    """The long one of two running requests is retracted, while what was admitted beside them holds the rest."""
    server = Server()
    long, short = server.admit(6000, "long", prompt=5990), server.admit(300, "short", prompt=250)
    long.time_stats = short.time_stats = timeless()
    server.scheduler.running_batch.reqs = [long, short]
    server.queue.queue.extend(new_request(f"new{number}", 250) for number in range(16))
    for _ in range(3):
        server.step()
    held, waiting = list(server.transfers.queue), len(server.queue.queue)
    assert held and waiting
    while server.grow(short, 128) and server.grow(long, 128):
        server.step()
    assert server.retract_decode([long, short], iter([False, True, True]))[0] == [long]
    server.queue.add(long, is_retracted=True)
    finish_last(server, short)
    server.transfers.arrived = True
    server.queue.resume_retracted_reqs([long.rid])
    assert server.transfers.queue == held, "the ranks of a pipeline agree on what has arrived elsewhere"
    server.step()
    assert server.scheduler.waiting_queue and not server.transfers.queue
    assert server.queue.retracted_queue == [long] and len(server.queue.queue) == waiting, "nothing new goes before it"
    for req in server.scheduler.waiting_queue:
        server.finish(req)
    server.scheduler.waiting_queue, server.transfers.arrived = [], False
    server.step()
    assert server.scheduler.waiting_queue == [long], "their pages are free now"
