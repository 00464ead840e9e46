"""A recompute does not meet what its request left at the prefill server, and says no token twice."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from server_fixture import World, crowded, prefill_of
from sglang.srt.managers.io_struct import PdRoleSwitchReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import output_streamer

from sglang_dsv4.engine.decode import recompute
from sglang_dsv4.engine.state import request_state

ROOM = 4711


@pytest.fixture
def retracted(monkeypatch: pytest.MonkeyPatch) -> tuple[World, Any]:
    """A request for whose copy there is no room."""
    world, req = crowded(monkeypatch)
    req.bootstrap_room = ROOM
    assert world.retract(req) in (None, True)
    assert world.copy_of(req) is None
    return world, req


def test_in_a_pause_it_waits_until_generation_continues(retracted: tuple[World, Any]) -> None:
    """A flush in the pause must find the queue empty."""
    world, req = retracted
    world.queue.add(req, is_retracted=True)
    assert world.queue.held_rebootstrap_reqs == [req], "the step in flight streams its last token yet"
    world.scheduler._engine_paused = True
    world.resume()
    assert world.rebootstrapped == []
    world.queue.enqueue_held_rebootstrap()  # the engine, when generation continues
    assert world.rebootstrapped == [req] and req.pd_rebootstrap_forced_output_id is not None


@pytest.mark.parametrize("rid", ["second", "sec", "", "other"])
@pytest.mark.parametrize("paused", [False, True])
def test_an_abort_finds_what_waits(retracted: tuple[World, Any], paused: bool, rid: str) -> None:
    world, req = retracted
    world.queue.add(req, is_retracted=True)
    world.scheduler._engine_paused = paused
    world.abort(rid)
    gone = rid != "other"
    assert world.queue.held_rebootstrap_reqs == ([] if gone else [req])
    assert world.streamed == ([req] if gone else [])
    world.scheduler._engine_paused = False
    world.resume()
    assert world.rebootstrapped == ([] if gone else [req])
    if gone:
        assert "Aborted" in req.finished_reason.message


def test_each_recompute_has_a_room_and_an_id_of_its_own(retracted: tuple[World, Any]) -> None:
    """And the rank that computed it first is asked."""
    world, req = retracted
    prefill_of(world, req, rank=3, dp_size=5, follow_bootstrap_room=False)
    rid = req.rid
    rooms, rids = {ROOM}, {rid}
    for number in range(1, 4):
        world.requeue(req)
        assert world.rebootstrapped == [req], "on its way, in the room"
        assert world.queue.queue[-1].kv_receiver.init.calls == [((3,), {})]
        payload = req.build_rebootstrap_payload()
        assert (payload["routed_dp_rank"], payload["disagg_prefill_dp_rank"]) == (3, 3)
        assert payload["bootstrap_room"] == req.bootstrap_room and req.rid == rid
        rooms.add(payload["bootstrap_room"])
        rids.add(payload["rid"])
        assert len(rooms) == len(rids) == number + 1
        world.queue.queue.clear()


def test_ranks_of_a_server_choose_the_same_room_whatever_each_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's own heartbeat may have forgotten the prefill server for a moment."""
    rooms = set()
    for forgotten in (False, True):
        world, req = crowded(monkeypatch)
        req.bootstrap_room = ROOM
        prefill_of(world, req)
        world.retract(req)
        if forgotten:
            world.queue.kv_manager.prefill_info_table.clear()
        world.requeue(req)
        rooms.add(req.bootstrap_room)
        assert ([entry.req for entry in world.queue.pending_reqs] == [req]) is forgotten
    assert len(rooms) == 1 and rooms != {ROOM}


def test_the_highest_rooms_stay_in_range() -> None:
    for room in (0, 1, recompute.ROOMS - 1, recompute.ROOMS - 2 * recompute.ROOMS_APART):
        req = SimpleNamespace(bootstrap_room=room, output_ids=[])
        request_state(req).prefill_rank = 0
        seen = {room}
        for _ in range(50):
            request_state(req).held = True
            recompute.prepare_recompute(req)
            assert 0 <= req.bootstrap_room < 2**63 and req.bootstrap_room not in seen
            seen.add(req.bootstrap_room)


