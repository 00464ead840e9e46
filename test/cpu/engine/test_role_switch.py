"""0.5.22 and later: a server that holds a request for its recompute is not idle, and keeps its role."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from retracting import crowded
from server_fixture import World, only_new

pytestmark = only_new


def switchable(world: World) -> World:
    """``world``'s server may switch, and is idle as far as the engine knows."""
    scheduler = world.scheduler
    scheduler.server_args = SimpleNamespace(enable_pd_role_switch=True)
    scheduler._pd_role_switch_unhealthy = scheduler._pd_role_switch_in_progress = False
    scheduler.disagg_decode_prealloc_queue.kv_manager = SimpleNamespace(supports_role_switch=True)
    scheduler.is_fully_idle = lambda: True
    return world


def switch(world: World, role: str) -> Any:
    """The engine's own answer: the check of all ranks before any of them changes."""
    from sglang.srt.managers.io_struct import PdRoleSwitchReqInput
    from sglang.srt.managers.scheduler import Scheduler

    return Scheduler.handle_pd_role_switch(world.scheduler, PdRoleSwitchReqInput(new_role=role, prepare_only=True))


@pytest.mark.parametrize("paused", [False, True])
def test_a_held_request_keeps_the_role(monkeypatch: pytest.MonkeyPatch, paused: bool) -> None:
    world, req = crowded(monkeypatch)
    world.retract(req)
    world.queue.add(req, is_retracted=True)
    switchable(world).scheduler._engine_paused = paused
    answer = switch(world, "prefill")
    assert (answer.success, answer.old_role, answer.new_role, answer.safe_to_restore) == (
        False, "decode", "prefill", True,
    )  # fmt: skip
    assert "1 requests are held" in answer.message and world.queue.held_rebootstrap_reqs == [req]
    assert switch(world, "decode").success, "it has that role"


def test_with_nothing_held_the_engine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    world = switchable(World())
    assert switch(world, "prefill").success
    world.scheduler._pd_role_switch_unhealthy = True
    assert "unhealthy" in switch(world, "prefill").message


def test_without_host_memory_the_engine_is_left_alone() -> None:
    world = switchable(World(refuse="not covered"))
    world.queue.held_rebootstrap_reqs.append(world.admit(300))
    assert switch(world, "prefill").success
