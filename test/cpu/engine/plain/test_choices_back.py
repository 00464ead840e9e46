"""Choices of experts and index rows, which the engine's own capturers record by cache slot, come back with a request.

The stand-in's choices at a position follow from the tokens up to it, so a lost, shifted or foreign row is seen.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from plain_world import (
    came_back,
    finish,
    forget,
    live,
    nothing_is_held,
    over,
    run_to,
    run_until,
    serving,
    small_world,
    world_with_sessions,
)
from sglang.srt.state_capturer.base import TopkCaptureOutput

from sglang_dsv4.engine.plain import room
from sglang_dsv4.engine.retract import choices
from sglang_dsv4.testing.choices import EXPERTS, INDEX, chosen
from sglang_dsv4.testing.integrity import Pages

EXPERTS_ARE, INDEX_IS = {"enable_return_routed_experts": True}, {"enable_return_indexer_topk": True}
BOTH = EXPERTS_ARE | INDEX_IS
LENGTHS = (256, 257, 258, 259, 260, 383, 384, 385, 386, 510, 511, 512, 513)
NOTHING = -7  # no choice is negative
PACKAGE, TESTING = "/sglang_dsv4/", "/sglang_dsv4/testing/"


def asking(world: Any) -> Any:
    """Returns ``world``, whose requests all ask for their choices."""
    world.submit = partial(world.submit, return_routed_experts=True, return_indexer_topk=True)
    return world


def spoil(world: Any) -> None:
    """Overwrites every row: others had the slots meanwhile."""
    for buffer in world.choices.buffers:
        buffer.fill_(NOTHING)


def assert_own(world: Any, *reqs: Any) -> None:
    """Asserts that the engine returns the choices of the request's own tokens, of each position."""
    for req in reqs:
        tokens = world.tokens(req, len(req.origin_input_ids) + len(req.output_ids_through_stop) - 1)
        ways = (("routed_experts", EXPERTS_ARE, EXPERTS), ("indexer_topk", INDEX_IS, INDEX))
        for name, way, shape in ways:
            if way.items() <= world.spec.server_args.items():
                wrong = (getattr(req, name) != chosen(tokens, shape)).flatten(1).any(1).nonzero().flatten().tolist()
                assert not wrong, f"{req.rid}, {len(tokens)} tokens: {name} of positions {wrong[:5]}"


def test_all_choices_come_back() -> None:
    """At lengths around each end of a page, of a block and of a window."""
    world = asking(small_world(server_args=BOTH))
    for tokens in LENGTHS:
        req = world.submit(range(tokens * 1000, tokens * 1000 + tokens - 2), max_new=5)
        run_to(world, req, tokens)
        world.retract(req)
        forget(world)
        spoil(world)
        came_back(world, req)
        world.run()
        assert_own(world, req)
    assert serving(world).host.counters.loads == len(LENGTHS) and not serving(world).host.counters.fallbacks
    nothing_is_held(world)


SERVERS: dict[str, dict[str, Any]] = {
    "experts": {"server_args": EXPERTS_ARE},
    "index": {"server_args": INDEX_IS, "overlap": True},
    "overlap": {"overlap": True},
    "chunks": {"chunk": 256},
    "mixed chunks, overlap": {"chunk": 512, "mixed": True, "overlap": True},
    "no prefix cache": {"radix": False},
    "drafts": {"drafts": 4},
    "drafts, overlap, mixed": {"drafts": 4, "overlap": True, "mixed": True},
    "little room": {"pages": 9, "swa_pages": 7, "overlap": True},
}


@pytest.mark.parametrize("server", SERVERS)
def test_requests_of_a_random_life_return_their_own_choices(server: str) -> None:
    """Among them second turns and forks, which go on from what others left in the prefix cache."""
    world = asking(small_world(**({"server_args": BOTH} | SERVERS[server])))
    live(world, seed=0)
    assert serving(world).host.counters.loads
    forks = [world.second_turn(world.requests[0], [1, 2, number], max_new=3) for number in range(3)]
    world.run()
    assert len({req.rid for req in world.requests if req.finished()}) == len(world.requests) > len(forks)
    assert_own(world, *world.requests)
    nothing_is_held(world)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sessions", ["off", "auto"])
