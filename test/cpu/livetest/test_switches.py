"""The engine takes each experiment that live tests and benchmarks put into a server, and each switch does its word."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import hold_resumes as holding
import oracle
import pytest
import torch
from pool_fixture import make_world
from server_fixture import SPEC, World

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Group
from sglang_dsv4.livetest import in_server, zeroing
from sglang_dsv4.livetest.zeroing import OFF
from sglang_dsv4.pools.copy_service import CopyService

FAMILIES = tuple(family.name for family in families(Geometry((0, 4, 128))))
FAMILIES_OF_A_POINT = {f.name for f in families(Geometry((0, 4, 128))) if f.group is not Group.REQUEST}
TOKENS = 389  # two pages, an open block of 4 and an open block of 128


def test_a_held_request_waits_with_its_copy_and_comes_back(monkeypatch, tmp_path):
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder

    word, _ = holding.new_switch(tmp_path / "logs")
    assert word.read_text() == holding.GO
    word.write_text(f"{holding.HOLD}\n")
    for owner, name in ((DecodePreallocQueue, "resume_retracted_reqs"), (PrefillAdder, "add_one_req"),
                        (ScheduleBatch, "retract_decode")):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))  # as it was, afterwards
    holding.install(word)
    world = World()
    req = world.admit(300)
    before = world.read(req)
    copy = world.park(req)
    assert world.resume() == [] and not copy.released
    assert world.queue.retracted_queue == [req]
    word.write_text(f"{holding.GO}\n")
    assert world.resume() == [req] and world.read(req) == before
    world.nothing_held()
    word.unlink()
    assert world.resume() == [], "no file is read where nobody waits"


@pytest.fixture(scope="module")
def world():
    return make_world(verify=True, pages=8)


def rows_after(world, monkeypatch, tmp_path, word: str) -> tuple[dict, dict]:
    """Rows of a request before it leaves and after it came back to poisoned pages under ``word``."""
    file = tmp_path / "word"
    file.write_text(f"{word}\n")
    monkeypatch.setattr(CopyService, "_load", CopyService._load)  # as it was, afterwards
    zeroing.install(file)
    oracle.fill(world.pool, seed=5)
    request = world.start(1, TOKENS)
    before = world.read(request)
    copy = world.save(request)
    world.leave(request)
    oracle.poison(world.pool)
    back = world.resume(copy, 2)
    after = world.read(back)
    world.leave(back)
    world.check_empty()
    return before, after


@pytest.mark.parametrize("family", FAMILIES)
def test_one_family_is_zero_and_every_other_exact(world, monkeypatch, tmp_path, family):
    before, after = rows_after(world, monkeypatch, tmp_path, family)
    assert {key[0] for key in before} == set(FAMILIES)
    for key, saved in before.items():
        assert after[key] == (bytes(len(saved)) if key[0] == family else saved), key
        assert any(saved), f"{key} was zero before: nothing is shown"


def test_without_a_family_a_load_is_exact(world, monkeypatch, tmp_path):
    oracle.compare(*rows_after(world, monkeypatch, tmp_path, OFF))


@pytest.mark.parametrize("word", [zeroing.CHOICES, OFF])
def test_recorded_choices_alone_are_zero(monkeypatch, tmp_path, word):
    file = tmp_path / "word"
    file.write_text(word)
    monkeypatch.setattr(CopyService, "_load", CopyService._load)
    zeroing.install(file)
    world = World(replace(SPEC, server_args={"enable_return_routed_experts": True}))
    (recorded,) = world.choices.buffers
    req = world.admit(TOKENS)
    oracle.fill(world.pool, seed=7)
    before, old = world.read(req), recorded.random_(1, 200)[world.slots(req)].clone()
    world.park(req)
    recorded.fill_(7)
    assert world.resume() == [req] and world.read(req) == before
    assert torch.equal(recorded[world.slots(req)], old if word == OFF else torch.zeros_like(old))


@pytest.mark.parametrize("family", ["c4_kv", "swa_kv", OFF])
def test_a_session_loses_the_family_too(world, monkeypatch, tmp_path, family):
    """Its point's pages and window are loaded by another way; both end in the same load."""
    host, swa_map = world.pool.host, world.pool.full_to_swa_index_mapping
    oracle.fill(world.pool, seed=6)
    request = world.start(1, 512)
    before = {key: value for key, value in world.read(request).items() if key[0] in FAMILIES_OF_A_POINT}
    copy = host.save_point(request.slots[:512].to(torch.int32), swa_map, 0)
    file = tmp_path / "word"
    file.write_text(family)
    monkeypatch.setattr(CopyService, "_load", CopyService._load)
    zeroing.install(file)
    host.load_point(copy.pages(0), copy.tail_units, request.slots[:512].to(torch.int32), swa_map, 0, copy.checksums)
    after = world.read(request)
    copy.release()
    world.leave(request)
    world.check_empty()
    for key, saved in before.items():
        assert after[key] == (bytes(len(saved)) if key[0] == family else saved), key


@pytest.mark.parametrize(
    "name",
    ["sglang_dsv4.livetest.zeroing", "hold_resumes", "benchmarks.resume", "benchmarks.stall", "benchmarks.steps"],
)
def test_the_engine_takes_the_model_and_it_calls_the_function_with_the_file(monkeypatch, tmp_path, name):
    from sglang.srt.models.registry import import_model_classes

    file, called = tmp_path / "logs" / "file", []
    for variable, value in in_server.environment(f"{name}:install", file, "word").items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(f"{name}.install", called.append)
    package = os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"]
    monkeypatch.delitem(sys.modules, f"{package}.deepseek_v4", raising=False)
    import_model_classes.cache_clear()  # as in a new process
    (model,) = import_model_classes(package, strict=True).values()
    assert model.__name__ == "DeepseekV4ForCausalLM"
    monkeypatch.setattr(model.__mro__[1], "__init__", lambda self, *args: called.append(args))
    model("config")
    assert called == [("config",), file] and file.read_text() == "word"


def test_a_module_that_is_not_installed_is_on_the_servers_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert holding.new_switch(tmp_path)[1]["PYTHONPATH"] == f"{Path(holding.__file__).parent}{os.pathsep}/mine"
    assert "PYTHONPATH" not in zeroing.switched_by(tmp_path / "word")
