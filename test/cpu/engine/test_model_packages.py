"""Model packages of experiments: the engine takes them; the drill's switch on the engine's real queue."""

from __future__ import annotations

from pathlib import Path

import pytest
import servers
from holding import switch
from server_fixture import World


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


@pytest.mark.parametrize("name", ["zeroing", "alternating", "holding"])
def test_the_engine_takes_the_model_of_an_experiment(monkeypatch, name):
    from sglang.srt.models.registry import import_model_classes

    found = servers.model_package(name)
    assert found["SGLANG_EXTERNAL_MODEL_PACKAGE"] == name
    assert found["PYTHONPATH"].split(":")[0] == str(Path(servers.__file__).resolve().parent)
    (model,) = import_model_classes(name, strict=True).values()
    assert model.__name__ == "DeepseekV4ForCausalLM"
    called = []
    monkeypatch.setattr(model.__mro__[1], "__init__", lambda self, *args: called.append(args))
    (cell,) = (cell for cell in model.__init__.__closure__ if cell.cell_contents.__name__ == "install")
    assert cell.cell_contents.__module__ == f"{name}.switch"
    monkeypatch.setattr(cell, "cell_contents", lambda: called.append("installed"))
    model("config")
    assert called == [("config",), "installed"]
