"""No copy is made: the prefill server recomputes, or that one request is answered with 503; a refusal loses nobody."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from retracting import ONE_COPY, is_503, outputs, world_with
from server_fixture import SPEC, Recorder, World

from sglang_dsv4.engine import attach
from sglang_dsv4.engine.standalone import PoolSpec
from sglang_dsv4.errors import MustStop, RankNotHeard, VerifyMismatch

pytestmark = pytest.mark.both_layouts

FEW_BLOCKS = {"DSV4_HOST_GB": "0.002"}


@pytest.mark.parametrize("settings", (ONE_COPY, FEW_BLOCKS))
def test_without_room_the_prefill_server_recomputes(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]) -> None:
    world = world_with(monkeypatch, settings)
    first = world.admit(3 if settings is FEW_BLOCKS else 500, "first")
    copy = world.park(first)
    req = world.admit(1000, "second")
    tokens = req.output_ids.tolist()
    assert world.retract(req) in (None, True)
    assert world.copy_of(req) is None
    assert world.host.counters.fallbacks == {"HostMemoryExhausted": 1}
    world.requeue(req)
    assert world.rebootstrapped == [req] and req.pd_rebootstrap_in_progress is True
    assert [*req.output_ids, req.pd_rebootstrap_forced_output_id] == tokens
    assert world.queue.retracted_queue == [first] and not copy.released
    assert world.resume() == [first]
    world.nothing_held()
    world.park(world.admit(130, "third"))
    assert world.host.counters.fallbacks == {"HostMemoryExhausted": 1}


def test_a_copy_left_from_before_is_released_first(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with(monkeypatch, ONE_COPY)
    req = world.admit(300)
    world.save(req)
    old = world.copy_of(req)
    world.retract(req)
    assert old.released
    assert world.copy_of(req).tokens == 300
    assert world.host.memory.copies == 1
    assert not world.host.counters.fallbacks


@pytest.mark.parametrize("error", (RankNotHeard, VerifyMismatch))
def test_where_ranks_no_longer_agree_nothing_falls_back(error: type[MustStop]) -> None:
    world = World()
    req = world.admit(300)
    with mock.patch.object(world.host.memory, "allocate", side_effect=error("rank 1")), pytest.raises(error):
        world.retract(req)
    assert not world.host.counters.fallbacks


# --------------------------------------------------------------------------------------- retract_decode


def test_what_cannot_be_recomputed_is_answered_503(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_with(monkeypatch, ONE_COPY)
    reqs = outputs(world, (130, 257, 300, 310), r1={"multimodal": True})
    retracted, _, to_abort = world.retract_decode(reqs, chain([False, False], repeat(True)))
    assert (retracted, to_abort) == ([reqs[0], reqs[2]], [reqs[1]])
    assert [is_503(req.to_finish) for req in reqs] == [False, True, False, False]
    for req in retracted:
        world.requeue(req)
    assert (world.queue.retracted_queue, world.rebootstrapped) == ([reqs[0]], [reqs[2]])


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("choices", ["return_routed_experts", "return_indexer_topk"])
def test_a_request_that_returns_choices_is_computed_again(choices: str, recorded: bool) -> None:
    """The engine records them by cache slot: what lies at its new slots is another request's."""
    world = World(replace(SPEC, server_args={f"enable_{choices}": recorded}))
    req = world.admit(300)
    setattr(req, choices, True)
    world.retract(req)
    assert (world.copy_of(req) is None) is recorded
    assert world.host.counters.fallbacks == ({"ChoicesBySlot": 1} if recorded else {})
    world.requeue(req)
    assert world.rebootstrapped == ([req] if recorded else [])


@pytest.mark.parametrize("kind", ("multimodal", "fake"))
def test_with_room_nothing_is_aborted(kind: str) -> None:
    world = World()
    reqs = outputs(world, (130, 257, 300), r0={kind: True})
    retracted, _, to_abort = world.retract_decode(reqs, chain([False], repeat(True)))
    assert (retracted, to_abort) == (reqs[:2], [])
    assert [world.copy_of(req).tokens for req in retracted] == [130, 257]


def test_the_copy_of_the_last_aborted_request_is_released() -> None:
    world = World()
    reqs = outputs(world, (130, 257))
    retracted, _, to_abort = world.retract_decode(reqs, repeat(False))
    assert (retracted, to_abort) == (reqs[:1], reqs[1:])
    assert world.copy_of(reqs[1]) is None
    world.requeue(reqs[0])
    world.resume()
    world.nothing_held()


LAYOUTS = ["unknown", "HiSparse", "nine draft tokens"]


# ---------------------------------------------------------------------------------- the choice of a backup


def test_backup_none_keeps_meaning_abort() -> None:
    world = World(backup="none")
    req = world.admit(300)
    assert world.retract(req) is False
    assert world.copy_of(req) is None and world.host is None
    reqs = outputs(world, (130, 257, 300))
    retracted, _, to_abort = world.retract_decode(reqs, chain([False], repeat(True)))
    assert (retracted, to_abort) == ([], reqs[:2])
    assert all(is_503(req.to_finish) for req in to_abort)


def test_host_pool_is_the_engines_own() -> None:
    world = World(backup="host_pool")
    req = world.admit(300)
    assert world.retract(req) is True
    assert world.copy_of(req) is None and world.host is None
    world.requeue(req)
    assert world.rebootstrapped == [req]


def test_the_prefill_servers_digest_is_not_compared_with_a_request_that_has_grown() -> None:
    """With --disaggregation-enable-kv-checksum the engine would abort each resume: decoding filled the last page."""
    world = World()
    copied, recomputed = world.admit(300), world.admit(130, "image", input_embeds=[[0.0]])
    copied.expected_kv_checksum = recomputed.expected_kv_checksum = 0xD16E57
    world.park(copied)
    world.save(recomputed)
    assert (copied.expected_kv_checksum, recomputed.expected_kv_checksum) == (0, 0xD16E57)


# ------------------------------------------------------------------------------ a server that is refused


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, hisparse=True), replace(SPEC, draft_tokens=9)], ids=LAYOUTS)
def test_a_request_of_a_refused_layout_is_computed_again(monkeypatch: pytest.MonkeyPatch, spec: PoolSpec) -> None:
    """The engine's own behaviour follows."""
    world = World(spec, refuse="a layout from tomorrow" if spec is SPEC else None)
    assert world.host is None and world.pool.refusal
    waited = Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(synchronize=waited))
        world.save(world.admit(300))
    assert len(waited.calls) == 1, "for the forward in flight"
    reqs = outputs(world, (130, 257, 300, 310), r1={"multimodal": True})
    retracted, _, to_abort = world.retract_decode(reqs, chain([False, False], repeat(True)))
    assert (retracted, to_abort) == ([reqs[0], reqs[2]], [reqs[1]]) and is_503(reqs[1].to_finish)
    assert all(world.copy_of(req) is None for req in reqs)
    for req in retracted:
        world.requeue(req)
    assert world.rebootstrapped == retracted
    assert world.resume() == []
    world.abort("nobody")
    world.queue.release_memory_occupation()


def test_another_kind_of_pool_is_left_alone() -> None:
    pool = SimpleNamespace()
    attach.attach(pool, None)
    assert not vars(pool) and attach.host_of(SimpleNamespace(get_kvcache=lambda: pool)) is None
