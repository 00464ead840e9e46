"""The engine's own retraction, driven end to end: release_req, the queue, the resume."""

from __future__ import annotations

import oracle
import pytest
import torch
from retracting import world_with
from server_fixture import World

pytestmark = pytest.mark.both_layouts

LENGTHS = (3, 130, 257, 511, 1000)
FULL = (127, 128, 255, 256, 512)  # one token more would be in another block or page


@pytest.mark.parametrize("overlap", (False, True))
@pytest.mark.parametrize("n", (*LENGTHS, *FULL))
def test_a_request_comes_back_exactly(n: int, overlap: bool) -> None:
    """overlap: a forward is in flight, whose token the committed length counts, and which must not be saved."""
    world = World()
    world.admit(40, "neighbour")  # so that neither the first page nor the first slot is used
    req = world.admit(n, overlap=overlap)
    assert world.committed(req) == n + overlap
    oracle.fill(world.pool, seed=n)
    expected, old_slots, old_slot = world.read(req), world.slots(req), world.slot(req)
    before = oracle.snapshot(world.pool)
    world.retract(req)
    oracle.assert_only_changed(before, world.pool)
    assert world.copy_of(req).tokens == n

    taker = world.admit(n + 1, "taker")
    oracle.fill(world.pool, seed=n + 7)
    world.requeue(req)
    before = oracle.snapshot(world.pool)
    assert world.resume() == [req] and world.rebootstrapped == []

    assert world.slot(req) != old_slot and world.committed(req) == n
    assert set(world.slots(req).tolist()).isdisjoint(world.slots(taker).tolist())
    assert not torch.equal(world.slots(req), old_slots)
    oracle.compare(expected, world.read(req))
    allowed = oracle.may_change(world.pool, world.slots(req), n, world.slot(req))
    oracle.assert_only_changed(before, world.pool, allowed)
    assert world.copy_of(req) is None
    assert world.host.counters.saves == world.host.counters.loads == 1
    world.nothing_held()


def test_several_requests_in_another_order() -> None:
    world, order = World(), (4, 2, 0, 3, 1)
    reqs = [world.admit(n, f"r{n}", overlap=bool(i % 2)) for i, n in enumerate(LENGTHS)]
    oracle.fill(world.pool, seed=5)
    expected = [world.read(req) for req in reqs]
    for i in reversed(order):
        world.retract(reqs[i])
    assert world.host.memory.copies == len(LENGTHS)
    world.admit(600, "taker")
    oracle.fill(world.pool, seed=6)
    for i in order:
        world.requeue(reqs[i])
    assert world.resume() == [reqs[i] for i in order]
    for req, rows in zip(reqs, expected, strict=True):
        oracle.compare(rows, world.read(req))
    world.nothing_held()


def test_only_the_asked_requests_are_resumed() -> None:
    world = World()
    reqs = [world.admit(n, f"r{n}") for n in (130, 257)]
    copies = [world.park(req) for req in reqs]
    assert world.queue.resume_retracted_reqs(["r257"]) == [reqs[1]]
    assert (copies[0].released, copies[1].released) == (False, True)
    assert world.queue.resume_retracted_reqs(rids_to_check=["r130"]) == [reqs[0]]


def test_retracted_twice() -> None:
    world = World()
    req = world.admit(250)
    oracle.fill(world.pool, seed=1)
    world.park(req)
    world.admit(250, "taker")
    assert world.resume() == [req]
    for _ in range(10):
        world._decode(req, req.seqlen - 1, 1)
        req.output_ids.append(9)
    oracle.fill(world.pool, seed=2)
    expected = world.read(req)
    copy = world.park(req)
    assert copy.tokens == 260
    oracle.fill(world.pool, seed=3)
    assert world.resume() == [req]
    oracle.compare(expected, world.read(req))
    assert req.retraction_count == 2
    world.nothing_held()


def test_verify_setting_reads_back_through_the_engines_path(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with(monkeypatch, {"DSV4_VERIFY": "1"})
    req = world.admit(511, overlap=True)
    oracle.fill(world.pool, seed=1)
    world.park(req)
    world.admit(511, "taker")
    assert world.resume() == [req]
    assert world.host.counters.verified == 1


def test_recompute_by_the_operator_makes_no_copy() -> None:
    world = World()
    req = world.admit(300)
    world.retract(req, offload_kv=False)  # pause_generation(mode="retract")
    assert world.copy_of(req) is None
    assert world.host.counters.saves == 0


def test_a_refused_request_gives_its_copy_back() -> None:
    world = World()
    req = world.admit(300)
    world.retract(req)
    world.queue.max_total_num_tokens = 10
    world.requeue(req)
    assert world.streamed == [req] and world.queue.retracted_queue == []
    world.nothing_held()


def test_a_request_with_input_embeds_does_not_stop_the_server() -> None:
    world = World()
    req = world.admit(300, input_embeds=[[0.0]])
    world.retract(req)
    world.requeue(req)
    world.resume()
