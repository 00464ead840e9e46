"""What the plain benchmarks and drills put into a server, in the engine's own scheduler: retracts, notes, holds."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from plain_world import forget, naive_pages, run_to, small_world
from sglang.srt.managers import scheduler as engine
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from benchmarks.plain.noted_extends import deepseek_v4 as noted_extends
from benchmarks.plain.retract_at import deepseek_v4 as retract_at
from benchmarks.plain.timed_restores import deepseek_v4 as timed_restores
from sglang_dsv4.engine.plain import tree
from sglang_dsv4.livetest.hold_resumes import switch
from sglang_dsv4.miniature.forward import WrongRows
from sglang_dsv4.miniature.server import PAGE
from sglang_dsv4.pools.copy_service import CopyService
from sglang_dsv4.pools.token_to_kv import TokenToKVPool

PROMPT = 255  # the prefix tree holds no page of it


@pytest.fixture
def world(monkeypatch):
    """A plain server in which ``NAME@n`` is retracted at its nth token."""
    update = retract_at.retracting(engine.Scheduler.update_running_batch, engine)
    monkeypatch.setattr(engine.Scheduler, "update_running_batch", update)
    return small_world(overlap=True)


@pytest.fixture(autouse=True)
def _plain_pages():
    with naive_pages():
        yield


def pair(world):
    """A request that is to be retracted with ten tokens, beside one that began before."""
    keeper = world.submit(range(40), max_new=60, rid="keeper")
    for _ in range(6):
        world.step()
    return keeper, world.submit(range(PROMPT), max_new=25, rid="one@10")


def test_a_return_is_noted_and_every_other_one_is_a_prefill(world, monkeypatch, tmp_path):
    file = tmp_path / "returns"
    noting = timed_restores.noting(engine.Scheduler.get_new_batch_prefill, file)
    monkeypatch.setattr(engine.Scheduler, "get_new_batch_prefill", noting)
    monkeypatch.setattr(TokenToKVPool, "get_cpu_copy", timed_restores.every_other(TokenToKVPool.get_cpu_copy))
    _, one = pair(world)
    other = world.submit(range(1000, 1000 + PROMPT), max_new=25, rid="other@14")
    world.run(check=False)
    assert [len(req.output_ids) for req in (one, other)] == [25, 25]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["had"], line["extend"]) for line in lines] == [(10, 0), (14, PROMPT + 14)]


def test_a_named_request_is_retracted_once_and_restored(world):
    pair(world)
    retracted = 0
    for _ in range(100):
        world.step()
        retracted += any(req.rid == "one@10" for req in world.waiting)
        if not world.running and not world.waiting:
            break
    counters = world.pool.host.counters
    assert (retracted, counters.saves, counters.loads) == (1, 1, 1)


@pytest.mark.parametrize("sign", ["@", "!"])
def test_only_an_unrepaired_request_leaves_poison_to_the_tree(monkeypatch, sign):
    """It is retracted 100 tokens behind an edge: of the page before, the copy holds the last rows."""
    monkeypatch.setattr(CopyService, "load", retract_at.poisoning(CopyService.load))
    monkeypatch.setattr(tree, "_repair", retract_at.unless_told(tree._repair))
    world = small_world()
    one = world.submit(range(600), max_new=20, rid=f"one{sign}10")
    run_to(world, one, 612)
    world.retract(one)
    forget(world)
    world.step()
    first = int(world.pool.full_to_swa_index_mapping[world.slots(one, 300)[256]])
    page = world.pool.host.side.buffers["swa_kv"][0][first // PAGE]
    assert set(page[: 100 * 576].tolist()) == {retract_at.POISON}
    assert len(set(page[120 * 576 : 256 * 576].tolist())) > 9
    with pytest.raises(WrongRows) if sign == "!" else nullcontext():
        world.run()


def test_a_held_request_waits_until_the_word_is_go(world, monkeypatch, tmp_path):
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


def test_extends_of_mixed_batches_are_noted(monkeypatch, tmp_path):
    file = tmp_path / "notes"
    file.touch()
    world = small_world(overlap=True, mixed=True, chunk=512)
    run_batch = noted_extends.noting(lambda _, batch: batch, file)
    first = world.submit(range(254), max_new=8)
    for _ in range(3):
        world.step()
    world.submit(range(2000, 2900), max_new=1)
    for _ in range(4):
        batch = world.step()
        if batch is not None:
            run_batch(None, batch)
    prefixes = [prefix for line in file.read_text().splitlines() for prefix in json.loads(line)]
    assert len(first.output_ids) and {255, 256, 257} & set(prefixes)
