"""A decode server with online compression: a retract takes the step in flight, and never copies beside one."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
from server_fixture import World
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools

from sglang_dsv4.errors import LayoutRefused
from sglang_dsv4.pools.copy_service import ServerContext
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.standalone import PoolSpec, make_pool


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(pools, "ONLINE_C128", True)
    return World()


def launched(world: World, *reqs: Any) -> None:
    """Lets a step of ``reqs`` be in flight, whose result is one token each."""

    def process(batch: Any, _: Any) -> None:
        for req in batch.reqs:
            req.output_ids.append(9)

    vars(world.scheduler).update(
        result_queue=deque([(SimpleNamespace(reqs=list(reqs)), None)]), process_batch_result=process, last_batch="last"
    )


def test_a_retract_keeps_the_token_in_flight(world: World) -> None:
    long, short = (world.admit(n, rid=f"r{n}", overlap=True) for n in (300, 200))
    launched(world, long, short)
    oracle.fill(world.pool, 5)
    batch = world._batch([long, short])
    batch.check_decode_mem = lambda selected_indices=None: True  # as where a test forces the retract
    batch.filter_batch = lambda keep_indices=None: None
    (retracted,), _, _ = batch.retract_decode()
    copy = world.copy_of(retracted)
    assert copy is not None
    assert copy.tokens == {"r300": 301, "r200": 201}[retracted.rid]
    assert (len(world.scheduler.result_queue), world.scheduler.last_batch) == (0, None)


def test_a_release_beside_a_step_in_flight_makes_no_copy(world: World) -> None:
    req, other = world.admit(300, rid="a", overlap=True), world.admit(200, rid="b")
    launched(world, req)
    assert world.retract(other), "its own step is over"
    assert world.copy_of(other) is not None
    world.retract(req)
    assert world.copy_of(req) is None
    assert dict(world.host.counters.fallbacks) == {"StepInFlight": 1}
    world.requeue(req)
    assert world.rebootstrapped == [req]


def test_a_pipeline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "ONLINE_C128", True)
    pool = make_pool(PoolSpec())
    assert pool.attach_host(Settings(), ServerContext(stages=2)) is None
    assert pool.refusal == "online c128 compression with pipeline stages"
    with pytest.raises(LayoutRefused, match="pipeline stages"):
        pool.require_host()


def test_the_slots_are_those_of_the_request_table(world: World) -> None:
    """The engine's buffer has two rows more, and with a ring as many slots more."""
    (rows,) = {
        len(state.kv_score_buffer.kv_score) for state in world.pool.compress_state_pools if state and state.online
    }
    assert world.host.buffers.request_slots == world.pool.num_req_slots == rows - 2
