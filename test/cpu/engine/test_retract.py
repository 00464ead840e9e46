"""A decode server's retract, end to end: each way to be away has one outcome, and a copy comes back exactly."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any
from unittest import mock

import oracle
import pytest
import torch
from pretended_device import Device
from server_fixture import (
    ON_0522,
    ONE_COPY,
    SPEC,
    V41,
    WEIGHT_SOURCES,
    Recorder,
    World,
    device_memory,
    is_503,
    outputs,
    update_weights,
    world_with,
)
from sglang.srt.managers.io_struct import FlushCacheReqInput
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs
from sglang.srt.managers.scheduler_components import flush_wrapper

from sglang_dsv4.engine import memory
from sglang_dsv4.engine.retract import choices
from sglang_dsv4.errors import MustStop, RankNotHeard, VerifyMismatch
from sglang_dsv4.testing.standalone import PoolSpec

LENGTHS = (3, 127, 130, 255, 256, 257, 512, 1000)  # at some, one token more would be in another block or page
CASES = {**{f"{n}": (SPEC, n) for n in LENGTHS}, **{f"v41-{n}": (V41, n) for n in (3, 130, 257, 1000)}}


@pytest.mark.both_layouts
@pytest.mark.parametrize("overlap", (False, True))
@pytest.mark.parametrize("case", CASES)
def test_a_request_comes_back_exactly(case: str, overlap: bool) -> None:
    """overlap: a forward is in flight, whose token the committed length counts, and which must not be saved."""
    spec, n = CASES[case]
    world = World(spec)
    world.admit(40, "neighbour")  # so that neither the first page nor the first slot is used
    req = world.admit(n, overlap=overlap)
    assert world.committed(req) == n + overlap
    assert bool({key for key in world.read(req) if key[0] == "c2_state"}) == (spec is V41 and n % 2 == 1)
    world.there_and_back(req, seed=n)
    assert world.host.counters.saves == world.host.counters.loads == 1


Change = Callable[[World], Any]


def trained(source: str, fail: bool = False, released: bool = False) -> Change:
    """A trainer's round: release everything perhaps, resume, write weights with a flush."""

    def change(world: World) -> None:
        if released:
            device_memory(world, "release_memory_occupation")
            device_memory(world, "resume_memory_occupation")
        assert update_weights(source, fail, world).success is not fail
        assert world.queue.retracted_queue, "the request waits as before"

    return change


def released(*tags: str) -> Change:
    def change(world: World) -> None:
        device_memory(world, "release_memory_occupation", *tags)
        if tags == ("kv_cache",):
            waiting = list(world.queue.retracted_queue)
            assert world.resume() == [] and world.queue.retracted_queue == waiting, "no memory to load it into"
        device_memory(world, "resume_memory_occupation", *tags)

    return change


AWAY: dict[str, Change] = {
    "nothing": lambda world: None,
    "flush": lambda world: world.scheduler.flush_cache(),
    "abort": lambda world: world.abort("away"),
    "released cache": released("kv_cache"),
    **{f"released {' '.join(tags) or 'all'}": released(*tags) for tags in ((), ("weights",), ("kv_cache", "weights"))},
    **{f"weights by {source}": trained(source) for source in WEIGHT_SOURCES},
    **{f"failed weights by {source}": trained(source, fail=True) for source in WEIGHT_SOURCES if source != "rdma"},
    "weights after a release": trained("disk", released=True),
}
UNFLUSHED = ("nothing", "abort", "released weights", "weights by rdma")
STALE = [name for name in AWAY if "weights" in name or name == "released all"]
BACK, AGAIN, ANSWERED, ABORTED = "back from its copy", "computed again", "answered with 503", "aborted"
CHOICES = ("routed_experts", "indexer_topk")  # which the copies of a pipeline do not have
OUTCOMES = [  # (what the retract left, whose request, what happens meanwhile, outcome, reason counted)
    *(("copy", kind, "nothing", BACK, None) for kind in ("text", "multimodal", "fake")),
    *(("copy", "text", away, BACK, None) for away in ("flush", "released cache")),
    *(("copy", "text", away, AGAIN, "StaleWeights") for away in STALE),
    ("copy", "multimodal", "weights by disk", ANSWERED, "StaleWeights"),
    ("copy", "fake", "weights by disk", AGAIN, "StaleWeights"),
    *((left, "text", "abort", ABORTED, why) for left, why in (("copy", None), ("none", "HostMemoryExhausted"))),
    ("wrong", "text", "abort", ABORTED, None),
    *(("none", "text", away, AGAIN, "HostMemoryExhausted") for away in ("nothing", "flush")),
    ("embeds", "text", "nothing", AGAIN, "InputEmbeds"),
    *((f"return_{choices}", "text", "nothing", AGAIN, "ChoicesBySlot") for choices in CHOICES),
    ("wrong", "text", "nothing", AGAIN, "WindowNotMapped"),
    ("wrong", "multimodal", "nothing", ANSWERED, "WindowNotMapped"),
]


