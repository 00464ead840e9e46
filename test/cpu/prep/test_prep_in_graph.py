"""A graph would capture the metadata of the token-by-token oracle, with the kernel and with its torch twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prep_oracle import build_metadata
from random_steps import DRAFTS, HOSTILE, LAYOUT, compare, flatten, make_world, random_lengths

from sglang_dsv4.errors import IndexMismatch
from sglang_dsv4.prep import in_graph
from sglang_dsv4.prep.in_graph import build_in_graph
from sglang_dsv4.prep.step import PrepLayout
from triton_ops.prep_rows import prep_rows, prep_rows_torch

MILLION = 1 << 20
FAR = 1 << 16


@pytest.fixture(autouse=True, params=[prep_rows, prep_rows_torch], ids=["kernel", "torch"])
def op(request, monkeypatch):
    """Without a GPU the torch twin is taken; here the interpreted kernel is, too."""
    monkeypatch.setattr(in_graph, "prep_rows_torch", request.param)
    return request.param


def padded(step, rows):
    """``step`` with the engine's padding behind it: requests of length 1 in slot 0 that write to slot 0."""
    more = rows - step.requests
    pad = torch.nn.functional.pad
    return step._replace(
        slots=pad(step.slots, (0, more)),
        out_locs=pad(step.out_locs, (0, more * step.queries)),
        lengths=pad(step.lengths, (0, more), value=1),
    )


def check(world, device, rows=None, dtypes=(torch.int64,) * 3, layout=None, **kind):
    layout = layout or world.layout
    step = world.step(device, on_device=True, **kind)
    if rows:
        step = padded(step, rows)
    slots, out_locs, lengths = dtypes
    step = step._replace(
        slots=step.slots.to(slots), out_locs=step.out_locs.to(out_locs), lengths=step.lengths.to(lengths)
    )
    made = flatten(build_in_graph(layout, step, world.tables))
    wanted = flatten(build_metadata(layout, step, world.tables))
    compare(made, wanted)
    return made


@pytest.mark.parametrize(("requests", "rows"), [(1, None), (1, 8), (5, 8), (7, None), (100, 128), (128, None)])
def test_decode_batches_whole_and_padded(device, requests, rows):
    world = make_world(random_lengths(requests, requests, 1200), seed=requests, device=device)
    check(world, device, rows)


@pytest.mark.parametrize("queries", [4, 8])
@pytest.mark.parametrize(("requests", "rows"), [(1, None), (3, 4), (16, None)])
def test_verified_batches_whole_and_padded(device, requests, rows, queries):
    world = make_world(random_lengths(queries, requests, 1200), DRAFTS, seed=requests, device=device, room=queries)
    check(world, device, rows, queries=queries, verify=True)


@pytest.mark.parametrize("queries", [1, 4, 8])
def test_hostile_lengths(device, queries):
    layout, verify = (DRAFTS, True) if queries > 1 else (LAYOUT, False)
    longest = layout.context - (queries if verify else 0)
    world = make_world([0, *HOSTILE, longest - 1, longest], layout, device=device, room=queries)
    check(world, device, queries=queries, verify=verify)


@pytest.mark.parametrize("context", [FAR, MILLION])
def test_short_rows_of_a_wide_table(device, context):
    """Behind a row nothing of the table is read: slots left over there would give pages that are not its own."""
    world = make_world([1, 3, 257, 40_000], PrepLayout(context=context), device=device)
    made = check(world, device)
    assert made["page_table"].count_nonzero(1).tolist() == [1, 1, 2, -(-40_000 // 256)]


def test_each_metadata_has_memory_of_its_own(device):
    world = make_world([5, 300], device=device)
    step = world.step(device, on_device=True)
    first, second = (build_in_graph(LAYOUT, step, world.tables) for _ in range(2))
    wanted = flatten(first)
    second.page_table.zero_()
    compare(flatten(first), wanted)


def test_lengths_of_the_host_are_refused(device):
    world = make_world([5, 300], device=device)
    with pytest.raises(IndexMismatch, match="replayed"):
        build_in_graph(LAYOUT, world.step(device)._replace(lengths=np.array([5, 300])), world.tables)
