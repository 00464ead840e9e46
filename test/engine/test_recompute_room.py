"""A recompute does not meet what its request left at the prefill server: a room and an id of its own."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from engine.retracting import crowded
from engine.world import World
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.decode import _bootstrap_addr

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
            recompute.take_fresh_room(queue, req)
            assert 0 <= req.bootstrap_room < 2**63 and req.bootstrap_room not in seen
            seen.add(req.bootstrap_room)
    req = SimpleNamespace(bootstrap_room=None)
    recompute.take_fresh_room(queue, req)
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
