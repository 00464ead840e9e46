"""Plain HiSparse servers: the scheduler's own loop, with every c4 row looked for where the next step would read it."""

import random
from typing import Any

import pytest
import torch
from hisparse_world import HOT, ROWS, HiSparsePlainWorld
from plain_world import nothing_is_held, run_until

from sglang_dsv4.engine.plain.serving import plain_of
from sglang_dsv4.errors import VerifyMismatch
from sglang_dsv4.testing.choices import EXPERTS, chosen

HOT_PAGES = (HOT + ROWS) // ROWS  # on the device, of a request that decodes


def decoding(world: HiSparsePlainWorld, *reqs: Any) -> None:
    run_until(world, lambda: all(req in world.scheduler.running_batch.reqs for req in reqs))


def over(world: HiSparsePlainWorld, *aborted: Any) -> None:
    """The others have finished, with the tokens that the model says, and nothing is left on the host or the device."""
    world.run()
    for req in world.requests:
        if req not in aborted:
            wanted = world.tokens(req, len(req.origin_input_ids) + len(req.output_ids))
            assert [*req.origin_input_ids, *req.output_ids] == wanted and req.finished()
    world.nothing_held()
    if plain_of(world.allocator) is not None:
        nothing_is_held(world)
        assert world.pool.kept_rows.held == 0


def two(prompt: int, max_new: int, **way: Any) -> tuple[HiSparsePlainWorld, list[Any]]:
    world = HiSparsePlainWorld(**way)
    reqs = [world.submit(range(1000 * i, 1000 * i + prompt), max_new=max_new) for i in range(2)]
    decoding(world, *reqs)
    return world, reqs


def counted(world: HiSparsePlainWorld) -> tuple[int, int, dict[str, int]]:
    """Saves, loads and fallbacks."""
    counters = world.pool.host.counters
    return counters.saves, counters.loads, dict(counters.fallbacks)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prompt", [5, 250, 1021])
