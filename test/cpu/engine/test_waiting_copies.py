"""A copy that waits holds nothing of the device: it stops no flush, no weight update and no release of memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import oracle
import pytest
from server_fixture import WEIGHT_SOURCES, World, device_memory, update_weights


class Paused:
    """An idle server with one request that waits with its copy, and what its flushes did."""

    def __init__(self, **kwargs: Any) -> None:
        self.world = world = World(**kwargs)
        self.req = world.admit(300, "away")
        oracle.fill(world.pool, seed=1)
        self.expected = world.read(self.req)
        self.copy = world.park(self.req)
        self.flushes = world.make_idle()
        world.scheduler._engine_paused = True
        self.flush = world.scheduler.flush_cache

    def go_on(self) -> list[Any]:
        """Generation continues; what the next pass resumes."""
        self.world.scheduler._engine_paused = False
        return self.world.resume()

    def comes_back(self) -> None:
        """With its bytes."""
        oracle.fill(self.world.pool, seed=2)
        assert self.go_on() == [self.req]
        oracle.compare(self.expected, self.world.read(self.req))
        self.world.nothing_held()

    def is_computed_again(self) -> None:
        assert self.go_on() == [] and self.copy.released
        assert self.world.rebootstrapped == [self.req]
        self.world.nothing_held()


@pytest.fixture
def paused() -> Paused:
    return Paused()


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_flush_alone_leaves_the_copy_good(paused: Paused, is_paused: bool) -> None:
    paused.world.scheduler._engine_paused = is_paused
    assert paused.flush() and paused.flushes == ["flushed"]
    paused.comes_back()


def test_what_runs_still_forbids_a_flush(paused: Paused) -> None:
    paused.world.scheduler.running_batch.is_empty = lambda: False
    assert not paused.flush() and paused.flushes == []
    assert paused.world.queue.retracted_queue == [paused.req]


def test_a_failing_flush_loses_nobody(paused: Paused) -> None:
    paused.world.scheduler.tree_cache = SimpleNamespace(reset=mock.Mock(side_effect=OSError("broken")))
    with pytest.raises(OSError, match="broken"):
        paused.flush()
    assert paused.world.queue.retracted_queue == [paused.req]


def test_it_outlives_a_release_of_the_cache(paused: Paused) -> None:
    device_memory(paused.world, "release_memory_occupation", "kv_cache")
    assert paused.flushes == ["flushed"] and not paused.copy.released
    assert paused.go_on() == [], "there is no memory to load it into"
    assert paused.world.queue.retracted_queue == [paused.req]
    device_memory(paused.world, "resume_memory_occupation", "kv_cache")
    paused.comes_back()


@pytest.mark.parametrize("tags", [(), ("weights",), ("kv_cache", "weights")])
def test_of_released_weights_nothing_is_known(paused: Paused, tags: tuple[str, ...]) -> None:
    device_memory(paused.world, "release_memory_occupation", *tags)
    device_memory(paused.world, "resume_memory_occupation", *tags)
    paused.is_computed_again()


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("source", WEIGHT_SOURCES)
def test_a_trainers_round(paused: Paused, source: str, released: bool) -> None:
    """Pause, release everything perhaps, resume, write weights with a flush, go on."""
    if released:
        device_memory(paused.world, "release_memory_occupation")
        device_memory(paused.world, "resume_memory_occupation")
    assert update_weights(source, world=paused.world).success
    assert paused.flushes or source == "rdma"
    assert paused.world.queue.retracted_queue == [paused.req], "the request waits as before"
    paused.is_computed_again()


def test_what_runs_still_forbids_a_release(paused: Paused) -> None:
    paused.world.scheduler.running_batch.is_empty = lambda: False
    with pytest.raises(AssertionError, match="only when server is idle"):
        device_memory(paused.world, "release_memory_occupation")
    assert paused.world.queue.retracted_queue == [paused.req] and not paused.copy.released
