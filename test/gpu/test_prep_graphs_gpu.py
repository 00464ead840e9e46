"""Metadata captured into CUDA graphs, replayed with other lengths, slots and tables: the engine's kernels and ours."""

import numpy as np
import pytest
import torch
from prep_fixture import PrepWorld, check, flatten, leave_out_planners, ordered
from raw_metadata import draft_world, engines, extended, from_raw, make

from sglang_dsv4.bench.prep import engine_of
from sglang_dsv4.bench.prep_graphs import Captured, RawInputs, compare_in_graph


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


@pytest.fixture
def no_planners(monkeypatch):
    leave_out_planners(monkeypatch)


@pytest.mark.parametrize("draft", [False, True])
def test_the_hooked_method_can_be_captured(draft, no_planners, monkeypatch):
    """As the engine's runner does: warm-ups, then the capture, in the class's own method."""
    lengths = [5, 300, 256]
    world = draft_world(monkeypatch, lengths) if draft else PrepWorld(lengths)
    if not draft:
        world.attach(monkeypatch)
    inputs = RawInputs(world.engine, 3)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs are filled there
    with torch.cuda.stream(stream):
        for _ in range(2):
            make(world, inputs.raw)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        made = make(world, inputs.raw)
    inputs.fill(world.engine.place(np.array(lengths)))
    graph.replay()
    assert made.core_attn_metadata.seq_lens_casual.tolist() == lengths
    check(ordered(flatten(made)), from_raw(world, inputs.raw, engines), least=6)


@pytest.mark.parametrize("queries", [2, 4, 8])
def test_the_extend_of_a_draft_model_again_and_again(queries, no_planners, monkeypatch):
    """In memory that is used again, while what was made before is read."""
    world = draft_world(monkeypatch, [1, 3, 5, 128, 129, 300], drafts=queries)
    world.backend.init_cuda_graph_state(8, 8 * queries)
    draw = np.random.default_rng(queries)
    for _ in range(20):
        world.place(draw.integers(1, 300, draw.integers(1, 9)))
        theirs = flatten(extended(world, engines))
        check(flatten(extended(world)), theirs, least=6)
