"""The engine's own metadata on a GPU, its CUDA planners included, against what the builder puts in its place."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prep_fixture import DRAFTS, SIZES, PrepWorld, check, hooked, leave_out_planners, metadata_of, original

from sglang_dsv4.engine.metadata import eager
from sglang_dsv4.engine.metadata.attach import prep_of
from sglang_dsv4.engine.state import server


@pytest.fixture(autouse=True)
def planners(monkeypatch):
    leave_out_planners(monkeypatch)


def lengths_of(seed):
    rng = np.random.default_rng(seed)
    return [int(n) for n in rng.integers(1, 256 * SIZES.pages // SIZES.requests - 256, SIZES.requests - 1)] + [128]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafts", [0, 2, DRAFTS, 4])
def test_fields_equal_the_engines(seed, drafts, monkeypatch):
    world = PrepWorld(lengths_of(seed), drafts=drafts)
    theirs = metadata_of(world, original, world.batch())
    world.attach(monkeypatch)
    check(metadata_of(world, hooked, world.batch()), theirs)


def test_steps_prepared_beside_a_busy_forward(monkeypatch):
    """The forward stream sleeps, then reads; the schedule stream changes the tables as soon as the barrier lets it."""
    world = PrepWorld(lengths_of(1))
    wanted = metadata_of(world, original, world.batch())
    world.attach(monkeypatch)
    prep, batch = prep_of(world.backend), world.batch()
    schedule, forward = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    found = []

    def run():
        with torch.cuda.stream(forward):
            forward.wait_stream(schedule)
            runner = type("Runner", (), {"model_runner": world.runner})
            loaded = type(batch)(**vars(batch))
            eager.load_batch(lambda *_: loaded, runner, batch)
            eager.init_forward_metadata(original, world.backend, loaded)
            torch.cuda._sleep(20_000_000)
            found.append(metadata_of(world, lambda *_: None, batch))

    scheduler = SimpleNamespace(enable_overlap=True, forward_stream=forward, schedule_stream=schedule)
    monkeypatch.setattr(server, "scheduler", scheduler)
    truth = world.table.clone()
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(schedule):
            world.table.copy_(truth)
            run()
            event = getattr(world.runner, prep.release.read_done)
            assert event is not None
            schedule.wait_event(event)
            world.table.zero_()  # what the scheduler does next must not be seen
    torch.cuda.synchronize()  # what was found is on the forward stream
    assert prep.counts.steps["overlapped"] == 5
    for metadata in found:
        check(metadata, wanted)