def outcome(world: World, req: Any) -> str:
    """The request's; the next pass has just been over."""
    waits = req in world.queue.retracted_queue or req in world.queue.held_rebootstrap_reqs
    if req in world.rebootstrapped:
        assert not waits and req.pd_rebootstrap_in_progress is True
        return AGAIN
    if world.streamed == [req]:
        return ANSWERED if is_503(req.finished_reason) else ABORTED
    return ABORTED if "away" in world.aborted else "waits" if waits else BACK


@pytest.mark.parametrize(("left", "kind", "away", "wanted", "why"), OUTCOMES)
def test_each_way_to_be_away_has_its_outcome(
    monkeypatch: pytest.MonkeyPatch, left: str, kind: str, away: str, wanted: str, why: str | None
) -> None:
    kinds = {} if kind == "text" else {kind: True}
    spec = replace(SPEC, server_args={f"enable_{left}": True}) if left.startswith("return_") else SPEC
    monkeypatch.setattr(choices, "buffers", lambda scheduler: ())
    world = world_with(monkeypatch, ONE_COPY if left == "none" else {}, spec=spec)
    first = world.admit(100, "first")
    if left == "none":
        world.retract(first)  # the only copy is taken
    req = world.admit(300, "away", input_embeds=[[0.0]] if left == "embeds" else None, **kinds)
    tokens, device = req.output_ids.tolist(), None
    if left.startswith("return_"):
        setattr(req, left, True)
    if left == "wrong":  # its device says so only after the save has returned
        device = Device(monkeypatch)
        device.serve(world.host)
        world.pool.full_to_swa_index_mapping[world.slots(req)[250]] = 0
    oracle.fill(world.pool, seed=1)
    expected = world.read(req) if left == "copy" else None
    world.retract(req)
    copy = world.copy_of(req)
    assert (copy is not None) is (left in ("copy", "wrong"))
    if left == "none":
        world.queue.add(first, is_retracted=True)
    world.queue.add(req, is_retracted=True)
    flushes = world.flushes
    world.scheduler._engine_paused = True
    AWAY[away](world)
    if device is not None:
        device.finish()
    assert bool(flushes) is (away not in UNFLUSHED and "failed" not in away)
    world.scheduler._engine_paused = False
    oracle.fill(world.pool, seed=2)
    world.resume()
    assert outcome(world, req) == wanted
    assert dict(world.host.counters.fallbacks) == ({why: 1} if why else {})
    if wanted == BACK:
        oracle.compare(expected, world.read(req))
    elif copy is not None:
        assert copy.released and world.host.counters.loads == 0
    if wanted == AGAIN:
        assert world.copy_of(req) is None
        assert left == "embeds" or [*req.output_ids, req.pd_rebootstrap_forced_output_id] == tokens
    world.nothing_held()


@pytest.mark.parametrize("what", ["flush", "release"])
def test_running_requests_still_forbid_it(what: str) -> None:
    world = World()
    req = world.admit(300)
    copy = world.park(req)
    flushes = world.flushes
    world.scheduler.running_batch.is_empty = lambda: False
    if what == "flush":
        assert not world.scheduler.flush_cache()
    else:
        with pytest.raises(AssertionError, match="only when server is idle"):
            device_memory(world, "release_memory_occupation")
    assert world.queue.retracted_queue == [req] and not copy.released and not flushes


@pytest.mark.parametrize("waits", ["at once", "a little"])
def test_a_flush_with_a_time_limit(waits: str) -> None:
    """A trainer's, in a pause: a copy that waits holds it up as little as a flush without a limit."""
    world = World()
    req, scheduler = world.admit(300), world.scheduler
    copy, scheduler._engine_paused = world.park(req), True
    channels = SimpleNamespace(send_to_tokenizer=SimpleNamespace(send_output=Recorder()))
    wrapper = flush_wrapper.SchedulerFlushWrapper(
        flush_cache=scheduler.flush_cache, is_fully_idle=scheduler.is_fully_idle,
        **{"ipc_channels": channels} if ON_0522 else {"send_output": Recorder()},
    )  # fmt: skip
    if waits == "a little":
        scheduler.running_batch.is_empty = lambda: False
        assert wrapper.handle(FlushCacheReqInput(timeout_s=60.0)) is None
        wrapper.check_pending()
        assert not world.flushes
        scheduler.running_batch.is_empty = lambda: True
        wrapper.check_pending()
    else:
        assert wrapper.handle(FlushCacheReqInput(timeout_s=60.0)).success
    assert world.flushes == ["flushed"] and world.queue.retracted_queue == [req] and not copy.released
    assert wrapper.handle(FlushCacheReqInput(timeout_s=0.0)).success, "none is pending"


def test_a_failing_flush_loses_nobody() -> None:
    world = World()
    req = world.admit(300)
    world.park(req)
    world.scheduler.tree_cache = SimpleNamespace(reset=mock.Mock(side_effect=OSError("broken")))
    with pytest.raises(OSError, match="broken"):
        world.scheduler.flush_cache()
    assert world.queue.retracted_queue == [req]


