"""The builder, and a graph, make the metadata of the token-by-token oracle, with the kernel and with its torch twin."""

from unittest import mock

import numpy as np
import pytest
import torch
from prep_oracle import build_metadata
from random_steps import DRAFTS, HOSTILE, KEEP_LENGTHS, LAYOUT, SHORT_KEEP, compare, flatten, make_world, random_lengths

from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.prep import builder, in_graph
from sglang_dsv4.prep.builder import MetadataBuilder
from sglang_dsv4.prep.frame import Frame, Shape
from sglang_dsv4.prep.in_graph import build_in_graph
from sglang_dsv4.prep.step import PrepLayout
from triton_ops.prep_rows import TILE_PAGES, prep_rows, prep_rows_torch

HOST, DEVICE, GRAPH = "lengths on the host", "lengths on the device", "in a graph"
WAYS = pytest.mark.parametrize("way", [HOST, DEVICE, GRAPH])


@pytest.fixture(autouse=True, params=[prep_rows, prep_rows_torch], ids=["kernel", "torch"])
def op(request, monkeypatch):
    """Without a GPU the torch twin is taken; here the interpreted kernel is, too."""
    for module in (builder, in_graph):
        monkeypatch.setattr(module, "prep_rows_torch", request.param)


def padded(step, rows):
    """``step`` with the engine's padding behind it: requests of length 1 in slot 0 that write to slot 0."""
    more = rows - step.requests
    pad = torch.nn.functional.pad
    return step._replace(
        slots=pad(step.slots, (0, more)),
        out_locs=pad(step.out_locs, (0, more * step.queries)),
        lengths=pad(step.lengths, (0, more), value=1),
    )


def check(world, device, way=HOST, rows=0, **kind):
    """Builds a step, padded to ``rows`` requests; returns it by field."""
    step = world.step(device, on_device=way != HOST, **kind)
    step = padded(step, rows) if rows else step
    if way == GRAPH:
        made = build_in_graph(world.layout, step, world.tables)
    else:
        made = MetadataBuilder(world.layout, torch.device(device)).build(step, world.tables)
    found = flatten(made)
    compare(found, flatten(build_metadata(world.layout, step, world.tables)))
    return found


@WAYS
@pytest.mark.parametrize("seed", range(3))
def test_decode_step_equals_oracle(device, seed, way):
    lengths = random_lengths(seed, 24, LAYOUT.context) if seed else [0, *HOSTILE, LAYOUT.context - 1, LAYOUT.context]
    check(make_world(lengths, seed=seed, device=device), device, way)


@pytest.mark.parametrize(
    ("queries", "way"), [(1, DEVICE), (2, GRAPH), (4, HOST), (4, DEVICE), (4, GRAPH), (9, HOST), (9, GRAPH)]
)
def test_verify_step_equals_oracle(device, queries, way):
    longest = DRAFTS.context - queries
    lengths = [0, *HOSTILE, *random_lengths(queries, 4, 1200), longest - 1, longest]
    world = make_world([n for n in lengths if n <= longest], DRAFTS, seed=queries, device=device, room=queries)
    check(world, device, way, queries=queries, verify=True)


@pytest.mark.parametrize(
    ("requests", "rows", "queries"), [(1, 8, 1), (5, 8, 1), (100, 128, 1), (3, 4, 4), (3, 4, 8), (1, 2, 8)]
)
def test_a_graph_larger_than_its_batch(device, requests, rows, queries):
    layout = DRAFTS if queries > 1 else LAYOUT
    lengths = random_lengths(requests, requests, 1200)
    world = make_world(lengths, layout, seed=requests, device=device, room=queries)
    check(world, device, GRAPH, rows, queries=queries, verify=queries > 1)


@pytest.mark.parametrize("context", [1 << 16, 1 << 20])
def test_short_rows_of_a_wide_table(device, context):
    """Behind a row nothing of the table is read: slots left over there would give pages that are not its own."""
    made = check(make_world([1, 3, 257, 40_000], PrepLayout(context=context), device=device), device, GRAPH)
    assert made["page_table"].count_nonzero(1).tolist() == [1, 1, 2, -(-40_000 // 256)]


def test_rows_that_a_verified_step_does_not_write(device):
    made = check(make_world(KEEP_LENGTHS, SHORT_KEEP, device=device, room=9), device, queries=9, verify=True)
    for ratio in ("c4", "c128"):
        written = made[f"{ratio}.write"].view(torch.int32)[:, 0] >= 0
        assert 0 < int(written.sum()) < len(written)


def test_tiles_of_a_long_table(device):
    """More pages than one program makes; live C128 rows on both sides of the seam."""
    long, seam = PrepLayout(context=(TILE_PAGES + 3) * 256 - 5, topk=64), TILE_PAGES * 256
    check(make_world([seam - 1, seam, seam + 300, long.context, 1], long, device=device), device)


@pytest.mark.parametrize("slot", [-1, -(2**31), 2**31 - 1])
def test_full_slots_outside_the_mapping_have_no_swa_slot(device, slot):
    world = make_world([300, 40], device=device)
    world.tables.req_to_token[world.slots[0], 246:256] = slot
    assert (check(world, device)["swa_indices"][0] == -1).nonzero().flatten().tolist() == list(range(44, 54))


def test_steps_inside_and_outside_of_inference_mode(device):
    """The engine runs both: its start-up outside, its event loop inside."""
    world = make_world([5, 300, 256], device=device)
    prep, step = MetadataBuilder(LAYOUT, torch.device(device)), world.step(device)
    prep.warm_up()
    for inside in (True, False, True, True, False):
        with torch.inference_mode(inside):
            made = flatten(prep.build(step, world.tables))
        compare(made, flatten(build_metadata(LAYOUT, step, world.tables)))


def test_a_step_started_twice_and_one_never_started(device):
    world = make_world([5, 300], device=device)
    prep, step = MetadataBuilder(LAYOUT, torch.device(device)), world.step(device)
    with pytest.raises(RuntimeError):
        prep.finish()
    first, second = prep.start(step, world.tables), prep.start(step, world.tables)
    assert first.page_table.data_ptr() != second.page_table.data_ptr()
    prep.finish()
    compare(flatten(second), flatten(build_metadata(LAYOUT, step, world.tables)))


def test_a_frame_gives_its_memory_back_behind_its_readers(monkeypatch):
    """It was allocated at start, on another stream: that of the last forward that reads it must be named."""
    frame = Frame(LAYOUT, torch.device("cpu"))
    frame.views(Shape(1, 1, 1, False))
    old = frame._memory = mock.Mock(is_cuda=True, numel=frame._memory.numel)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current stream", device))
    frame.views(Shape(1000, 1, 1, False))
    old.record_stream.assert_called_once_with(("current stream", torch.device("cpu")))


def test_each_metadata_of_a_graph_has_memory_of_its_own(device):
    world = make_world([5, 300], device=device)
    step = world.step(device, on_device=True)
    first, second = (build_in_graph(LAYOUT, step, world.tables) for _ in range(2))
    wanted = flatten(first)
    second.page_table.zero_()
    compare(flatten(first), wanted)


def test_lengths_of_the_host_are_refused_in_a_graph(device):
    world = make_world([5, 300], device=device)
    with pytest.raises(IndexMismatch):
        build_in_graph(LAYOUT, world.step(device)._replace(lengths=np.array([5, 300])), world.tables)
