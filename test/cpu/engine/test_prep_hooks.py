"""The engine's own metadata, field by field, against what the builder puts in its place."""

import contextlib
import copy
import itertools
import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prep_fixture import (
    DRAFTS,
    LENGTHS,
    PrepWorld,
    check,
    flatten,
    hooked,
    leave_out_planners,
    metadata_of,
    never,
    ordered,
    original,
)  # fmt: skip
from server_fixture import update_weights
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dsv4.engine.coverage import launch
from sglang_dsv4.engine.hooks import install
from sglang_dsv4.engine.metadata import attach, eager
from sglang_dsv4.engine.metadata.attach import prep_of
from sglang_dsv4.engine.releases import engine_release
from sglang_dsv4.engine.state import server


@pytest.fixture(autouse=True)
def planners(monkeypatch):
    leave_out_planners(monkeypatch)


@pytest.mark.parametrize(("ratio", "ring", "rows"), [(4, 16, 10), (128, 256, 130)])
def test_the_rows_kept_for_a_roll_back_are_those_of_the_engines_planner(ratio, ring, rows):
    """``mtp_pad`` in its c_plan.cuh: whatever is accepted of a verified step, the next one finds its states."""
    keep = engine_release().kept_states
    assert keep(ratio, ring) == rows
    assert keep(ratio, ring // 2) == 0, "without drafts nothing is rolled back"


def test_accepted_drafts_are_followed_and_no_mirror_is_read(monkeypatch):
    """Step after step, lengths that only the device has; the host's are of some other step, or of none."""
    draw = np.random.default_rng(0)
    lengths = [1, 5, 126, 253, 380, 500]
    world = PrepWorld(lengths, drafts=DRAFTS)
    world.attach(monkeypatch)
    for _ in range(12):
        world.place(lengths)
        theirs = metadata_of(world, original, world.batch())
        mirror = torch.from_numpy(draw.integers(1, 640, len(lengths)))
        check(metadata_of(world, hooked, world.batch(seq_lens_cpu=mirror)), theirs)
        lengths = [length + int(draw.integers(1, DRAFTS + 1)) for length in lengths]
    assert prep_of(world.backend).counts.steps["inline"] == 12


@contextlib.contextmanager
def scheduled(overlap=True):
    """Inside, forwards are those of a scheduler in its loop, on the current stream."""
    current = torch.cuda.current_stream() if torch.cuda.is_initialized() else True
    scheduler = SimpleNamespace(enable_overlap=overlap, forward_stream=eager._stream(), schedule_stream=current)
    eager.run_event_loop(scheduler)
    try:
        yield
    finally:
        server.scheduler = None


class Forward:
    """A scheduler that runs one batch: the runner's load_batch, the backend's metadata, in this order."""

    def __init__(self, world, overlap=True) -> None:
        self.world, self.overlap = world, overlap
        self.published = []
        prep = prep_of(world.backend)
        prep._read_done = itertools.repeat(SimpleNamespace(record=lambda: self.published.append(True)))

    def run(self, batch, loaded=None, original=never):
        loaded = loaded or SimpleNamespace(**vars(batch))

        with scheduled(self.overlap):
            runner = SimpleNamespace(model_runner=self.world.runner)
            assert eager.load_batch(lambda *_: loaded, runner, batch) is loaded
            eager.init_forward_metadata(original, self.world.backend, loaded)

    def event(self):
        return self.world.runner.shared_read_done_event


@pytest.fixture(scope="module")
def shared():
    """A world and what the engine makes of its batch."""
    with pytest.MonkeyPatch.context() as patch:
        leave_out_planners(patch)
        world = PrepWorld(LENGTHS)
        return world, metadata_of(world, original, world.batch())


@pytest.fixture
def decode(shared, monkeypatch):
    world, theirs = shared
    world.reset()
    world.attach(monkeypatch)
    return world, theirs


def test_a_plain_step_is_prepared_early_and_published(decode):
    world, theirs = decode
    forward = Forward(world)
    batch = world.batch()
    # The runner's own buffers: the device lengths are not needed.
    forward.run(batch, SimpleNamespace(**{**vars(batch), "seq_lens": None, "seq_lens_cpu": None}))
    check(ordered(flatten(world.backend.forward_metadata)), theirs)
    counts = prep_of(world.backend).counts
    assert (dict(counts.steps), dict(counts.left)) == ({"overlapped": 1}, {})
    assert forward.event() is not None
    assert forward.published == [True]


@pytest.mark.parametrize("why", ["no overlap", "padded", "speculation", "another batch"])
def test_other_steps_are_prepared_in_line_and_not_published(why, decode):
    world, theirs = decode
    forward = Forward(world, overlap=why != "no overlap")
    batch = world.batch(**({"global_num_tokens_cpu": [9]} if why == "padded" else {}))
    if why == "speculation":
        world.runner.spec_algorithm = SpeculativeAlgorithm.EAGLE
    if why == "another batch":
        forward.run(batch, original=lambda *_: None)
        assert prep_of(world.backend).counts.steps["overlapped"] == 1
        world.runner.war_fastpath_read_done_event = world.runner.shared_read_done_event = None
        eager.init_forward_metadata(never, world.backend, batch)
    else:
        forward.run(batch)
    check(ordered(flatten(world.backend.forward_metadata)), theirs)
    assert prep_of(world.backend).counts.steps["inline"] == 1
    assert forward.event() is None


def test_a_step_started_for_one_batch_is_not_given_to_another(decode):
    """As many rows, other requests: what was started is dropped, and the next step is none the worse."""
    world, theirs = decode
    batch = world.batch()
    backwards = {name: getattr(batch, name).flip(0) for name in ("req_pool_indices", "seq_lens", "out_cache_loc")}
    other = SimpleNamespace(**{**vars(batch), **backwards})

    with scheduled():
        eager.load_batch(lambda *_: batch, SimpleNamespace(model_runner=world.runner), batch)
        eager.init_forward_metadata(never, world.backend, other)
    found = flatten(world.backend.forward_metadata)
    check({n: v.flip(0) if isinstance(v, torch.Tensor) and v.dim() else v for n, v in found.items()}, theirs)
    assert prep_of(world.backend).counts.steps["overlapped"] == 0
    Forward(world).run(batch)
    check(ordered(flatten(world.backend.forward_metadata)), theirs)


def test_an_admission_waits_for_the_forward_once_the_barrier_is_given_up(decode, monkeypatch):
    """As do weights: paused in place, the last eager forward may still read them."""
    waited, done = [], []
    stream = SimpleNamespace(synchronize=lambda: done.append("forward"))
    monkeypatch.setattr(server, "early_stream", None)
    for overlap in (False, True, False):  # what was published once may be relied on ever after
        with pytest.MonkeyPatch.context() as patch:
            if overlap:
                patch.setattr(eager, "_stream", lambda: stream)
            Forward(decode[0], overlap).run(decode[0].batch())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=waited.append))
            server.wait_on_this_stream()
        update_weights("disk")
        done.append("weights")
    assert waited == [stream, stream]
    assert done == ["weights", "forward", "weights", "forward", "weights"]