def test_a_step_without_a_retract_runs_no_line_of_this_package_more(
    overlap: bool, sessions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own recording is all that choices cost it."""
    monkeypatch.setenv("DSV4_SESSIONS", sessions)

    def of_steps(world: Any) -> Counter[str]:
        called = Counter[str]()
        for number in range(3):
            world.submit(range(number * 1000, number * 1000 + 300), max_new=40)
        run_until(world, lambda: all(len(req.output_ids) > 2 for req in world.requests))

        def count(frame: FrameType, event: str, _: Any) -> None:
            at = frame.f_code
            if event == "call" and PACKAGE in at.co_filename and TESTING not in at.co_filename:
                called[f"{at.co_filename}:{at.co_name}"] += 1

        sys.setprofile(count)
        try:
            for _ in range(20):
                world.step()
        finally:
            sys.setprofile(None)
        assert not any(req.finished() for req in world.requests)
        return called

    without = of_steps(small_world(overlap=overlap))
    assert without and of_steps(asking(small_world(server_args=BOTH, overlap=overlap))) == without


@pytest.mark.parametrize(
    ("way", "retracts", "asked"), [(EXPERTS_ARE, 1, False), (INDEX_IS, 1, False), (BOTH, 2, False), (BOTH, 2, True)]
)
def test_who_goes_on_from_a_restored_answer_returns_its_own(way: dict[str, Any], retracts: int, asked: bool) -> None:
    """The restored request need not have asked: its slots are in the prefix cache, where any request finds them."""
    world = small_world(server_args=way)
    first = world.submit(range(573), max_new=200, return_routed_experts=asked, return_indexer_topk=asked)
    for tokens in (578, 600)[:retracts]:
        run_to(world, first, tokens)
        world.retract(first)
        forget(world)
        spoil(world)
        came_back(world, first)
    finish(world)
    found = len(world.match([*first.origin_input_ids, *first.output_ids, 1]))
    assert serving(world).host.counters.loads == retracts and found == 768
    second = asking(world).second_turn(first, [1, 2, 3], max_new=4)
    world.run()
    assert_own(world, second)


def test_rows_of_the_prefix_cache_are_not_written() -> None:
    """Their pages are not loaded either: the copy's own rows of them are spoilt, and nobody sees those."""
    world = asking(small_world(server_args=BOTH))
    req = world.submit(range(1270), max_new=30)
    run_to(world, req, 1290)
    world.retract(req)
    host = serving(world).host
    for unit in serving(world).saved_of(req).copy.pages(0, 1024 // 256):
        host.memory.host_rows[unit].fill_(0xEE)
    came_back(world, req)
    assert req.kv.cache_protected_len == 1024
    world.run()
    assert_own(world, req)


def test_the_last_step_of_who_has_ended_does_not_overwrite_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap it is in flight when its pages are given away: its row is taken after theirs are there."""
    late, leave_out = [], choices.leave_out

    def watched(scheduler: Any, page: int, slots: torch.Tensor) -> None:
        steps = [result.routed_experts_output.out_cache_loc for _, result in scheduler.result_queue]
        late.extend(int(torch.isin(step // page, slots // page).sum()) for step in steps)
        leave_out(scheduler, page, slots)

    world = asking(small_world(server_args=BOTH, overlap=True, radix=False))
    req, ends = world.submit(range(595), max_new=60), world.submit(range(5000, 5290), max_new=90)
    ends.sampling_params.stop_token_ids = {world.tokens(ends, 330)[-1]}  # which nobody foresees
    run_to(world, req, 600)
    pages, last = world.allocator.full_attn_allocator, int(world.slots(ends, 290)[-1]) // 256

    def fits(*_: Any, **__: Any) -> bool:
        """Keeps the request away until the other has ended, whose page comes first then."""
        free = pages.free_pages
        pages.free_pages = torch.cat([free[free == last], free[free != last]])
        return bool(ends.finished())

    monkeypatch.setattr(choices, "leave_out", watched)
    monkeypatch.setattr(room, "fits", fits)
    world.retract(req)
    world.run()
    assert late == [1], "a step in flight at the load had a row in its pages"
    assert_own(world, req, ends)


def test_a_step_in_flight_records_nothing_at_pages_that_were_loaded() -> None:
    host_cache = SimpleNamespace(buffer=torch.full((8 * 256, 3, 2), NOTHING))
    slots = torch.tensor([3 * 256 + 5, 4 * 256, 5 * 256 + 255, 6 * 256])
    output = TopkCaptureOutput(slots, torch.arange(24).view(4, 3, 2), host_cache)
    result = SimpleNamespace(routed_experts_output=output, indexer_topk_output=None)
    scheduler = SimpleNamespace(result_queue=[(None, result)])
    for loaded in ([3 * 256], [5 * 256, 7 * 256]):
        choices.leave_out(scheduler, 256, torch.tensor(loaded))
    result.routed_experts_output.finalize()
    written = (host_cache.buffer != NOTHING).flatten(1).any(1).nonzero().flatten().tolist()
    assert written == [4 * 256, 6 * 256] and result.indexer_topk_output is None
    assert host_cache.buffer[written].tolist() == torch.arange(24).view(4, 3, 2)[[1, 3]].tolist()


# ------------------------------------------------------------------------------------------------------ sessions


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DSV4_SESSIONS", "auto")
    yield


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("server", "asked"),
    [
        ({}, False), ({"overlap": True, "mixed": True, "chunk": 512}, False), ({"drafts": 4, "overlap": True}, False),
        ({}, True),
    ],
    ids=str,
)  # fmt: skip
def test_a_session_brings_its_choices(server: dict[str, Any], asked: bool) -> None:
    """Of a request that need not have asked; and a retract beside it holds its pages, and brings the rest."""
    world, store = world_with_sessions(server_args=BOTH, **server)
    first = world.submit(range(1500), max_new=40, return_routed_experts=asked, return_indexer_topk=asked)
    world.run()
    prompt = [*first.origin_input_ids, *first.output_ids]
    forget(world)
    spoil(world)
    asking(world)
    forks = [world.submit([*prompt, *range(30_000 + number, 30_380)], max_new=60) for number in range(2)]
    run_until(world, lambda: len(forks[0].output_ids) > 20)
    assert sum(store.counters.hits.values()) >= 1
    world.retract(forks[0])
    spoil_free(world)
    world.run()
    assert_own(world, *forks)
    assert serving(world).host.counters.loads == 1
    store.clear("flush")
    nothing_is_held(world)


def spoil_free(world: Any) -> None:
    """Overwrites the rows of all slots that neither a request nor the prefix cache has."""
    free = [page * 256 + offset for page in Pages(world).free.pages for offset in range(256)]
    for buffer in world.choices.buffers:
        buffer[free] = NOTHING


def test_sessions_are_kept_where_they_were_asked_for_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Not by default: rollouts have no second turn, and the scheduler would copy the choices of each that ends."""
    caplog.set_level("INFO")
    assert serving(small_world(server_args=BOTH)).sessions is None
    assert not [line for line in caplog.messages if line.startswith("sessions: ")], "nobody asked"


@pytest.mark.usefixtures("kept")
def test_a_store_does_not_go_with_them(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("DSV4_STORE", "file")
    world, _ = world_with_sessions(server_args=EXPERTS_ARE)
    assert serving(world).tier is None
    (line,) = [line for line in caplog.messages if line.startswith("store: ")]
    assert "expert or indexer choices are returned" in line
    over(world)
