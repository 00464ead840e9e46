"""The drill's switch on the engine's real queue: who waits keeps the copy, and comes back with every byte."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from engine.world import World

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from holding import switch

pytestmark = pytest.mark.cpu


def test_a_held_request_waits_with_its_copy_and_comes_back(monkeypatch, tmp_path):
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    word = tmp_path / "word"
    word.write_text(switch.HOLD)
    monkeypatch.setenv(switch.VARIABLE, str(word))
    monkeypatch.setattr(DecodePreallocQueue, "resume_retracted_reqs", DecodePreallocQueue.resume_retracted_reqs)
    switch.install()
    world = World()
    req = world.admit(300)
    before = world.read(req)
    copy = world.park(req)
    assert world.resume() == [] and not copy.released
    assert world.queue.retracted_queue == [req]
    word.write_text(switch.GO)
    assert world.resume() == [req] and world.read(req) == before
    world.nothing_held()
