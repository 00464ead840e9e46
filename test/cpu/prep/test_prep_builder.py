"""The builder makes the metadata of the token-by-token oracle, with the kernel and with its torch twin."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from prep_oracle import build_metadata
from random_steps import (
    DRAFTS,
    HOSTILE,
    KEEP_LENGTHS,
    LAYOUT,
    SHORT_KEEP,
    compare,
    flatten,
    make_world,
    random_lengths,
)  # fmt: skip

from sglang_dsv4.prep import builder as module
from sglang_dsv4.prep.builder import MetadataBuilder
from sglang_dsv4.prep.frame import Frame, Shape
from sglang_dsv4.prep.step import PrepLayout
from triton_ops.prep_rows import TILE_PAGES, prep_rows, prep_rows_torch


@pytest.fixture(autouse=True, params=[prep_rows, prep_rows_torch], ids=["kernel", "torch"])
def op(request, monkeypatch):
    """Without a GPU the builder takes the twin; here it takes the interpreted kernel, too."""
    monkeypatch.setattr(module, "prep_rows_torch", request.param)


def build_both(world, device, **kind):
    step = world.step(device, **kind)
    built = MetadataBuilder(world.layout, torch.device(device)).build(step, world.tables)
    return flatten(built), flatten(build_metadata(world.layout, step, world.tables))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_decode_step_equals_oracle(device, seed, on_device):
    world = make_world(random_lengths(seed, 24, LAYOUT.context), seed=seed, device=device)
    compare(*build_both(world, device, on_device=on_device))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("queries", [1, 2, 9])
def test_verify_step_equals_oracle(device, queries, on_device):
    lengths = [n for n in HOSTILE if n < 500] + random_lengths(queries, 4, 1200)
    world = make_world(lengths, DRAFTS, seed=queries, device=device, room=queries)
    compare(*build_both(world, device, queries=queries, verify=True, on_device=on_device))


def test_rows_that_a_verified_step_does_not_write(device):
    world = make_world(KEEP_LENGTHS, SHORT_KEEP, device=device, room=9)
    built, wanted = build_both(world, device, queries=9, verify=True)
    compare(built, wanted)
    for ratio in ("c4", "c128"):
        written = wanted[f"{ratio}.write"].view(torch.int32)[:, 0] >= 0
        assert 0 < int(written.sum()) < len(written)


def test_tiles_of_a_long_table(device):
    """More pages than one program makes; live C128 rows on both sides of the seam."""
    long, seam = PrepLayout(context=(TILE_PAGES + 3) * 256 - 5, topk=64), TILE_PAGES * 256
    compare(*build_both(make_world([seam - 1, seam, seam + 300, long.context, 1], long, device=device), device))


@pytest.mark.parametrize("slot", [-1, -(2**31), 2**31 - 1])
def test_full_slots_outside_the_mapping_have_no_swa_slot(device, slot):
    world = make_world([300, 40], device=device)
    world.tables.req_to_token[world.slots[0], 246:256] = slot
    built, wanted = build_both(world, device)
    compare(built, wanted)
    assert (built["swa_indices"][0] == -1).nonzero().flatten().tolist() == list(range(44, 54))


def test_steps_inside_and_outside_of_inference_mode(device):
    """The engine runs both: its start-up outside, its event loop inside."""
    world = make_world([5, 300, 256], device=device)
    builder, step = MetadataBuilder(LAYOUT, torch.device(device)), world.step(device)
    builder.warm_up()
    for inside in (True, False, True, True, False):
        with torch.inference_mode(inside):
            made = flatten(builder.build(step, world.tables))
        compare(made, flatten(build_metadata(LAYOUT, step, world.tables)))


def test_a_step_started_twice_and_one_never_started(device):
    world = make_world([5, 300], device=device)
    builder, step = MetadataBuilder(LAYOUT, torch.device(device)), world.step(device)
    with pytest.raises(RuntimeError, match="without a started step"):
        builder.finish()
    first, second = builder.start(step, world.tables), builder.start(step, world.tables)
    assert first.page_table.data_ptr() != second.page_table.data_ptr()
    builder.finish()
    compare(flatten(second), flatten(build_metadata(LAYOUT, step, world.tables)))


def test_a_frame_gives_its_memory_back_behind_its_readers(monkeypatch):
    """It was allocated at start, on another stream: that of the last forward that reads it must be named."""
    frame = Frame(LAYOUT, torch.device("cpu"))
    frame.views(Shape(1, 1, 1, False))
    old = frame._memory = mock.Mock(is_cuda=True, numel=frame._memory.numel)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current stream", device))
    frame.views(Shape(1000, 1, 1, False))
    old.record_stream.assert_called_once_with(("current stream", torch.device("cpu")))
