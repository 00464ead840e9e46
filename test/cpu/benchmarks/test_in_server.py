"""The parts of the benchmarks that run in a server, over the engine's own classes, and the figures made of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import torch
from plain_world import naive_pages, small_world
from server_fixture import World

from benchmarks import node_stall, plain_resume, resume, shapes, steps
from sglang_dsv4.livetest.hold_resumes import switch

# ---------------------------------------------------------------------- resumes


def test_a_load_is_noted_with_the_pass_that_admitted_it(installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    notes = installed(resume)
    world = World()
    req = world.admit(300)
    copy = world.park(req)
    nbytes, tokens = copy.nbytes, copy.tokens
    assert world.resume() == [req]
    (found,) = notes()
    assert (found["tokens"], found["bytes"]) == (tokens, nbytes)
    assert found["admitted"] > 1e9 and found["load_ms"] > 0


def test_a_retract_is_noted_with_its_parts_and_comes_back_right(installed):
    notes = installed(node_stall)
    world = World()
    oracle.fill(world.pool, seed=1)
    req = world.admit(700)
    expected = world.read(req)
    for _ in range(3):
        world.retract(req)
        world.requeue(req)
        assert world.resume() == [req]
    oracle.compare(expected, world.read(req))
    found = notes()
    assert [line["tokens"] for line in found] == [700] * 3
    assert all(line["save"] > 0 and line["load"] > 0 for line in found)
    assert {name for line in found for name in line} == {"tokens", "save", "order", "load"}, "settled within the load"


def test_the_bounds_of_a_retracts_own_time():
    def own_time(*saves):
        notes = [{"tokens": 700, "save": save, "settle": 0.1} for save in saves]
        return [bound["ok"] for bound in node_stall.judge(node_stall.summarise(notes, 700))]

    assert own_time(*[0.3] * 99, 3.0) == [True, True, True]
    assert own_time(*[0.3] * 98, 3.0, 3.0) == [True, True, False]
    assert own_time(0.95) == [False, False, False]
    assert node_stall.summarise([{"tokens": 700, "save": 1}, {"tokens": 800}], 701) == []


# A prompt of 100 tokens; the copy of 104 was made with 5 tokens generated, the sixth came 30 ms after the admission.
RESUME = {"tokens": 104, "admitted": 1000.0}
ARRIVED = {1: 999.0, 5: 1000.005, 6: 1000.030, 7: 1000.040, 9: 1002.000}


def test_a_wait_ends_with_the_first_token_that_was_not_there_before():
    assert resume.after_admission(RESUME, 100, ARRIVED) == pytest.approx(30.0, abs=0.01)
    assert math.isnan(resume.after_admission(RESUME, 100, {5: 1000.005})), "a resume that no token followed"
    returns = [{"admitted": 1000.0, "had": 5, "extend": 1}, {"admitted": 1000.5, "had": 7, "extend": 800},
               {"admitted": 1003.0, "had": 9, "extend": 0}]  # fmt: skip
    found = plain_resume.waits(returns, ARRIVED)
    assert found == {"restore": [pytest.approx(30, abs=0.01)], "recompute": [pytest.approx(1500, abs=0.01)]}


def test_ratios_are_of_the_median_recompute_and_judged_at_64k():
    row = {"tokens": 65536, "resumes": 4, "load_ms": 10.0, "to_token_ms": 50.0}
    (joined,) = resume.join([row], {65536: [2900.0, 9000.0, 3100.0]})
    assert (joined["recompute_ms"], joined["load_faster"], joined["to_token_faster"]) == (3100.0, 310.0, 62.0)
    assert all(entry["ok"] for entry in resume.judge([joined]))
    slow = resume.judge([joined | {"load_faster": 299.0, "to_token_faster": 49.0, "resumes": 2}])
    assert not any(entry["ok"] for entry in slow)


def test_a_restore_is_judged_at_the_lengths_that_have_a_bound():
    def row(tokens, faster):
        return {"tokens": tokens, "restores": 4, "recomputes": 4, "faster": faster}

    good = [row(512, 0.5), row(4096, 8.1), row(16384, 31), row(65536, 101)]
    assert [bound["ok"] for bound in plain_resume.judge(good)] == [True] * 9
    for worse in ({"faster": 7.9}, {"restores": 2}, {"recomputes": 0}):
        assert [bound["ok"] for bound in plain_resume.judge([good[1] | worse])].count(False) == 1
    assert plain_resume.worth_it_from([row(512, 1.2), row(768, 0.9), row(1024, 1.1), row(2048, 3)]) == 1024


PROMPT = 255  # the prefix tree holds no page of it


@pytest.fixture
def world(monkeypatch):
    """A plain server whose requests NAME@n are retracted once, with n tokens, where another one runs."""
    from sglang.srt.managers import scheduler as engine

    done = set()
    update = engine.Scheduler.update_running_batch

    def retracting(scheduler, batch, *args, **kwargs):
        named = [(req, req.rid.partition("@")[2]) for req in batch.reqs]
        due = {req.rid for req, at in named if at and len(req.output_ids) >= int(at) and not req.finished()} - done
        done.update(due)
        with pytest.MonkeyPatch.context() as patch:
            if due and len(batch.reqs) > 1:
                patch.setattr(engine, "TEST_RETRACT", True)
                patch.setattr(engine, "TEST_RETRACT_INTERVAL", 1)
            return update(scheduler, batch, *args, **kwargs)

    monkeypatch.setattr(engine.Scheduler, "update_running_batch", retracting)
    with naive_pages():
        yield small_world(overlap=True)


def pair(world):
    """A request that is to be retracted with ten tokens, beside one that began before."""
    keeper = world.submit(range(40), max_new=60, rid="keeper")
    for _ in range(6):
        world.step()
    return keeper, world.submit(range(PROMPT), max_new=25, rid="one@10")


def test_a_return_is_noted_and_every_other_one_is_a_prefill(world, installed):
    notes = installed(plain_resume)
    _, one = pair(world)
    other = world.submit(range(1000, 1000 + PROMPT), max_new=25, rid="other@14")
    world.run(check=False)
    assert [len(req.output_ids) for req in (one, other)] == [25, 25]
    assert [(line["had"], line["extend"]) for line in notes()] == [(10, 0), (14, PROMPT + 14)]


def test_a_held_request_waits_until_the_word_is_go(world, monkeypatch, tmp_path):
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

    word = tmp_path / "word"
    word.write_text(switch.HOLD)
    held = switch.holding_back(PrefillAdder.add_one_req, word, AddReqResult.OTHER)
    monkeypatch.setattr(PrefillAdder, "add_one_req", held)
    _, one = pair(world)
    for _ in range(40):
        world.step()
    assert one in world.waiting and world.pool.host.memory.copies == 1
    word.write_text(switch.GO)
    world.run(check=False)
    assert len(one.output_ids) == 25 and world.pool.host.memory.copies == 0


def test_the_last_request_is_aborted_and_the_others_come_back(world, monkeypatch, tmp_path):
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    word = tmp_path / "word"
    word.write_text(switch.LAST_FAILS)
    failing = switch.failing_the_last(ScheduleBatch.retract_decode, word)
    monkeypatch.setattr(ScheduleBatch, "retract_decode", failing)
    keeper, one = pair(world)
    world.run(check=False)
    assert word.read_text() == switch.GO
    assert len(one.output_ids) == 25 and len(keeper.output_ids) < 60
    assert "Out of memory" in keeper.to_finish.message
    assert world.pool.host.memory.copies == 0


def test_a_small_config_gets_the_cache_of_a_large_one(tmp_path):
    config = tmp_path / "small.json"
    config.write_text('{"compress_ratios": [0, 0, 4, 128], "num_hidden_layers": 4}')
    _, facts = shapes.write_model(config, tmp_path / "model", layers=7)
    assert (facts["compress_ratios"], facts["num_hidden_layers"]) == ([0, 0, 4, 128, 4, 128, 4], 7)


# ---------------------------------------------------------------------- steps

BLOCK = 6
ORDERS = ((True, False, False, True), (False, True, True, False))
ARGUMENTS = SimpleNamespace(batches=(1,), rounds=2, steps=32)


def test_the_hooks_of_an_eager_step_go_and_come_back():
    """Out means out: the engine's own function runs."""
    places = steps.places()
    try:
        for place in places:
            place.put(False)
            assert getattr(place.owner, place.name) is place.bare
            assert place.bare.__module__.startswith("sglang.srt.") and not hasattr(place.bare, "__wrapped__")
    finally:
        for place in places:
            place.put(True)
    with pytest.raises(RuntimeError, match="not hooked"):
        steps.Place(SimpleNamespace, "__init__")


