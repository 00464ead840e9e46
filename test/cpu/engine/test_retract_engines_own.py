"""What stays the engine's own: its other backups, its answers elsewhere, and all of a server that is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import torch
from retracting import is_503, outputs
from server_fixture import SPEC, Recorder, World, only_new

from sglang_dsv4.engine.standalone import PoolSpec

LAYOUTS = ["unknown", "HiSparse", "nine draft tokens"]


# ------------------------------------------------------------------------- 0.5.22 and later: the choice


@only_new
def test_backup_none_keeps_meaning_abort() -> None:
    world = World(backup="none")
    req = world.admit(300)
    assert world.retract(req) is False
    assert world.copy_of(req) is None and world.host is None
    reqs = outputs(world, (130, 257, 300))
    retracted, _, to_abort = world.retract_decode(reqs, chain([False], repeat(True)))
    assert (retracted, to_abort) == ([], reqs[:2])
    assert all(is_503(req.to_finish) for req in to_abort)


@only_new
def test_host_pool_is_the_engines_own() -> None:
    world = World(backup="host_pool")
    req = world.admit(300)
    assert world.retract(req) is True
    assert world.copy_of(req) is None and world.host is None
    world.requeue(req)
    assert world.rebootstrapped == [req]


@only_new
def test_the_prefill_servers_digest_is_not_compared_with_a_request_that_has_grown() -> None:
    """With --disaggregation-enable-kv-checksum 0.5.22 would abort each resume: decoding filled the last page."""
    world = World()
    copied, recomputed = world.admit(300), world.admit(130, "image", input_embeds=[[0.0]])
    copied.expected_kv_checksum = recomputed.expected_kv_checksum = 0xD16E57
    world.park(copied)
    world.save(recomputed)
    assert (copied.expected_kv_checksum, recomputed.expected_kv_checksum) == (0, 0xD16E57)


# ------------------------------------------------------------------------------ a server that is refused


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, hisparse=True), replace(SPEC, draft_tokens=9)], ids=LAYOUTS)
def test_a_request_of_a_refused_layout_is_computed_again(monkeypatch: pytest.MonkeyPatch, spec: PoolSpec) -> None:
    """0.5.17 has no such behaviour of its own: it raised, and the scheduler died."""
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
