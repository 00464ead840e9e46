"""Metadata captured into CUDA graphs, replayed with other lengths, slots and tables: the engine's kernels and ours."""

from __future__ import annotations

import pytest
import torch
from prep_fixture import PrepWorld, leave_out_planners
from raw_metadata import make

from sglang_dsv4.bench.prep_graph import engine_of
from sglang_dsv4.bench.stepping.graphs import Captured, RawInputs, compare_in_graph


@pytest.mark.parametrize("context", [1 << 16, 1 << 20])
@pytest.mark.parametrize("queries", [1, 4, 8])
def test_every_field_of_every_replay_is_the_engines(context, queries):
    """Also what comes after a retract: shorter requests in other slots of a table that is full of leftovers."""
    engine = engine_of(context, queries, [128])
    for size in (1, 3, 32, 128):
        found, compared = compare_in_graph(engine, size)
        assert found == [] and compared > 6


@pytest.mark.parametrize("queries", [1, 4])
def test_a_graph_needs_no_more_memory(queries):
    engine = engine_of(1 << 20, queries, [128])
    for size in (1, 8, 128):
        inputs = RawInputs(engine, size)
        theirs, ours = (Captured(engine, inputs, ours=own).nbytes for own in (False, True))
        assert 0 < ours <= theirs


def test_the_hooked_method_can_be_captured(monkeypatch):
    """As the engine's runner does: warm-ups, then the capture, in the class's own method."""
    leave_out_planners(monkeypatch)
    world = PrepWorld([5, 300, 256])
    world.attach(monkeypatch, "graph")
    inputs = RawInputs(world.engine, 3)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            make(world, inputs.raw)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        made = make(world, inputs.raw)
    inputs.lengths.copy_(world.placed.seq_lens)
    graph.replay()
    assert made.core_attn_metadata.seq_lens_casual.tolist() == [5, 300, 256]