class Other:
    """A place that remembers what was put there."""

    def put(self, hooked: bool) -> None:
        self.is_in = hooked


@pytest.mark.parametrize("other", [None, (2, "c", "d")])
def test_blocks_come_in_groups_with_each_side_as_early_as_the_other(tmp_path, other):
    """And a batch that changes begins a group anew."""
    place, ticks, prepared = Other(), itertools.count(step=10), 0
    toggling = steps.Toggling([place], BLOCK, 1, tmp_path / "notes", lambda: next(ticks))
    for key in [*[(2, "a", "b")] * (12 * 4 * BLOCK), other, *[(2, "a", "b")] * (4 * BLOCK + 1)]:
        toggling.step(key, prepared)
        prepared += place.is_in
    lines = steps.read(tmp_path / "notes")
    groups = {number: [line for line in lines if line["group"] == number] for number in {n["group"] for n in lines}}
    whole = [tuple(line["hooked"] for line in group) for group in groups.values() if len(group) == 4]
    assert len(whole) >= 12 and set(whole) == set(ORDERS), "neither is always first"
    for line in lines:
        assert line["ns"] == [10] * (BLOCK - steps.SETTLING) and line["prepared"] == BLOCK * line["hooked"]


def made_up(gain=1.0, groups=30, rounds=2, noise=0.02, prepared=(0, 32), drift=0.0):
    """Blocks of 10 steps of 1 ms; with the hooks ``gain`` times as fast; each block ``drift`` longer than the last."""
    draw = np.random.default_rng(3)
    found = []
    for round_, group in itertools.product(range(rounds), range(groups)):
        for place, hooked in enumerate(ORDERS[draw.integers(2)]):
            level = 1e6 * (1 + round_) * (1 + drift * (4 * group + place)) / (gain if hooked else 1)
            spans = level * (1 + noise * draw.standard_normal(10))
            found.append(steps.Block(round_, group, 1, hooked, prepared[hooked], tuple(int(s) for s in spans)))
    return found