def test_a_retracted_request_decodes_on_with_its_rows(prompt: int, overlap: bool) -> None:
    """At each place in a block of four; the newest row is on the host, or on the device alone, or not yet made."""
    world = HiSparsePlainWorld(overlap=overlap)
    reqs = [world.submit(range(1000 * i, 1000 * i + prompt + i), max_new=24) for i in range(2)]
    decoding(world, *reqs)
    for steps in (0, 1, 2, 3, 5):
        for _ in range(steps):
            world.step()
            world.check_integrity()
        req = world.scheduler.running_batch.reqs[0]
        world.retract(req)
        assert world.pool.kept_rows.held == -(-((req.seqlen - 1) // 4) // ROWS)
        batch = world.step()
        world.check_integrity()
        assert batch.forward_mode.is_decode() and req in batch.reqs
    assert counted(world) == (5, 5, {})
    over(world)


@pytest.mark.parametrize("overlap", [False, True])
def test_its_choices_come_back_too(overlap: bool) -> None:
    world = HiSparsePlainWorld(overlap=overlap, server_args={"enable_return_routed_experts": True})
    reqs = [
        world.submit(range(1000 * i, 1000 * i + 250), max_new=24, return_routed_experts=True) for i in range(2)
    ]  # fmt: skip
    decoding(world, *reqs)
    for _ in range(3):
        world.step()
        world.retract(world.scheduler.running_batch.reqs[0])
        for buffer in world.choices.buffers:
            held = torch.cat([world.slots(req, req.seqlen - 1) for req in world.running])
            kept = buffer[held].clone()
            buffer.fill_(-7)
            buffer[held] = kept
    over(world)
    for req in reqs:
        tokens = world.tokens(req, len(req.origin_input_ids) + len(req.output_ids) - 1)
        assert torch.equal(req.routed_experts, chosen(tokens, EXPERTS))
    assert counted(world) == (3, 3, {})


def test_who_was_staged_joins_who_was_restored() -> None:
    """The decode batch that a restored request begins is like those that the engine builds of staged ones."""
    world = HiSparsePlainWorld()
    first = world.submit(range(600), max_new=40)
    decoding(world, first)
    world.retract(first)
    world.step()
    assert world.scheduler.running_batch.reqs == [first]
    second = world.submit(range(1000, 1300), max_new=20)
    decoding(world, first, second)
    world.retract(first)
    world.step()
    over(world)
    assert counted(world) == (2, 2, {})


@pytest.mark.parametrize("overlap", [False, True])
def test_a_restored_request_is_in_no_prefill(overlap: bool) -> None:
    """It would look for its rows on the device: passes admit restored requests, or others."""
    world, (first, _) = two(700, 40, overlap=overlap, chunk=512, pages=32)
    before = world.submit(range(5000, 6300), max_new=8)  # three chunks
    world.step()
    world.retract(first)
    after = world.submit(range(7000, 7100), max_new=8)
    prefilled = []
    while not (before.finished() and after.finished()):
        batch = world.step()
        world.check_integrity()
        if batch is not None and batch.forward_mode.is_extend():
            prefilled.append([req.rid for req in batch.reqs])
    assert {rid for rids in prefilled for rid in rids} == {before.rid, after.rid}
    assert counted(world) == (1, 1, {})
    over(world)


def test_who_cannot_be_restored_is_in_no_pass_with_who_can() -> None:
    world = HiSparsePlainWorld()
    first, second, third = (world.submit(range(1000 * i, 1000 * i + 300), max_new=30) for i in range(3))
    decoding(world, first, second, third)
    for req in (first, second):
        world.retract(req)
    plain_of(world.allocator).saved_of(second).copy.tokens += 1
    assert {req.rid for req in world.step().reqs} == {first.rid, third.rid}
    assert world.step().reqs == [second]
    over(world)
    assert counted(world) == (2, 1, {"LengthChanged": 1})


def test_a_restored_request_waits_for_hot_rows() -> None:
    """Its own, and those that a request gets when it was staged: the engine asserts that they are there."""
    world = HiSparsePlainWorld(overlap=True, hot_pages=HOT_PAGES + 1)
    first = world.submit(range(200), max_new=40)
    decoding(world, first)
    world.step()
    assert world.table.size - world.table.available_size() == world.pool.kept_rows.with_hot_rows == 1
    second = world.submit(range(4000, 4020), max_new=30)  # takes a page for its prompt, and later the rest
    world.retract(first)
    assert world.step().reqs == [second]
    over(world)
    assert counted(world) == (1, 1, {})


def test_two_restored_requests_need_hot_rows_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was admitted in the same pass gets his only when the pass is launched."""
    monkeypatch.setattr("hisparse_world.HOT", 4 * HOT)  # more than the engine counts for so short a request
    each = 4 * HOT + ROWS
    world, reqs = two(200, 40, hot_pages=14)
    for req in reqs:
        world.retract(req)
    hot = world.allocator.hisparse_attn_allocator
    taken = hot.alloc(hot.available_size() - 2 * each + ROWS)
    assert world.step().reqs == reqs[:1]
    hot.free(taken)
    over(world)
    assert counted(world) == (2, 2, {})


def test_rows_that_changed_while_away_are_found_on_a_plain_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_VERIFY", "1")
    world = HiSparsePlainWorld()
    req = world.submit(range(600), max_new=20)
    decoding(world, req)
    world.retract(req)
    kept = plain_of(world.allocator).saved_of(req).copy.lease.detached
    world.coordinator.mem_pool_host.kv_buffer[0][int(kept.pages[1]), 77] ^= 1
    with pytest.raises(VerifyMismatch, match="c4 rows of 601 tokens"):
        world.step()


@pytest.mark.parametrize("why", ["off", "mixed"])
def test_a_server_that_keeps_nothing_prefills_again(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No host memory is reserved, and nobody is lost. Where nobody asked for that, one line says so at the start."""
    if why == "off":
        monkeypatch.setenv("DSV4_PLAIN", "off")
    world = HiSparsePlainWorld(mixed=why == "mixed")
    assert world.pool.kept_rows is None and world.pool.host is None
    assert world.coordinator.mem_pool_host.num_host_pages == world.spec.pages
    said = [record.message for record in caplog.records if "prefills retracted requests again" in record.message]
    if why == "mixed":  # the engine itself ends when its prefill takes a staged request with it
        assert len(said) == 1 and "HiSparse" in said[0]
        return
    reqs = [world.submit(range(1000 * i, 1000 * i + 600), max_new=20) for i in range(2)]
    decoding(world, *reqs)
    world.retract(reqs[0])
    over(world)


def test_a_server_that_the_engine_keeps_for_another_reason_takes_no_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pages would be pinned, and too large a DSV4_HOST_GB would stop it, for nothing."""
    monkeypatch.setattr("sglang_dsv4.engine.hisparse.reserve.refusal", lambda *_: "a host tier")
    monkeypatch.setattr("sglang_dsv4.engine.plain.start.reasons", lambda *_: iter(["a host tier"]))
    world = HiSparsePlainWorld()
    assert world.coordinator.mem_pool_host.num_host_pages == world.spec.pages


@pytest.mark.parametrize("seed", range(2))
def test_random_lives_of_a_plain_hisparse_server(seed: int) -> None:
    """Prompts of all lengths come in chunks while others are away."""
    rng = random.Random(seed)
    world = HiSparsePlainWorld(overlap=bool(seed % 2), chunk=512, hot_pages=rng.randint(11, 24))
    todo = [(rng.randint(1, 900), rng.randint(2, 60)) for _ in range(9)]
    retracts = 0
    for number in range(900):
        if todo and number % 5 == 0:
            prompt, new = todo.pop()
            world.submit(range(1000 * len(todo), 1000 * len(todo) + prompt), max_new=new)
        batch = world.step()
        running = [req for req in world.scheduler.running_batch.reqs if not req.finished()]
        if number % 4 == 0:
            world.check_integrity()
        if number % 4 == 0 and len(running) > 1:
            world.retract(rng.choice(running))
            retracts += 1
        if batch is None and not todo and not world.running and not world.waiting:
            break
    saves, loads, fallbacks = counted(world)
    assert retracts > 5 and saves == loads and not fallbacks
    over(world)


def hot_pages_have_one_owner(world: HiSparsePlainWorld) -> None:
    """No page of hot rows is of two requests, or free and somebody's, or free twice."""
    owner = world.coordinator
    sizes = owner.req_device_buffer_size.tolist()
    pages = [set((owner.req_to_device_buffer[row, :size] // ROWS).tolist()) for row, size in enumerate(sizes) if size]
    held = [
        page for each in pages for page in each
    ] + world.allocator.hisparse_attn_allocator.get_all_free_pages().tolist()
    assert len(held) == len(set(held)), "a page has two owners"


@pytest.mark.parametrize("seed", (0, 11))
def test_hot_rows_are_nobody_elses_where_prompts_end_with_their_prefill(seed: int) -> None:
    """The engine forgets some of such a request's pages, and leaves their places behind with its slots."""
    rng = random.Random(seed)
    world = HiSparsePlainWorld(chunk=512, pages=32, hot_pages=32)
    for number in range(120):
        if len(world.waiting) + len(world.running) < 3:
            ends = world.allocator.hisparse_attn_allocator.available_size() > 20 * ROWS and rng.random() < 0.4
            prompt = range(1000 * number, 1000 * number + rng.randint(200, 1000))
            world.submit(prompt, max_new=1 if ends else rng.randint(2, 40))
        world.step()
        running = [req for req in world.scheduler.running_batch.reqs if not req.finished()]
        if number % 4 == 0 and running:
            world.check_integrity()
            world.retract(rng.choice(running))
        hot_pages_have_one_owner(world)
    world.check_integrity()
    assert counted(world)[1] > 5


def test_a_flush_brings_back_the_hot_rows_that_prompts_lost() -> None:
    """The engine loses those of a request that ends with its prefill; a server that is idle need not be restarted."""
    world = HiSparsePlainWorld(chunk=512, pages=32, hot_pages=30)
    hot = world.allocator.hisparse_attn_allocator
    world.submit(range(1500), max_new=1)
    world.run()
    assert hot.available_size() < hot.size
    assert world.flush() and hot.available_size() == hot.size
    reqs = [world.submit(range(1000 * i, 1000 * i + 700), max_new=20) for i in range(2)]
    decoding(world, *reqs)
    world.retract(reqs[0])
    world.run()
    assert counted(world) == (1, 1, {})
    world.nothing_held()