def test_a_recompute_of_the_operator_has_a_fresh_room_too(retracted: tuple[World, Any]) -> None:
    world, req = retracted
    prefill_of(world, req)
    world.requeue(req)
    ours, tokens = req.bootstrap_room, list(req.output_ids)
    world.queue.queue.clear()
    world.queue.hold_rebootstrap(req)  # pause_generation, which has taken the token already
    world.resume()
    assert world.rebootstrapped == [], "generation is paused"
    world.queue.enqueue_held_rebootstrap()
    assert world.rebootstrapped == [req] and list(req.output_ids) == tokens
    assert req.bootstrap_room not in {ROOM, ours} and req.build_rebootstrap_payload()["rid"] == f"{req.rid}-2"


def test_without_host_memory_the_engine_is_left_alone() -> None:
    world = World(refuse="not covered")
    req = world.admit(300)
    req.bootstrap_room = ROOM
    prefill_of(world, req)
    world.queue.add(req, is_rebootstrap=True)
    assert req.bootstrap_room == ROOM and req.build_rebootstrap_payload()["rid"] == req.rid


def streamer(**changes: Any) -> Any:
    """The engine's own collector of what is sent; fields without a default are off."""
    kind = output_streamer._GenerationStreamAccumulator
    plain: dict[str, Any] = {
        f.name: False for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }  # fmt: skip
    plain |= {"default_stream_interval": 1, "default_force_stream_interval": 50, "get_cached_tokens_details": id}
    plain["spec_algorithm"] = SimpleNamespace(is_none=lambda: True)
    return kind(**{name: value for name, value in (plain | changes).items() if name in plain})


@pytest.mark.parametrize("interval", [1, 4])
def test_no_token_is_streamed_twice(retracted: tuple[World, Any], interval: int) -> None:
    world, req = retracted
    req.stream = True
    sent = streamer(default_stream_interval=interval)
    for _ in range(8):  # so that some interval ends here
        sent.accept(req=req)
        req.output_ids.append(500 + len(req.output_ids))
    sent.accept(req=req)
    world.queue.add(req, is_retracted=True)
    sent.accept(req=req)  # the step in flight
    recompute.send_held(world.queue)
    req.output_ids.append(req.pd_rebootstrap_forced_output_id)  # the engine's commit
    req.pd_rebootstrap_forced_output_id = None
    for _ in range(2 * interval):
        sent.accept(req=req)
        req.output_ids.append(900 + len(req.output_ids))
    sent.accept(req=req)
    streamed = [token for tokens in sent.output_ids for token in tokens]
    text = [token for tokens in sent.decode_ids_list for token in tokens][-len(streamed) :]
    wanted = list(req.output_ids)[: len(streamed)]
    assert streamed == wanted and text == wanted and len(streamed) > len(req.output_ids) - interval
    assert sent.completion_tokens == sorted(sent.completion_tokens)


def switchable(world: World) -> World:
    """``world``'s server may switch, and is idle as far as the engine knows."""
    scheduler = world.scheduler
    scheduler.server_args = SimpleNamespace(enable_pd_role_switch=True)
    scheduler._pd_role_switch_unhealthy = scheduler._pd_role_switch_in_progress = False
    scheduler.disagg_decode_prealloc_queue.kv_manager = SimpleNamespace(supports_role_switch=True)
    scheduler.is_fully_idle = lambda: True
    return world


ASKED_FIRST = "prepare_only" in PdRoleSwitchReqInput.__struct_fields__  # not in 0.5.22, which switches at once


def switch(world: World, role: str) -> Any:
    """The engine's own answer: the check of all ranks before any of them changes."""
    only = {"prepare_only": True} if ASKED_FIRST else {}
    return Scheduler.handle_pd_role_switch(world.scheduler, PdRoleSwitchReqInput(new_role=role, **only))


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
