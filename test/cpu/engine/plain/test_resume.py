"""A retracted request of a plain server comes back without a prefill, with every byte that it had."""

from __future__ import annotations

from typing import Any

import pytest
from plain_world import SMALL41, came_back, forget, nothing_is_held, over, retracted, run_to, serving, small_world
from pretended_device import Device

LENGTHS = (383, 384, 385, 511, 512, 513, 638, 639)  # around 4, 128 and 256


@pytest.mark.both_layouts
@pytest.mark.parametrize(
    ("tokens", "model"),
    [*((n, {}) for n in LENGTHS), *((n, SMALL41) for n in (300, 513, 638))],
    ids=lambda value: value if isinstance(value, int) else "v41" if value else "v4",
)
def test_it_joins_the_decode_batch(tokens: int, model: dict[str, Any]) -> None:
    world, req = retracted(tokens, 14, 6, **model, overlap=bool(tokens % 2))
    counters = serving(world).host.counters
    came_back(world, req)
    assert world.computed[req.rid] == tokens + 1
    assert (counters.saves, counters.loads, counters.spared_tokens) == (1, 1, tokens)
    assert not counters.fallbacks
    world.run()
    assert len(req.output_ids) == 14
    nothing_is_held(world)


@pytest.mark.both_layouts
@pytest.mark.parametrize("tokens", LENGTHS)
def test_beside_a_prefill_it_is_an_extend_of_one_token(tokens: int) -> None:
    world, req = retracted(tokens, 14, 6, overlap=bool(tokens % 2))
    other = world.submit(range(9000, 9300), max_new=4)
    batch = world.step()
    world.check_integrity()
    assert (batch.reqs, batch.prefix_lens, batch.extend_lens) == ([req, other], [tokens, 0], [1, 300])
    assert serving(world).host.counters.loads == 1
    world.run()
    assert len(req.output_ids) == 14
    nothing_is_held(world)


def test_a_prefill_that_takes_the_decode_batch_with_it_takes_a_restored_request_too() -> None:
    """--enable-mixed-chunk: the engine puts running requests behind the extends of a pass."""
    world = small_world(chunk=512, mixed=True)
    other = world.submit(range(9000, 9300), max_new=60)
    req = world.submit(range(500), max_new=30)
    run_to(world, req, 510)
    world.retract(req)
    forget(world)
    batch = world.step()
    assert ([one.rid for one in batch.reqs], batch.extend_lens) == ([req.rid, other.rid], [1, 1])
    over(world)


def with_watermarks(world: Any, window: int = 4) -> None:
    """The world's forwards keep each row's watermark context as the engine's ``_sample`` does, and compare it."""
    from sglang.srt.sampling.watermarking.core import WatermarkState

    state = WatermarkState(
        max_num_reqs=world.spec.requests + 1, context_window=window, max_contexts_per_req=64, key="ab", device="cpu"
    )
    forward = world._forward

    def marked(batch: Any) -> Any:
        rows, ends = batch.req_pool_indices, batch.seq_lens_cpu.tolist()
        state.init_from_prompt(rows, state.prompt_tails(batch), state.retracted_context_hashes(batch))
        for req, end, context in zip(batch.reqs, ends, state.contexts_tail(rows)[0].tolist(), strict=True):
            assert context == world.tokens(req, end)[-window:], f"{req.rid} is sampled behind another context"
        result = forward(batch)
        state.append(rows, result.next_token_ids)
        return result

    world._forward = marked


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_a_restored_request_is_sampled_behind_its_own_watermark_context(overlap: bool, beside: bool) -> None:
    """The engine gives a row its context in an extend; a row's last owner leaves one there."""
    world = small_world(overlap=overlap, server_args={"enable_watermark": True})
    with_watermarks(world)
    first, req = (world.submit(range(1000 * i, 1000 * i + 507), max_new=30) for i in (1, 2))
    run_to(world, req, 513)
    world.retract(first)
    world.retract(req)
    forget(world)
    if beside:
        world.submit(range(9000, 9300), max_new=4)
    assert world.step().extend_lens[:2] == [1, 1]
    world.run()
    assert serving(world).host.counters.loads == 2
    assert [len(one.output_ids) for one in (first, req)] == [30, 30]
    nothing_is_held(world)


def test_the_last_token_goes_in_behind_whoever_had_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward in flight leaves a token in the row of a request that is gone."""
    world, req = retracted(600, 14, 6, overlap=True)
    device, done = Device(monkeypatch, "main"), list[str]()
    device.serve(serving(world).host, finish_loads=False)
    device.forward.enqueue(lambda: done.append("the forward ends"))
    relay = world.scheduler.future_map

    def stash(*told: Any, original: Any = relay.stash) -> None:
        device.main.enqueue(lambda: done.append("told"))
        device.finish()
        original(*told)

    monkeypatch.setattr(relay, "stash", stash)
    came_back(world, req)
    assert done == ["the forward ends", "told"]


def test_what_is_remembered_by_row_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engram's last tokens: no forward of its own writes them, and the engine does so for a PREBUILT batch alone."""
    world, req = retracted(600, 14, 6, overlap=True)
    seen_rows: list[int] = []

    def prepare(batch: Any, **_: Any) -> Any:
        seen_rows.extend(batch.req_pool_indices.tolist() if batch and batch.forward_mode.is_prebuilt() else [])
        return batch

    monkeypatch.setattr(world.scheduler.ngram_embedding_manager, "prepare_for_forward", prepare)
    came_back(world, req)
    assert seen_rows == [int(req.kv.req_pool_idx)]


def test_without_a_tree_and_an_end_that_is_ignored() -> None:
    """The engine has a way of its own for these."""
    world = small_world(radix=False)
    req = world.submit(range(400), max_new=60)
    req.sampling_params.ignore_eos = True
    run_to(world, req, 430)
    world.retract(req)
    came_back(world, req)
    over(world)


def test_a_shared_prefix_is_not_loaded_again() -> None:
    """Three requests share 1,024 tokens: a restore needs pages for the rest alone."""
    world = small_world(pages=14, swa_pages=16)
    shared = range(1024)
    reqs = [world.submit([*shared, *range(2000 * i, 2000 * i + 250)], max_new=40) for i in (1, 2, 3)]
    run_to(world, reqs[2], 1290)
    world.retract(reqs[2])
    assert world.totals()[0] <= 6  # with a reserve, a whole restore would not fit
    came_back(world, *reqs)
    assert reqs[2].kv.cache_protected_len == 1024
    assert serving(world).host.counters.spared_tokens == 1290 - 1024
    over(world)
