"""What a graph would capture: the engine's own metadata of raw inputs, field by field, against ours in its place."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from prep_fixture import DRAFTS, LENGTHS, PrepWorld, check, flatten, leave_out_planners
from raw_metadata import capture_batch, captured, draft_world, engines, extended, from_raw

from sglang_dsv4.engine.metadata import graphs
from sglang_dsv4.engine.metadata.attach import prep_of
from sglang_dsv4.engine.metadata.graphs import graph_prep_of
from sglang_dsv4.prep.builder import MetadataBuilder


@pytest.fixture(autouse=True)
def planners(monkeypatch, caplog):
    leave_out_planners(monkeypatch)
    caplog.set_level(logging.INFO, logger="sglang_dsv4")


@pytest.mark.parametrize("drafts", [0, 2, DRAFTS, 4, 8])
def test_every_field_is_the_engines_capture_after_replay(drafts, monkeypatch):
    """Captured with the engine's dummies, then other lengths, slots and tables in the same raw inputs."""
    world = PrepWorld(LENGTHS, drafts=drafts)
    world.attach(monkeypatch)
    batch = capture_batch(world, 12)
    raw = captured(world, batch)
    draw = np.random.default_rng(drafts)
    for lengths in (None, LENGTHS, [1, 5, 127], draw.integers(1, 400, 12).tolist()):
        if lengths is not None:
            batch.fill(world, lengths)
        theirs, ours = (from_raw(world, raw, how) for how in (engines, None))
        check(ours, theirs)
    assert graph_prep_of(world.backend) is not None


def test_the_decode_steps_of_a_draft_model(monkeypatch):
    """Its pool has SWA layers alone, and the engine makes no compressed field for it."""
    world = draft_world(monkeypatch, LENGTHS)
    assert prep_of(world.backend) is None, "its eager steps are the engine's"
    batch = capture_batch(world, 12)
    raw = captured(world, batch)
    batch.fill(world, LENGTHS)
    theirs, ours = (from_raw(world, raw, how) for how in (engines, None))
    check(ours, theirs, least=6)
    assert graph_prep_of(world.backend).layout.c128 is False


@pytest.mark.parametrize("queries", [2, 4, 8])
@pytest.mark.parametrize("graphs", [False, True])
def test_the_extend_of_a_draft_model(queries, graphs, monkeypatch):
    """The last tokens of each request; of padding and of short requests, rows from before their start."""
    world = draft_world(monkeypatch, [1, 3, 5, 128, 129, 300], drafts=queries)
    backend = world.backend
    if graphs:
        backend.init_cuda_graph_state(8, 8 * queries)
    warm_up = mock.Mock()
    monkeypatch.setattr(MetadataBuilder, "warm_up", warm_up)
    dummy = type(backend).init_forward_metadata_draft_extend(
        backend, world.placed.req_pool_indices, world.placed.seq_lens, queries
    )
    assert dummy.core_attn_metadata.raw_out_loc.count_nonzero() == 0, "a capture's dummy is the engine's"
    warm_up.assert_called_once_with()
    for lengths in ([1, 3, 5, 128, 129, 300], [2, 4, 6, 130, 131, 301], [7, 1], [257]):
        world.place(lengths)
        theirs = flatten(extended(world, engines))
        ours = extended(world)
        check(flatten(ours), theirs, least=6)
    kept = getattr(backend, "cuda_graph_swa_out_cache_loc", None)
    if graphs:
        assert ours.core_attn_metadata.swa_out_cache_loc.data_ptr() == kept.data_ptr(), "where the graph reads"


@pytest.mark.parametrize("dummy", [False, True])
def test_an_extend_whose_preparation_is_captured_is_the_engines(dummy, monkeypatch):
    """0.5.23 may capture it while serving: its replays would write into memory that the builder gives to others."""
    world = draft_world(monkeypatch, [5, 300], drafts=2)
    placed = world.placed
    lengths = mock.Mock(spec=torch.Tensor, is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for name in ("warm_up", "build"):
        monkeypatch.setattr(MetadataBuilder, name, lambda *_: pytest.fail("the builder writes in its memory"))
    found = graphs.draft_extend(
        lambda *_: "theirs", world.backend, placed.req_pool_indices, lengths, 2, None if dummy else placed.out_cache_loc
    )
    assert found == "theirs"


LEFT = {
    "ragged verification": {"verify_lens": torch.ones(9, dtype=torch.int32)},
    "online c128 compression": {"c128_compress_metadata": object()},
    "inputs that the builder does not take": {"out_cache_loc": torch.zeros(2, dtype=torch.int64)},
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_to_the_engine_is_said_once(reason, monkeypatch, caplog):
    world = PrepWorld(LENGTHS, drafts=DRAFTS)
    world.attach(monkeypatch)
    raw = captured(world, capture_batch(world, 12))
    for name, value in LEFT[reason].items():
        setattr(raw, name, value)
    ran = []
    for _ in range(2):
        assert graphs.from_raw_verify(lambda *args: ran.append(args) or "theirs", world.backend, raw) == "theirs"
    assert ran == [(world.backend, raw)] * 2
    assert [reason in record.getMessage() for record in caplog.records].count(True) == 1


@pytest.mark.parametrize("capturing", [False, True])
def test_a_graph_that_makes_its_metadata_is_told_once(capturing, monkeypatch, caplog):
    """With --disable-cuda-graph there is none, and an eager step of a draft model comes here all the same."""
    world = PrepWorld(LENGTHS)
    world.attach(monkeypatch)
    raw = captured(world, capture_batch(world, 12))
    monkeypatch.setattr(graphs, "_in_a_capture", lambda _: capturing)
    for _ in range(2):
        from_raw(world, raw)
    said = [record.getMessage() for record in caplog.records if "in graphs is made" in record.getMessage()]
    assert said == ["decode metadata in graphs is made by this package's kernel"] * capturing


def test_a_server_whose_backends_are_all_refused_says_it_once(monkeypatch, caplog):
    """With three drafts it has five of them."""
    world = PrepWorld(LENGTHS)
    world.runner.spec_algorithm = SimpleNamespace(is_dspark=lambda: True)
    for draft in (False, True, True):
        world.runner.is_draft_worker = draft
        world.attach(monkeypatch)
    assert [record.getMessage() for record in caplog.records] == ["decode metadata stays the engine's: DSpark drafts"]


def test_the_draft_of_a_target_that_is_refused_is_the_engines(monkeypatch, caplog):
    """Its own pool may be like any other: nothing else tells it from a covered one."""
    world = PrepWorld(LENGTHS)
    world.backend.hisparse_coordinator = object()
    world.attach(monkeypatch)
    world.backend.hisparse_coordinator = None
    world.runner.is_draft_worker = True
    world.attach(monkeypatch)
    assert graph_prep_of(world.backend) is None and len(caplog.records) == 1


def test_batches_of_many_sizes_that_do_not_fit_are_one_reason(monkeypatch, caplog):
    """A data-parallel rank's batch may be padded to tokens that are no multiple of its drafts."""
    world = draft_world(monkeypatch, LENGTHS, drafts=DRAFTS)
    for more in (1, 2):
        padded = torch.zeros(len(LENGTHS) * DRAFTS + more, dtype=torch.int64)
        slots, lengths = world.placed.req_pool_indices, world.placed.seq_lens
        assert graphs.draft_extend(lambda *_: "theirs", world.backend, slots, lengths, DRAFTS, padded) == "theirs"
    assert caplog.text.count("left to the engine: inputs that the builder does not take") == 1
