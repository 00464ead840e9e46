"""Drafts accepted and rejected step after step: lengths stay on the device, and a host mirror is never read."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import DRAFTS, assert_same, make_world, snapshot

from sglang_dsv4.prep.builder import MetadataBuilder
from sglang_dsv4.prep.oracle import build_metadata
from sglang_dsv4.prep.step import Step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUERIES = 3
STARTS = (1, 5, 125, 126, 127, 253, 254, 255, 380)


@settings(max_examples=15, deadline=None)
@given(
    starts=st.lists(st.sampled_from(STARTS), min_size=1, max_size=3),
    accepted=st.lists(st.lists(st.integers(1, QUERIES), min_size=3, max_size=3), min_size=1, max_size=6),
)
def test_each_step_follows_the_accepted_lengths(starts, accepted):
    """The lengths of step k+1 exist only on the device: they are what the verification of step k accepted."""
    most = QUERIES * (len(accepted) + 1)
    world = make_world(starts, DRAFTS, device=DEVICE, room=most)
    builder = MetadataBuilder(DRAFTS, torch.device(DEVICE))
    truth = list(starts)
    lengths = torch.tensor(starts, device=DEVICE)
    for takes in accepted:
        world.lengths = truth
        out_locs = world.step(DEVICE, QUERIES, verify=True).out_locs
        step = Step(torch.tensor(world.slots, device=DEVICE), out_locs, lengths, QUERIES, verify=True)
        built = builder.build(step, world.tables)
        known = step._replace(lengths=np.array(truth, np.int64))
        assert_same(snapshot(built), snapshot(build_metadata(DRAFTS, known, world.tables)))
        lengths += torch.tensor(takes[: len(starts)], device=DEVICE)
        truth = [length + take for length, take in zip(truth, takes, strict=False)]


def test_lengths_of_the_device_make_no_slab(monkeypatch):
    """Not even a copy of something else: the host has no part in such a step."""
    world = make_world([5, 300], DRAFTS, device=DEVICE, room=QUERIES)
    builder = MetadataBuilder(DRAFTS, torch.device(DEVICE))
    monkeypatch.setattr(builder, "_slabs", None)
    builder.build(world.step(DEVICE, QUERIES, verify=True, on_device=True), world.tables)
