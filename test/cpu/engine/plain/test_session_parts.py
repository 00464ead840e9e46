"""Pages that are kept of a prompt before its end: never unwritten ones, and never at the cost of others for nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from plain_world import world_with_sessions
from sglang.srt.disaggregation import prefill

from sglang_dsv4.sessions.hints import Rank

# Bytes that the sessions may hold: of four points of five pages each, whose windows take six units, see test_store.
ROOM = 4 * (5 + 6) * 49_152


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_SESSIONS", "auto")


@pytest.mark.parametrize("verify", ["0", "1"])
def test_a_chunk_that_is_told_twice_is_not_saved_while_its_forward_runs(
    monkeypatch: pytest.MonkeyPatch, verify: str
) -> None:
    """A prefill server that computes ahead of the transfer's bootstrap asks once more when that has arrived."""
    monkeypatch.setenv("DSV4_VERIFY", verify)
    world, store = world_with_sessions(overlap=True, chunk=512, pages=80)
    server = world.scheduler
    monkeypatch.setattr(prefill, "poll_and_all_reduce_attn_cp_tp_group", lambda *_: [prefill.KVPoll.WaitingForInput])

    def finalize(req: Any) -> bool:
        req.pending_bootstrap = False
        return True

    server.attn_cp_cpu_group = server.attn_tp_cpu_group = None
    server.disagg_prefill_bootstrap_queue = SimpleNamespace(finalize_bootstrap=finalize, queue=[])
    server.stash_chunked_request = lambda req: server.process_prefill_chunk(
        last_batch=None, running_batch=server.running_batch
    )
    req = world.submit(range(6000), max_new=4)
    req.pending_bootstrap = True
    for _ in range(6):  # the world raises where a save reads what a forward in flight writes
        world.step()
    assert store.kept.held_bytes and not req.pending_bootstrap


def world_of(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Any, Any]:
    """Returns a server whose sessions have that little room, and four of them."""
    monkeypatch.setenv("DSV4_SESSIONS", repr(ROOM / 2**30))
    world, store = world_with_sessions(**changes)
    for number in range(4):
        world.submit(range(3000 * number, 3000 * number + 1300), max_new=3)
        world.run()
    assert store.points == 4
    return world, store


@pytest.mark.parametrize("chunk", [512, 16384])
@pytest.mark.parametrize("hints", [None, {"kv.demote": {}}], ids=["plain", "demoted"])
def test_a_prompt_that_finds_no_room_takes_none_of_others(
    monkeypatch: pytest.MonkeyPatch, chunk: int, hints: Any
) -> None:
    """Its pages, chunk by chunk, found the room that the whole of it does not."""
    world, store = world_of(monkeypatch, chunk=chunk, pages=80)
    world.submit(range(20_000, 31_000), max_new=3, hints=hints)
    world.run()
    assert [(point.tokens, point.tail is not None) for point in store.order] == [(1280, True)] * 4
    assert not store.counters.evicted


def test_a_demoted_prompt_takes_no_room_of_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do its parts; they are as far behind as its end is."""
    world, store = world_of(monkeypatch, chunk=512, pages=80)
    for hints in ({"kv.demote": {}}, None):
        world.submit(range(20_000, 22_400), max_new=3, hints=hints)
        for _ in range(4):
            world.step()
        plain = sum(point.tail is not None and point.order[0] == Rank.PLAIN for point in store.order)
        assert plain == 4 if hints else plain < 4
        world.run()


def test_no_page_stays_of_a_prompt_that_was_aborted_in_its_midst() -> None:
    world, store = world_with_sessions(chunk=512, pages=80)
    req = world.submit(range(6000), max_new=4)
    while not store.kept.held_bytes:
        world.step()
    world.abort(req)
    world.run()
    assert store.kept.held_bytes == 0 and not list(store.order)
    store.check_integrity()
