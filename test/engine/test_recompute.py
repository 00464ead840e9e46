"""A recompute does not meet what its request left at the prefill server, and says no token twice."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from engine.retracting import crowded
from engine.world import World
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.decode import _bootstrap_addr
from sglang.srt.managers.scheduler_components import output_streamer

from sglang_dsv4.engine import recompute

pytestmark = pytest.mark.cpu

ROOM = 4711


def prefill_of(world: World, req: Any, **info: Any) -> None:
    """Make the prefill server of ``req`` known."""
    found = SimpleNamespace(dp_size=1, follow_bootstrap_room=True)
    vars(found).update(info)
    world.queue.kv_manager.prefill_info_table[_bootstrap_addr(req)] = found


@pytest.fixture
def retracted(monkeypatch: pytest.MonkeyPatch) -> tuple[World, Any]:
    """A request for whose copy there is no room."""
    world, req = crowded(monkeypatch)
    req.bootstrap_room = ROOM
    assert world.retract(req) in (None, True)
    assert world.copy_of(req) is None
    return world, req


def test_each_recompute_has_a_room_and_an_id_of_its_own(retracted: tuple[World, Any]) -> None:
    world, req = retracted
    prefill_of(world, req)
    rid = req.rid
    rooms, rids = {ROOM}, {rid}
    for number in range(1, 4):
        world.requeue(req)
        assert world.rebootstrapped == [req], "on its way, in the room"
        assert world.queue.queue[-1].kv_receiver.init.calls, "and its rank is known without asking"
        payload = req.build_rebootstrap_payload()
        assert payload["bootstrap_room"] == req.bootstrap_room and req.rid == rid
        assert payload["rid"].startswith(rid), "an abort of the request finds it"
        rooms.add(payload["bootstrap_room"])
        rids.add(payload["rid"])
        assert len(rooms) == len(rids) == number + 1
        world.queue.queue.clear()
        req.pd_rebootstrap_in_progress = False


@pytest.mark.parametrize("ranks", [2, 3, 8, 24, 48, 64, 96, 256])
def test_the_rank_that_rooms_are_dealt_to_stays(retracted: tuple[World, Any], ranks: int) -> None:
    world, req = retracted
    prefill_of(world, req, dp_size=ranks)
    world.requeue(req)
    assert req.bootstrap_room != ROOM and req.bootstrap_room % ranks == ROOM % ranks
    assert world.queue.queue[-1].kv_receiver.init.calls == [((ROOM % ranks,), {})]


@pytest.mark.parametrize("known", [True, False])
def test_a_room_that_must_be_asked_for_stays(retracted: tuple[World, Any], known: bool) -> None:
    world, req = retracted
    if known:
        prefill_of(world, req, dp_size=4, follow_bootstrap_room=False)
    world.requeue(req)
    assert req.bootstrap_room == ROOM
    assert [entry.req for entry in world.queue.pending_reqs] == [req]
    assert req.build_rebootstrap_payload()["rid"] == f"{req.rid}-1"


def test_the_highest_rooms_stay_in_range() -> None:
    queue = SimpleNamespace(_resolve_prefill_dp_rank=lambda req: 0)
    for room in (0, 1, recompute.ROOMS - 1, recompute.ROOMS - 2 * recompute.ROOMS_APART):
        req = SimpleNamespace(bootstrap_room=room)
        seen = {room}
        for _ in range(50):
            recompute.send_back(queue, req)
            assert 0 <= req.bootstrap_room < 2**63 and req.bootstrap_room not in seen
            seen.add(req.bootstrap_room)
    req = SimpleNamespace(bootstrap_room=None)
    recompute.send_back(queue, req)
    assert req.bootstrap_room is None


def test_a_recompute_of_the_operator_keeps_both(retracted: tuple[World, Any]) -> None:
    world, req = retracted
    prefill_of(world, req)
    world.queue.hold_rebootstrap(req)
    world.queue.enqueue_held_rebootstrap()
    assert req.bootstrap_room == ROOM and req.build_rebootstrap_payload()["rid"] == req.rid


def prefill_server() -> Any:
    """Where a prefill server keeps the state of its rooms."""
    return SimpleNamespace(
        request_status={}, deferred_bootstrap=None, _deferred_ack_targets={}, _deferred_ack_poisoned_rooms=set(),
        _staging_outstanding={}, failure_records={}, failure_lock=threading.Lock(),
    )  # fmt: skip


@pytest.mark.parametrize("fresh", [False, True])
def test_the_engine_loses_a_handshake_in_a_room_that_is_still_open(fresh: bool) -> None:
    """The order of a retract right after the admission, by the engine's own bookkeeping."""
    server = prefill_server()

    def status(room: int, value: Any) -> None:
        CommonKVManager.update_status(server, room, value)

    status(ROOM, KVPoll.Bootstrapping)
    status(ROOM, KVPoll.WaitingForInput)
    status(ROOM, KVPoll.Success)  # the transfer is done; the scheduler has not seen it yet
    second = ROOM + recompute.ROOMS_APART * fresh
    status(second, KVPoll.WaitingForInput)  # the decode server has retracted it, and shakes hands again
    server.request_status.pop(ROOM)  # now the scheduler has seen it, and closes the room
    status(second, KVPoll.Bootstrapping)  # the recompute arrives
    ready = server.request_status[second] == KVPoll.WaitingForInput
    assert ready is fresh, "the engine no longer loses it: are fresh rooms still needed?" if ready else ""


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
@pytest.mark.parametrize("hooked", [True, False])
def test_no_token_is_streamed_twice(retracted: tuple[World, Any], hooked: bool, interval: int) -> None:
    world, req = retracted
    prefill_of(world, req)
    req.stream = True
    sent = streamer(default_stream_interval=interval)
    for _ in range(8):  # so that some interval ends here
        sent.accept(req=req)
        req.output_ids.append(500 + len(req.output_ids))
    sent.accept(req=req)
    world.requeue(req)
    sent.accept(req=req)  # the step in flight
    req.output_ids.append(req.pd_rebootstrap_forced_output_id)  # the engine's commit
    req.pd_rebootstrap_forced_output_id = None
    if hooked:
        recompute.keep_as_sent(None, None, SimpleNamespace(req=req, is_rebootstrap=True))
    for _ in range(2 * interval):
        sent.accept(req=req)
        req.output_ids.append(900 + len(req.output_ids))
    sent.accept(req=req)
    streamed = [token for tokens in sent.output_ids for token in tokens]
    text = [token for tokens in sent.decode_ids_list for token in tokens][-len(streamed) :]
    wanted = list(req.output_ids)[: len(streamed)]
    if interval == 1 and not hooked:
        assert streamed != wanted, "the engine no longer repeats it: is the hook still needed?"
    elif hooked:
        assert streamed == wanted and text == wanted and len(streamed) > len(req.output_ids) - interval


def test_a_transfer_of_another_kind_is_left_alone() -> None:
    req = SimpleNamespace(send_token_offset=3)
    recompute.keep_as_sent(None, None, SimpleNamespace(req=req, is_rebootstrap=True))
    req.dsv4_sent_back = recompute.SentBack(1, 1, (9, None, None))
    recompute.keep_as_sent(None, None, SimpleNamespace(req=req, is_rebootstrap=False))
    assert req.send_token_offset == 3
