"""What the stall benchmark puts into a server: every other retract waits, and each is noted with its parts."""

from __future__ import annotations

import json
from typing import Any

import oracle
import pytest
from pretended_device import Device
from server_fixture import World

from benchmarks.shapes import write_model
from benchmarks.stall import run
from benchmarks.stall.timed_retracts import switch


class Clock:
    """One millisecond a look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """The lines so far, and the retracts that write them; the engine and the hooks are as before afterwards."""
    from sglang.srt.managers.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "run_batch", lambda *given: "launched")
    file = tmp_path / "notes"

    def put(owner: Any, name: str, hook: Any) -> None:
        monkeypatch.setattr(owner, name, switch.wrapped(getattr(owner, name), hook))

    switch.install(switch.Retracts(file, Clock()), put)
    return lambda: [json.loads(line) for line in file.read_text().splitlines()]


def test_every_other_retract_waits_and_both_come_back_right(notes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    world = World()
    device = Device(monkeypatch)
    device.serve(world.host)
    oracle.fill(world.pool, seed=1)
    req = world.admit(700)
    expected, over = world.read(req), []
    for _ in range(4):
        assert Scheduler.run_batch(None) == "launched"
        world.retract(req)
        over.append(world.copy_of(req).lease.used_by.query())
        world.requeue(req)
        Scheduler.run_batch(None)
        assert world.resume() == [req]
    oracle.compare(expected, world.read(req))
    found = notes()
    assert over == [note["waits"] for note in found] == [False, True, False, True]
    for note in found:
        assert note["tokens"] == 700
        assert {"save", "locate", "enqueue", "settle", "load", "gap", "step"} <= set(note)
        assert ({"copy", "forward"} <= set(note)) is note["waits"]
        assert note["save"] > note["locate"] + note["enqueue"] + note.get("copy", 0)


def test_the_summary_of_both_ways() -> None:
    def note(waits: bool, save: float) -> dict[str, Any]:
        return {"waits": waits, "tokens": 65_000, "save": save, "settle": 0.05, "locate": 0.01, "step": None}

    rows = run.summarise([*(note(True, 20 + i) for i in range(25)), *(note(False, 0.3) for _ in range(24))], 60_000)
    waits, after = rows
    assert (waits["retracts"], after["retracts"]) == (25, 24)
    assert after["own_ms"] == after["own_ms_99"] == pytest.approx(0.35)
    assert waits["histogram"]["< 50"] == 25 and after["histogram"]["< 0.5"] == 24
    assert all(bound["ok"] for bound in run.judge(rows))
    assert "| < 0.5 | 0 | 24 |" in run.table(rows)
    late = run.summarise([note(False, 0.3)] * 98 + [note(False, 3)] * 2, 60_000)
    assert [bound["ok"] for bound in run.judge(late)] == [False, True, True, False]
    assert not run.summarise([note(False, 0.3)], 65_536) and run.table([]) == ["no retract was seen"]


def test_a_small_config_gets_the_cache_of_a_large_one(tmp_path: Any) -> None:
    config = tmp_path / "small.json"
    config.write_text(json.dumps({"compress_ratios": [0, 0, 4, 128], "num_hidden_layers": 4, "vocab_size": 9}))
    folder, facts = write_model(config, tmp_path / "model", layers=7)
    assert facts == json.loads((folder / "config.json").read_text())
    assert facts["compress_ratios"] == [0, 0, 4, 128, 4, 128, 4]
    assert (facts["num_hidden_layers"], facts["vocab_size"]) == (7, 9)
