"""A request with a copy meets the engine's admission: its inequalities, its budgets, and its ways to say no."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from plain_world import ask, came_back, nothing_is_held, over, retracted, run_to, serving, small_world
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_dsv4.engine.releases import engine_release


def test_trap_9_the_cursor_outlives_the_batch() -> None:
    world, req = retracted(600)
    world.step()
    assert engine_release().cursor(req) == 256  # the page of position 600 - 127


def test_trap_11_a_request_turned_away_leaves_nothing_taken() -> None:
    """The engine refuses it after its pages were taken: here another rank of DP attention delays prefills."""
    world, req = retracted()
    before = world.totals()
    delayer = SimpleNamespace(negotiate_should_allow_prefill=lambda **_: False)
    busy = SimpleNamespace(reqs=[], batch_size=lambda: 0)
    adder, result = ask(world, req, running=busy, prefill_delayer_single_pass=delayer)
    assert (result, adder.can_run_list) == (AddReqResult.OTHER, [])
    assert world.totals() == before
    world.check_integrity()
    assert serving(world).count == 1
    came_back(world, req)
    over(world)


@pytest.mark.parametrize("full", [{"prefill_max_requests": 0}, {"chunk": 0}])
def test_trap_17_nothing_is_taken_in_a_pass_that_is_full(full: dict[str, Any], monkeypatch: Any) -> None:
    """An eviction for a request that the engine turns away would cost others their prefixes."""
    world, req = retracted()
    monkeypatch.setattr(world.allocator, "alloc_extend_swa_tail", None)
    adder, result = ask(world, req, **full)
    assert (result, adder.can_run_list) == (AddReqResult.OTHER, [])
    assert serving(world).count == 1


def test_while_others_run_it_waits_for_room() -> None:
    world, req = retracted(pages=16)
    other = world.submit(range(9000, 9300), max_new=5)
    busy = SimpleNamespace(reqs=[other], batch_size=lambda: 1)
    world.scheduler.waiting_queue.remove(other)
    before = world.totals()
    hold = world.allocator.alloc_extend_swa_tail  # nothing is asked of the allocator
    world.allocator.alloc_extend_swa_tail = None
    req.sampling_params.max_new_tokens = 6000
    adder, result = ask(world, req, running=busy)
    assert (result, adder.can_run_list) == (AddReqResult.NO_TOKEN, [])
    assert world.totals() == before
    world.allocator.alloc_extend_swa_tail = hold


def test_what_only_the_engine_has_room_for_is_prefilled_again() -> None:
    """A window pool too small for a restore's reserve, but not for chunks: no deadlock, one recompute."""
    world, req = retracted(swa_pages=3)
    world.run()
    assert req.finished()
    assert dict(serving(world).host.counters.fallbacks) == {"NoRoom": 1}
    nothing_is_held(world)


@pytest.mark.parametrize("tokens", [513, 620, 638])
def test_nearly_all_matched_is_left_to_an_extend(tokens: int) -> None:
    """The window begins in the tree's pages."""
    world = small_world()
    req = world.submit(range(max(512, tokens - 5)), max_new=10)
    run_to(world, req, tokens)
    world.retract(req)
    batch = world.step()
    assert batch.extend_lens == [tokens + 1 - 512]
    assert dict(serving(world).host.counters.fallbacks) == {"FewTokens": 1}
    nothing_is_held(world)
    world.run()


def test_another_length_is_prefilled_again() -> None:
    world, req = retracted()
    serving(world).saved_of(req).copy.tokens -= 1
    world.step()
    assert dict(serving(world).host.counters.fallbacks) == {"LengthChanged": 1}
    nothing_is_held(world)
    world.run()