def test_a_copy_left_from_before_is_released_first(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with(monkeypatch, ONE_COPY)
    req = world.admit(300)
    world.save(req)
    old = world.copy_of(req)
    world.retract(req)
    assert old.released and world.copy_of(req).tokens == 300
    assert world.host.memory.copies == 1 and not world.host.counters.fallbacks


@pytest.mark.parametrize("error", (RankNotHeard, VerifyMismatch))
def test_where_ranks_no_longer_agree_nothing_falls_back(error: type[MustStop]) -> None:
    world = World()
    req = world.admit(300)
    with mock.patch.object(world.host.memory, "allocate", side_effect=error("rank 1")), pytest.raises(error):
        world.retract(req)
    assert not world.host.counters.fallbacks


def test_a_request_that_the_queue_refuses_keeps_no_copy() -> None:
    world = World()
    req = world.admit(300)
    world.retract(req)
    world.queue.max_total_num_tokens = 10
    world.requeue(req)
    assert world.streamed == [req] and world.queue.retracted_queue == []
    world.nothing_held()


def test_the_prefill_servers_digest_is_not_compared_with_a_request_that_has_grown() -> None:
    """With --disaggregation-enable-kv-checksum the engine would abort each resume: decoding filled the last page."""
    world = World()
    copied, recomputed = world.admit(300), world.admit(130, "image", input_embeds=[[0.0]])
    copied.expected_kv_checksum = recomputed.expected_kv_checksum = 0xD16E57
    world.park(copied)
    world.save(recomputed)
    assert (copied.expected_kv_checksum, recomputed.expected_kv_checksum) == (0, 0xD16E57)


def retracted(world: World, reqs: list[Any], *fits: bool) -> tuple[list[Any], list[Any]]:
    """(retracted, aborted) by the engine's retract_decode; its memory checks answer ``fits`` and then True."""
    found, _, aborted = world.retract_decode(reqs, chain(fits, repeat(True)))
    assert all(is_503(req.to_finish) for req in aborted)
    return found, aborted


def test_the_engine_aborts_only_requests_that_nothing_brings_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with(monkeypatch, ONE_COPY)
    reqs = outputs(world, (255, 257, 300, 310), r1={"multimodal": True})
    assert retracted(world, reqs, False, False) == ([reqs[0], reqs[2]], [reqs[1]])
    for req in (reqs[0], reqs[2]):
        world.requeue(req)
    assert (world.queue.retracted_queue, world.rebootstrapped) == ([reqs[0]], [reqs[2]])


def test_a_request_of_v41_with_images_resumes_where_stock_aborts_it() -> None:
    world = World(V41)
    text, image, stays = outputs(world, (130, 257, 300))
    feature = torch.ones(4, 8)
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(3, 6)], feature=feature)
    image.multimodal_inputs = MultimodalInputs(mm_items=[item])
    oracle.fill(world.pool, seed=1)
    expected = world.read(image)
    assert retracted(world, [text, image, stays], False) == ([text, image], [])
    oracle.fill(world.pool, seed=2)
    for req in (text, image):
        world.requeue(req)
    assert world.resume() == [text, image]
    oracle.compare(expected, world.read(image))
    image.init_next_round_input(None)  # what the engine does with a request that joins the batch
    assert image.multimodal_inputs.mm_items[0].feature is feature
    assert list(image.full_untruncated_fill_ids) == [*image.origin_input_ids, *image.output_ids]
    world.nothing_held()


@pytest.mark.parametrize("backup", ["none", "host_pool"])
def test_another_backup_keeps_its_meaning(backup: str) -> None:
    world = World(backup=backup)
    req = world.admit(300)
    assert world.retract(req) is (backup == "host_pool")
    assert world.copy_of(req) is None and world.host is None
    if backup == "host_pool":
        world.requeue(req)
        assert world.rebootstrapped == [req]
    else:
        reqs = outputs(world, (130, 257, 300))
        assert retracted(world, reqs, False) == ([], reqs[:2])


REFUSED = {"unknown": SPEC, "HiSparse": replace(SPEC, hisparse=True), "drafts": replace(SPEC, draft_tokens=9),
           "canary": replace(SPEC, server_args={"kv_canary": "raise"})}  # fmt: skip


@pytest.mark.parametrize("layout", REFUSED)
def test_a_request_of_a_refused_layout_is_computed_again(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    spec: PoolSpec = REFUSED[layout]
    world = World(spec, refuse="a layout from tomorrow" if layout == "unknown" else None)
    assert world.host is None and world.pool.refusal
    waited = Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(synchronize=waited))
        world.save(world.admit(300))
    assert len(waited.calls) == 1, "for the forward in flight"
    reqs = outputs(world, (130, 257, 300, 310), r1={"multimodal": True})
    assert retracted(world, reqs, False, False) == ([reqs[0], reqs[2]], [reqs[1]])
    for req in (reqs[0], reqs[2]):
        world.requeue(req)
    assert world.rebootstrapped == [reqs[0], reqs[2]] and world.resume() == []
    world.abort("nobody")
    world.queue.release_memory_occupation()


def test_another_kind_of_pool_is_left_alone() -> None:
    pool = SimpleNamespace()
    memory.reserve_host_memory(pool, None)
    assert not vars(pool) and memory.host_of(SimpleNamespace(get_kvcache=lambda: pool)) is None
