"""Copies that are not loaded: their request was aborted, the memory handed back, or the weights changed meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oracle
import pytest
from retracting import is_503
from server_fixture import WEIGHT_SOURCES, World, update_weights

pytestmark = pytest.mark.both_layouts

# --------------------------------------------------------------------------- aborts and dropped requests


def test_abort_releases_the_copy_at_once() -> None:
    world = World()
    reqs = [world.admit(n, rid) for n, rid in ((130, "a1"), (257, "b1"), (300, "a2"))]
    copies = [world.park(req) for req in reqs]
    world.abort("a")
    assert [copy.released for copy in copies] == [True, False, True]
    assert sorted(world.aborted) == ["a1", "a2"]
    assert world.queue.retracted_queue == [reqs[1]]
    assert world.host.memory.leaks == 0
    assert world.resume() == [reqs[1]]
    world.nothing_held()


def test_a_server_without_a_decode_queue_aborts_as_the_engine_does() -> None:
    from sglang_dsv4.engine.aborting import abort_request

    called: list[Any] = []
    for scheduler in (SimpleNamespace(), SimpleNamespace(disagg_decode_prealloc_queue=None)):
        abort_request(lambda *args: called.append(args), scheduler, "request")
        assert called.pop() == (scheduler, "request")


# ---------------------------------------------------------------------------------- weights, trap 14


def stale_world(source: str, fail: bool = False, **kwargs: Any) -> tuple[World, Any, Any]:
    world = World()
    req = world.admit(300, **kwargs)
    copy = world.park(req)
    update_weights(source, fail)
    return world, req, copy


@pytest.mark.parametrize("fail", (False, True))
@pytest.mark.parametrize("source", WEIGHT_SOURCES)
def test_a_copy_of_other_weights_is_recomputed(source: str, fail: bool) -> None:
    world, req, copy = stale_world(source, fail)
    last = req.output_ids[-1]
    assert world.resume() == []
    assert copy.released and world.copy_of(req) is None
    assert world.host.counters.loads == 0
    assert world.host.counters.fallbacks == {"StaleWeights": 1}
    assert world.rebootstrapped == [req] and world.queue.retracted_queue == []
    assert req.pd_rebootstrap_in_progress is True
    assert req.pd_rebootstrap_forced_output_id == last
    world.nothing_held()


@pytest.mark.parametrize("kind", ("multimodal", "fake"))
def test_a_stale_request_that_cannot_be_recomputed_is_answered_503(kind: str) -> None:
    world, req, copy = stale_world("disk", **{kind: True})
    assert world.resume() == [] and world.queue.retracted_queue == []
    assert copy.released
    assert world.host.counters.fallbacks == {"StaleWeights": 1}
    if kind == "fake":
        assert world.rebootstrapped == [req]
    else:
        assert (world.streamed, world.rebootstrapped) == ([req], [])
        assert is_503(req.finished_reason)
    world.nothing_held()


def test_only_stale_copies_are_dropped() -> None:
    world = World()
    old, new = world.admit(130, "old"), world.admit(257, "new")
    world.park(old)
    update_weights("ipc")
    oracle.fill(world.pool, seed=1)
    expected = world.read(new)
    world.park(new)
    oracle.fill(world.pool, seed=2)
    assert world.resume() == [new]
    oracle.compare(expected, world.read(new))
    assert world.rebootstrapped == [old]
    world.nothing_held()
