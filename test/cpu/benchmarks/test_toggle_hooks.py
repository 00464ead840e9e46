"""The hooks of a decode step, taken out of a server and put back: the real classes, the blocks, the step counter."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest

from benchmarks.steps import hooks
from benchmarks.steps.toggle_hooks import switch
from sglang_dsv4.engine import landed

BLOCK = 6


OWNERS = {
    "DecodePreallocQueue": "sglang.srt.disaggregation.decode",
    "EagerRunner": "sglang.srt.model_executor.runner.eager_runner",
    "DeepseekV4AttnBackend": "sglang.srt.layers.attention.deepseek_v4_backend",
    "Scheduler": "sglang.srt.managers.scheduler",
}


def in_place(name: str, place: switch.Place) -> bool:
    """Whether the engine's class runs our hook."""
    owner, method = name.split(".")
    return landed.runs(getattr(landed._resolve(f"{OWNERS[owner]}.{owner}"), method), place.ours)


@pytest.fixture
def places(monkeypatch):
    monkeypatch.setenv("DSV4_PREP", "auto")
    found = switch.places()
    yield found
    for place in found.values():
        place.put(True)


def test_every_hook_of_a_step_goes_and_comes_back(places, monkeypatch):
    assert set(places) == set(switch.OF_A_STEP)
    assert set(hooks.EACH_STEP) < set(places), "those of a step with a graph are among them"
    for name, place in places.items():
        assert in_place(name, place) and place.is_in
        place.put(False)
        assert not in_place(name, place) and not place.is_in, name
        assert getattr(place.owner, place.name).__module__.startswith("sglang.srt.")
        place.put(True)
        assert in_place(name, place)
    monkeypatch.setenv("DSV4_PREP", "engine")
    monkeypatch.setenv("DSV4_PLAIN", "off")
    assert set(switch.places()) == set(hooks.EACH_STEP)


class Other:
    """A place that remembers what was put there."""

    is_in, stuck = True, False

    def put(self, hooked: bool) -> None:
        self.is_in = hooked and not self.stuck


def run(tmp_path, keys) -> tuple[list[dict], list[bool]]:
    """What ``keys``, one a step, write; whether each step had the hooks."""
    ticks = itertools.count(step=10)
    other = Other()
    out = tmp_path / "blocks"
    out.write_text("")
    found = switch.Toggling([other], BLOCK, out, 1, lambda: next(ticks))
    hooked = []
    prepared = 0
    for key in keys:
        found.step(key, prepared)
        hooked.append(other.is_in)
        prepared += other.is_in
    return [json.loads(line) for line in out.read_text().splitlines()], hooked


def test_blocks_come_in_groups_with_each_side_as_early_as_the_other(tmp_path):
    lines, hooked = run(tmp_path, [(2, "a", "b")] * (12 * 4 * BLOCK + 1))
    assert len(lines) == 48
    kinds = set()
    for group in range(12):
        sides = [line["hooked"] for line in lines if line["group"] == group]
        kinds.add(tuple(sides))
        assert sides == [hooked[(4 * group + n) * BLOCK] for n in range(4)]
    assert kinds == {(True, False, False, True), (False, True, True, False)}, "neither is always first"
    for line in lines:
        assert line["ns"] == [10] * (BLOCK - switch.SETTLING)
        assert line["prepared"] == BLOCK * line["hooked"] and line["batch"] == 2 and line["as_meant"]


def test_a_hook_that_does_not_move_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(Other, "stuck", True)
    lines, _ = run(tmp_path, [(2, "a", "b")] * (4 * BLOCK + 1))
    assert [line["as_meant"] for line in lines] == [not line["hooked"] for line in lines]


@pytest.mark.parametrize("other", [None, (2, "c", "d")])
def test_a_batch_that_changes_begins_a_group_anew(tmp_path, other):
    same = [(2, "a", "b")] * (BLOCK + 2)
    lines, _ = run(tmp_path, [*same, other, *same])
    assert [line["group"] for line in lines] == [0, 2]
    assert all(line["ns"] == [10] * (BLOCK - switch.SETTLING) for line in lines)


def test_steps_are_counted_and_run():
    calls, seen = [], []
    backend = SimpleNamespace()
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend)))
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(rid=name) for name in "abc"], forward_mode=SimpleNamespace(is_decode=lambda: True)
    )
    counted = switch.counting(
        lambda *args, **more: calls.append((args, more)),
        SimpleNamespace(step=lambda key, prepared: seen.append((key, prepared))),
    )
    counted(scheduler, batch, 1, more=2)
    backend.dsv4_prep = SimpleNamespace(counts=SimpleNamespace(overlapped=3, inline=1))
    batch.forward_mode = SimpleNamespace(is_decode=lambda: False)
    counted(scheduler, batch)
    assert seen == [((3, "a", "c"), 0), (None, 4)]
    assert calls == [((scheduler, batch, 1), {"more": 2}), ((scheduler, batch), {})]
