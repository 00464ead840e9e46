"""On a decode server, too, what the engine recorded for a request by cache slot is at its new slots when it is back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from server_fixture import SPEC, World, world_with
from sglang.srt.state_capturer.base import TopkCaptureOutput

from sglang_dsv4.cache.families import Geometry
from sglang_dsv4.cache.units import Units
from sglang_dsv4.engine.retract import choices

ASKED = {
    "experts": {"enable_return_routed_experts": True},
    "index": {"enable_return_indexer_topk": True},
    "both": {"enable_return_routed_experts": True, "enable_return_indexer_topk": True},
}


def noise(world: World, seed: int) -> list[torch.Tensor]:
    """Fills the engine's buffers with noise; returns copies of them."""
    for buffer in world.choices.buffers:
        buffer.random_(0, 1 << 30, generator=torch.Generator().manual_seed(seed))
    return [buffer.clone() for buffer in world.choices.buffers]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("way", ASKED)
def test_every_row_comes_back_and_no_other_changes(way: str, overlap: bool) -> None:
    world = World(replace(SPEC, server_args=ASKED[way]))
    assert len(world.choices.buffers) == len(ASKED[way])
    world.admit(40, "neighbour")
    for tokens in (3, 255, 256, 257, 512, 1000):
        req = world.admit(tokens, f"r{tokens}", overlap=overlap)
        req.return_routed_experts = req.return_indexer_topk = True
        saved, before = world.slots(req), noise(world, tokens)
        world.retract(req)
        taker = world.admit(tokens + 1, f"taker{tokens}")
        world.requeue(req)
        others = noise(world, tokens + 1)
        assert world.resume() == [req]
        slots = world.slots(req)
        assert not torch.equal(slots, saved)
        for buffer, old, other in zip(world.choices.buffers, before, others, strict=True):
            other[slots] = old[saved]
            assert torch.equal(buffer, other), "a row was lost, or another was written"
        for ended in (req, taker):
            world.finish(ended)
    assert not world.host.counters.fallbacks
    world.nothing_held()


def test_a_flush_leaves_those_of_who_is_away() -> None:
    world = World(replace(SPEC, server_args=ASKED["both"]))
    req = world.admit(600)
    saved, before = world.slots(req), noise(world, 1)
    world.park(req)
    world.scheduler._engine_paused = True
    assert world.scheduler.flush_cache()
    world.scheduler._engine_paused = False
    noise(world, 2)
    assert world.resume() == [req]
    for buffer, old in zip(world.choices.buffers, before, strict=True):
        assert torch.equal(buffer[world.slots(req)], old[saved])


@pytest.mark.parametrize("loaded", [False, True])
def test_a_step_in_flight_records_nothing_at_its_new_slots(loaded: bool) -> None:
    """loaded: the slot is of the request that came back, not of one that still runs."""
    world = World(replace(SPEC, server_args=ASKED["experts"]))
    stays, req = world.admit(300, "stays"), world.admit(300, "away")
    world.park(req)
    slot = world.slots(stays)[299:].clone()
    output = TopkCaptureOutput(
        slot, torch.full((1, 3, 2), 77, dtype=torch.int32), SimpleNamespace(buffer=world.choices.buffers[0])
    )
    result = SimpleNamespace(routed_experts_output=output, indexer_topk_output=None)
    world.scheduler.result_queue.append((SimpleNamespace(reqs=[stays]), result))
    assert world.resume() == [req]
    if loaded:
        output.out_cache_loc = world.slots(req)[44:45].clone()
    result.routed_experts_output.finalize()
    assert (world.choices.buffers[0] == 77).any() != loaded


def test_they_take_their_part_of_the_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """DSV4_HOST_GB counts them: a unit has so much more, and there are so many fewer."""
    plain, units = Units.of(Geometry(SPEC.ratios)), 24
    row = 3 * 2 * 4 + 1 * 5 * 4
    given = units * (plain.nbytes + 256 * row)
    settings = {"DSV4_HOST_GB": repr(given / 2**30)}
    world = world_with(monkeypatch, settings, spec=replace(SPEC, server_args=ASKED["both"]))
    memory = world.host.memory
    assert (memory.units.nbytes, memory.units.cost, memory.pool.total) == (plain.nbytes, given // units, units)
    assert given <= memory.arena.nbytes <= given + 4096
    req = world.admit(300, "away")
    world.retract(req)
    assert world.copy_of(req) is not None
    assert memory.held_bytes == plain.count(300) * memory.units.cost


def test_a_pipeline_has_none_of_them() -> None:
    """Each of its stages records its own layers, and keeps the results of its steps elsewhere."""
    world = World(replace(SPEC, server_args=ASKED["both"]))
    assert len(choices.buffers(world.scheduler)) == 2
    assert choices.buffers(SimpleNamespace(server_args=SimpleNamespace(pp_size=2))) == ()