@pytest.mark.parametrize("gain", [0.95, 1.02])
def test_the_interval_holds_the_gain_and_is_narrow(gain):
    row = steps.summarise(made_up(gain), [1])[0]
    assert row["low"] < gain < row["high"] and row["high"] - row["low"] < 0.01
    drifting = steps.summarise(made_up(gain, noise=0, drift=0.01), [1])[0]
    assert drifting["ratio"] == pytest.approx(gain, abs=1e-4), "what grows or slows with time cancels"


@pytest.mark.parametrize(
    ("blocks", "lost", "retracted", "missed"),
    [
        (made_up(1.01), 0, 0, []),
        (made_up(0.995), 0, 0, ["without / with"]),
        (made_up(0.97), 0, 0, ["without / with", "low end"]),
        (made_up(1.01, rounds=1), 0, 0, ["starts measured"]),
        (made_up(1.01)[:3], 0, 0, ["starts measured"]),
        (made_up(1.01), 1, 0, ["requests lost"]),
        (made_up(1.01), 0, 1, ["requests retracted"]),
        (made_up(1.01, prepared=(0, 0)), 0, 0, ["steps with the hooks, prepared here"]),
        (made_up(1.01, prepared=(1, 32)), 0, 0, ["steps without them, prepared here"]),
    ],
)
def test_each_fault_of_a_step_misses_its_bound(blocks, lost, retracted, missed):
    bounds = steps.judge(steps.summarise(blocks, [1]), lost, retracted, ARGUMENTS)
    names = [bound["name"] for bound in bounds if not bound["ok"]]
    assert len(names) == len(missed) and all(name.endswith(end) for name, end in zip(names, missed, strict=True)), names


def test_a_group_that_was_cut_off_does_not_count():
    blocks = made_up(groups=3, rounds=1)
    assert [len(found) for found in steps.whole_groups(blocks[:-1], 1).values()] == [2]
    assert steps.summarise([dataclasses.replace(block, batch=4) for block in blocks], [1]) == []