TIERS = (
    ("memory", "enable_hierarchical_cache", True), ("memory", "hicache_storage_backend", "file"),
    ("memory", "enable_lmcache", True), ("memory", "enable_flexkv", True),
    ("disagg", "disaggregation_decode_enable_offload_kvcache", True),
)  # fmt: skip


@pytest.mark.parametrize(("bag", "name", "value"), [*TIERS, ("memory", None, None)])
def test_a_host_tier_is_seen(bag, name, value):
    names = {field: getattr(getattr(launch(), bag), field) for where, field, _ in TIERS if where == bag}
    changed = SimpleNamespace(**(names | ({name: value} if name else {})))
    assert replace(launch(), **{bag: changed}).host_tier == (name is not None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"out_cache_loc": None}, "out_cache_loc"),
        ({"out_cache_loc": torch.zeros(3, dtype=torch.int64)}, "does not take"),
        ({"out_cache_loc": torch.zeros(len(LENGTHS))}, "does not take"),
        ({"req_pool_indices": torch.zeros(2 * len(LENGTHS), dtype=torch.int64)[::2]}, "does not take"),
        pytest.param({"encoder_swa_replay": True}, "replayed"),
    ],
)
def test_what_does_not_fit_is_left_to_the_engine_and_counted(change, reason, decode):
    world, _ = decode
    ran = []
    for _ in range(2):
        Forward(world).run(world.batch(**change), original=lambda *args: ran.append(args))
    assert len(ran) == 2
    [(found, count)] = prep_of(world.backend).counts.left.items()
    assert reason in found and count == 2


REFUSALS = {
    "HiSparse": lambda w: setattr(w.backend, "hisparse_coordinator", object()),
    "pool": lambda w: setattr(w.backend, "token_to_kv_pool", object()),
    "DSpark": lambda w: setattr(w.runner, "spec_algorithm", SimpleNamespace(is_dspark=lambda: True)),
    "pages of 256 and 64 tokens": lambda w: setattr(w.pool, "swa_page_size", 64),
    "compression ratios [1, 2] (DeepSeek-V4.1)": lambda w: setattr(w.pool, "compression_ratios", [0, 1, 2, 2]),
    "KV layout v41": lambda w: setattr(w.pool, "kv_layout", SimpleNamespace(value="v41")),
    "SWA pages of 64 tokens": lambda w: setattr(w.pool, "swa_kv_pool", SimpleNamespace(page_size=64)),
    "split indexer buffers": lambda w: setattr(w.pool, "c4_indexer_kv_pool", SimpleNamespace()),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_layouts_that_are_not_covered_stay_the_engines(reason, shared, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="sglang_dsv4")
    world = copy.copy(shared[0])
    world.backend, world.runner, world.pool = (copy.copy(part) for part in (world.backend, world.runner, world.pool))
    world.backend.token_to_kv_pool = world.pool
    world.reset()
    REFUSALS[reason](world)
    world.attach(monkeypatch)
    assert prep_of(world.backend) is None
    assert [record.levelno for record in caplog.records if reason in record.getMessage()] == [logging.INFO]
    ran = []
    eager.init_forward_metadata(lambda *_: ran.append(1), world.backend, world.batch())
    assert ran == [1]


def test_a_builder_that_fails_names_the_way_out(shared, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("no such instruction")

    world, _ = shared
    world.reset()
    monkeypatch.setattr(attach.MetadataBuilder, "warm_up", fails)
    with pytest.raises(RuntimeError, match="no such instruction"):
        world.attach(monkeypatch, "auto")
    assert "DSV4_PREP=off" in caplog.text


@pytest.mark.parametrize("way", ["off", "auto"])
def test_the_hooks_are_registered_where_they_are_wanted(way, monkeypatch):
    monkeypatch.setenv("DSV4_PREP", way)
    monkeypatch.setattr(server, "installation", None)
    installation = install.install()
    assert any(hook.part == "prep" for hook in installation.hooks) is (way == "auto") and installation.missing() == []
