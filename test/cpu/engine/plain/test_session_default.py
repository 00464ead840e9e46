"""A plain server keeps sessions without being asked: said once, in memory that retracts do not need."""

from __future__ import annotations

from typing import Any

import pytest
from plain_world import forget, nothing_is_held, over, run_until, serving, small_world, world_with_sessions
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_dsv4.engine.plain import sessions, start

ON = "sessions: the cache of requests that end stays on the host"
REFUSED: dict[str, dict[str, Any]] = {
    "no prefix cache": {"radix": False},
    "choices are returned": {"server_args": {"enable_return_routed_experts": True}},
    "beside a hierarchical cache": {"server_args": {"enable_hierarchical_cache": True}},
}


def about_sessions(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("sessions: ")]


def test_a_plain_server_says_once_that_it_keeps_sessions_and_how_to_end_that(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert serving(small_world()).sessions is not None
    (line,) = about_sessions(caplog)
    assert line.startswith(ON) and "DSV4_SESSIONS=off" in line


def test_one_that_was_asked_need_not_be_told_how(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DSV4_SESSIONS", "auto")
    caplog.set_level("INFO")
    small_world()
    (line,) = about_sessions(caplog)
    assert line.startswith(ON) and "DSV4_SESSIONS" not in line


@pytest.mark.parametrize("refused", [*REFUSED, None])
def test_off_and_what_is_not_covered_are_silent(
    refused: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody asked; with ``auto`` each of these is a warning."""
    if refused is None:
        monkeypatch.setenv("DSV4_SESSIONS", "off")
    caplog.set_level("INFO")
    assert serving(small_world(**REFUSED.get(refused or "", {}))).sessions is None
    assert about_sessions(caplog) == []


@pytest.mark.parametrize("mode", [DisaggregationMode.PREFILL, DisaggregationMode.DECODE])
def test_other_servers_pin_nothing_for_sessions_and_say_nothing(
    mode: DisaggregationMode, caplog: pytest.LogCaptureFixture
) -> None:
    world, _ = world_with_sessions()
    caplog.set_level("INFO")
    vars(world.scheduler).update(disaggregation_mode=mode)
    start.start_plain_serving(None, world.scheduler)
    assert not hasattr(world.pool, start.NAME) and about_sessions(caplog) == []


def copies_of_retracts(monkeypatch: pytest.MonkeyPatch, sessions: str, lengths: list[int]) -> list[bool]:
    """Returns which of the requests of ``lengths``, retracted at once, wait with a copy; others had ended before."""
    monkeypatch.setenv("DSV4_SESSIONS", sessions)
    monkeypatch.setenv("DSV4_HOST_GB", "0.004")
    world = small_world(pages=120, swa_pages=60, context=12000, requests=10)
    for number in range(8):
        world.submit(range(5000 * number, 5000 * number + 1300), max_new=3)
    world.run()
    plain = serving(world)
    assert (plain.sessions is None) or plain.sessions.points
    begins = [100_000 + 5000 * at for at in range(len(lengths))]
    reqs = [world.submit(range(begin, begin + n), max_new=8) for begin, n in zip(begins, lengths, strict=True)]
    run_until(world, lambda: all(len(req.output_ids) >= 5 for req in reqs))
    for req in reqs:
        world.retract(req)
    forget(world)
    found = [plain.saved_of(req) is not None for req in reqs]
    plain.host.memory.check_integrity()
    over(world)
    return found


@pytest.mark.parametrize("lengths", [[600] * 8, [2500, 300, 1290, 2047, 64, 900, 1800, 1024]])
def test_a_server_sized_for_retracts_makes_as_many_copies(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    without = copies_of_retracts(monkeypatch, "off", lengths)
    assert copies_of_retracts(monkeypatch, "plain", lengths) == without
    assert any(without) and not all(without), "there must be too little memory for all"


@pytest.mark.parametrize(("lost", "host"), [("all", 1280), ("nothing", 0)])
def test_tokens_that_came_from_the_host_are_told_where_those_of_hicache_are(lost: str, host: int) -> None:
    """With the whole prefix on the device nothing came from the host."""
    world, store = world_with_sessions(chunk=512)
    first = world.submit(range(1300), max_new=20)
    world.run()
    if lost == "all":
        forget(world)
    second = world.second_turn(first, range(60_000, 61_000), max_new=5)
    other = world.submit([*range(1300)], max_new=5)
    world.run()
    assert second.cached_tokens == second.cached_tokens_device + second.cached_tokens_host >= 1280
    assert (second.cached_tokens_host, sum(store.counters.hits.values())) == (host, bool(host))
    assert other.cached_tokens_host == 0, "the device had it then"
    store.clear("flush")
    nothing_is_held(world)


def test_a_retracted_request_that_goes_on_from_a_session_keeps_its_first_count() -> None:
    """The engine counts a request's cached tokens once."""
    world, store = world_with_sessions()
    first = world.submit(range(1300), max_new=20)
    world.run()
    second = world.second_turn(first, range(60_000, 60_300), max_new=40)
    run_until(world, lambda: len(second.output_ids) >= 3)
    told = second.cached_tokens_device, second.cached_tokens_host
    world.retract(second)
    saved = serving(world).saved_of(second)
    assert saved is not None
    serving(world).drop(saved)
    forget(world)
    world.run()
    assert store.counters.hits and (second.cached_tokens_device, second.cached_tokens_host) == told


def test_tokens_of_a_load_that_is_made_again_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running request holds 1,024 of them; the tree loses the other 512 before the request is admitted."""
    world, store = world_with_sessions(swa_pages=40)
    world.submit(range(1600), max_new=3)
    world.run()
    forget(world)
    holder = world.submit(range(1100), max_new=400)
    run_until(world, lambda: bool(holder.output_ids))
    before = sum(store.counters.hits.values())
    second = world.submit([*range(1600), *range(40_000, 40_100)], max_new=3, hints={"kv.prefetch": {}})
    with monkeypatch.context() as patch:
        nobody = lambda *_, **kwargs: (None, kwargs.get("running_batch", world.scheduler.running_batch))  # noqa: E731
        patch.setattr(world.scheduler, "_get_new_batch_prefill_raw", nobody, raising=False)
        run_until(world, lambda: sum(store.counters.hits.values()) == before + 1)
    world.evict(1 << 20, 1 << 20)
    run_until(world, lambda: bool(second.output_ids))
    assert (sum(store.counters.hits.values()), second.cached_tokens) == (before + 2, 1536)
    assert (second.cached_tokens_device, second.cached_tokens_host) == (1024, 512)


@pytest.mark.parametrize("hints", [{}, {"kv.retain": {}}])
def test_of_a_crowd_that_ends_in_one_pass_some_leave_their_prompts_alone(
    hints: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save takes 0.3 ms of the scheduler, and 256 would hold a pass up for 75; who asks to be kept is."""
    monkeypatch.setattr(sessions, "MOST_SAVES", 2)
    world, store = world_with_sessions(pages=80, swa_pages=40)
    crowd = [world.submit(range(2000 * number, 2000 * number + 1270), max_new=20, hints=hints) for number in range(5)]
    world.run()
    ends = sorted(point.tokens for point in store.order)
    assert all(req.finished() for req in crowd) and store.counters.crowded == (0 if hints else 3)
    assert ends == [1024] * 5 + [1280] * (5 if hints else 2)
    second = world.second_turn(crowd[-1], range(50), max_new=3)
    forget(world)
    world.run()
    assert second.cached_tokens_host == (1280 if hints else 1024)
