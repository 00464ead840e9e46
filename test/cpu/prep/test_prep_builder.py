"""The builder against the token-by-token oracle, on every device; drafts accepted and rejected step after step."""

from __future__ import annotations

import pytest
import torch
from random_steps import (
    DRAFTS,
    HOSTILE,
    KEEP_LENGTHS,
    LAYOUT,
    SHORT_KEEP,
    assert_same,
    make_world,
    random_lengths,
    snapshot,
)  # fmt: skip

from sglang_dsv4.prep.builder import MetadataBuilder
from sglang_dsv4.prep.oracle import build_metadata


def build_both(world, device, **kind):
    step = world.step(device, **kind)
    built = MetadataBuilder(world.layout, torch.device(device)).build(step, world.tables)
    return snapshot(built), snapshot(build_metadata(world.layout, step, world.tables))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_decode_step_equals_oracle(device, seed, on_device):
    world = make_world(random_lengths(seed, 24, LAYOUT.context), seed=seed, device=device)
    assert_same(*build_both(world, device, on_device=on_device))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("queries", [1, 2, 4, 9])
def test_verify_step_equals_oracle(device, queries, on_device):
    lengths = [n for n in HOSTILE if n < 500] + random_lengths(queries, 4, 1200)
    world = make_world(lengths, DRAFTS, seed=queries, device=device, room=queries)
    assert_same(*build_both(world, device, queries=queries, verify=True, on_device=on_device))


def test_rows_that_a_verified_step_does_not_write(device):
    world = make_world(KEEP_LENGTHS, SHORT_KEEP, device=device, room=9)
    built, wanted = build_both(world, device, queries=9, verify=True)
    assert_same(built, wanted)
    for ratio in ("c4", "c128"):
        written = wanted[f"{ratio}.write"].view(torch.int32)[:, 0] >= 0
        assert 0 < int(written.sum()) < len(written)


def test_hostile_lengths(device):
    longest = LAYOUT.context
    world = make_world([*HOSTILE, 0, longest - 1, longest], device=device)
    assert_same(*build_both(world, device))


def test_steps_inside_and_outside_of_inference_mode(device):
    """The engine runs both: its start-up outside, its event loop inside."""
    world = make_world([5, 300, 256], device=device)
    builder, step = MetadataBuilder(LAYOUT, torch.device(device)), world.step(device)
    builder.warm_up()
    for inside in (True, False, True, True, False):
        with torch.inference_mode(inside):
            made = snapshot(builder.build(step, world.tables))
        assert_same(made, snapshot(build_metadata(LAYOUT, step, world.tables)))


def test_a_step_started_twice_and_one_never_started(device):
    world = make_world([5, 300], device=device)
    builder, step = MetadataBuilder(LAYOUT, torch.device(device)), world.step(device)
    with pytest.raises(RuntimeError, match="without a started step"):
        builder.finish()
    first, second = builder.start(step, world.tables), builder.start(step, world.tables)
    assert first.page_table.data_ptr() != second.page_table.data_ptr()
    builder.finish()
    assert_same(snapshot(second), snapshot(build_metadata(LAYOUT, step, world.tables)))


def test_a_frame_that_grows_leaves_earlier_metadata_alone(device):
    builder = MetadataBuilder(LAYOUT, torch.device(device))
    small, large = make_world([5], device=device), make_world(random_lengths(1, 40, 1200), device=device)
    kept = builder.build(small.step(device), small.tables)
    before = snapshot(kept)
    for _ in range(3):  # both frames, and the first again
        built = builder.build(large.step(device), large.tables)
    assert_same(snapshot(kept), before)
    assert_same(snapshot(built), snapshot(build_metadata(LAYOUT, large.step(device), large.tables)))
