"""What a plain server's retract must not save: each reason counted, and the engine's own recompute right after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from plain_world import came_back, forget, nothing_is_held, over, read, run_to, serving, small_world
from pretended_device import Device
from server_fixture import Recorder

from sglang_dsv4.engine.plain.serving import save_retracted
from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.testing.server import Silence


def running(tokens: int = 420, **way: Any) -> tuple[Any, Any]:
    """A world, and its one request, which a retract would save with ``tokens`` tokens."""
    world = small_world(**way)
    req = world.submit(range(tokens - 5), max_new=20)
    run_to(world, req, tokens)
    return world, req


@pytest.mark.parametrize("prompt", [512, 516, 640])
def test_trap_1_a_prefill_in_flight_left_no_state_for_its_last_token(prompt: int) -> None:
    """With overlap, n is one less than the prefill's end, whose state alone was kept."""
    world = small_world(overlap=True)
    req = world.submit(range(prompt), max_new=8)
    world.step()
    assert not req.output_ids
    world.retract(req)
    assert dict(serving(world).host.counters.fallbacks) == {"PrefillInFlight": 1}
    forget(world)
    world.run()
    assert len(req.output_ids) == 8
    nothing_is_held(world)


@pytest.mark.parametrize("beside", [False, True])
def test_trap_1_a_restore_in_flight_is_complete(beside: bool) -> None:
    """It was retracted in its first step, which beside a prefill is an extend: the state at its n was loaded."""
    world, req = running(overlap=True)
    world.retract(req)
    forget(world)
    if beside:
        world.submit(range(9000, 9300), max_new=4)
        assert world.step().extend_lens == [1, 300]
    else:
        came_back(world, req)
    world.retract(req)
    assert serving(world).host.counters.saves == 2
    forget(world)
    world.run()
    assert serving(world).host.counters.loads == 2
    nothing_is_held(world)


@pytest.mark.parametrize(
    ("trap", "change", "reason"),
    [
        (2, {"session": SimpleNamespace(streaming=True)}, "StreamingSession"),
        (4, {"input_embeds": [[0.0]]}, "InputEmbeds"),
    ],
)
def test_traps_2_to_4_what_cannot_be_exact_is_not_saved(trap: int, change: dict[str, Any], reason: str) -> None:
    world, req = running()
    vars(req).update(change)
    save_retracted(world.scheduler.running_batch, 0)
    counters = serving(world).host.counters
    assert (counters.saves, dict(counters.fallbacks)) == (0, {reason: 1})


@pytest.mark.parametrize("asked", ["return_routed_experts", "return_indexer_topk"])
def test_choices_that_the_server_does_not_record_keep_nothing_from_being_saved(asked: str) -> None:
    world, req = running()
    setattr(req, asked, True)
    world.retract(req)
    assert serving(world).host.counters.saves == 1


def test_trap_14_the_last_request_is_aborted_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    world, req = running()
    batch = world.scheduler.running_batch
    monkeypatch.setattr(batch, "check_decode_mem", lambda **_: False)
    aborted = batch.retract_decode()[2]
    assert aborted == [req]
    assert serving(world).host.counters.saves == 0
    nothing_is_held(world)
    assert not serving(world).host.counters.fallbacks  # nothing is prefilled again


def test_a_pause_saves_nothing() -> None:
    """The operator is about to change weights: the engine releases these without asking for a copy."""
    world, _ = running()
    world.scheduler.kv_events_publisher = Silence()
    world.scheduler.pause_generation(SimpleNamespace(mode="retract"))
    assert serving(world).host.counters.saves == 0


def test_a_save_that_turns_out_wrong_is_prefilled_again() -> None:
    """The device says so after the save has returned: the next pass asks, before it admits anybody."""
    world, req = running()
    host = serving(world).host
    wrong = SimpleNamespace(check=Recorder(error=IndexMismatch("position 5 of 420 has its full slot off its page")))
    save = host._copier.save
    host._copier.save = lambda *given: (save(*given), wrong)[1]
    world.retract(req)
    assert serving(world).count == 1 and not host.counters.fallbacks
    forget(world)
    assert world.step().extend_lens == [421]
    assert dict(host.counters.fallbacks) == {"IndexMismatch": 1}
    del host._copier.save
    over(world)


def test_the_next_forward_is_behind_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is launched behind the scheduler's stream. A preemption frees a request by itself, not in a pass of them."""
    world, req = running()
    device = Device(monkeypatch, "main")
    device.serve(serving(world).host)
    expected = read(world, req, 420)
    world.scheduler.running_batch.release_req(0, 0)
    copy = serving(world).saved_of(req).copy
    device.main.enqueue(lambda: oracle.poison(world.pool))
    device.finish()
    again = oracle.Request(oracle.resume(world.allocator, 420), 3, 420)
    mapping = world.pool.full_to_swa_index_mapping
    serving(world).host.load(copy, again.slots.to(torch.int32), mapping, 3)
    oracle.compare(expected, oracle.read(world.pool, again.slots, 420, 3))
