"""The switch that zeroes one cache family before a load, the retract of a request that runs alone, and the verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import oracle
import pytest
from worlds import make_world

from sglang_dsv4.engine import landed
from sglang_dsv4.transfer.mover import Mover

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import stress_retract as stress
import zero_family as script
from zeroing import switch

pytestmark = pytest.mark.cpu
TOKENS = 389  # two pages, an open block of 4 and an open block of 128


@pytest.fixture
def say(tmp_path, monkeypatch):
    """Write a word into the switch's file."""
    file = tmp_path / "word"
    monkeypatch.setenv(switch.VARIABLE, str(file))

    def write(word: str) -> None:
        file.write_text(f"{word}\n")

    write(switch.OFF)
    return write


@pytest.fixture(scope="module")
def world():
    return make_world(verify=True, pages=8)


def rows_after(world, say, monkeypatch, word: str) -> tuple[dict, dict]:
    """Rows of a request before it leaves and after it came back to poisoned pages under ``word``."""
    monkeypatch.setattr(Mover, "load", switch.zeroing(Mover.load))
    oracle.fill(world.pool, seed=5)
    request = world.start(1, TOKENS)
    before = world.read(request)
    copy = world.save(request)
    world.leave(request)
    oracle.poison(world.pool)
    say(word)
    back = world.resume(copy, 2)
    after = world.read(back)
    world.leave(back)
    world.check_empty()
    return before, after


@pytest.mark.parametrize("family", script.FAMILIES)
def test_one_family_is_zero_and_every_other_exact(world, say, monkeypatch, family):
    before, after = rows_after(world, say, monkeypatch, family)
    assert {key[0] for key in before} == set(script.FAMILIES)
    for key, saved in before.items():
        wanted = bytes(len(saved)) if key[0] == family else saved
        assert after[key] == wanted, key
        assert any(saved), f"{key} was zero before: nothing is shown"


@pytest.mark.parametrize("word", [switch.NONE, switch.OFF])
def test_without_a_family_a_load_is_exact(world, say, monkeypatch, word):
    before, after = rows_after(world, say, monkeypatch, word)
    oracle.compare(before, after)


def test_an_unknown_family_is_refused_by_name(world, say):
    request = world.start(1, 5)
    copy = world.save(request)
    with pytest.raises(ValueError, match="c4_nothing"):
        switch.zero(copy, "c4_nothing")
    copy.release()
    world.leave(request)


class Batch:
    """A running batch; the engine's retract keeps at least one request."""

    def __init__(self, *rids: str) -> None:
        self.reqs = [SimpleNamespace(rid=rid, output_ids=[7]) for rid in rids]
        self.released: list[tuple[str, int, tuple]] = []

    def retract_decode(self, *arguments):
        return ["the engine's choice"], 0.5, []

    def release_req(self, index, left, *arguments):
        self.released.append((self.reqs[index].rid, left, arguments))
        return True

    def filter_batch(self, keep_indices):
        self.reqs = [self.reqs[i] for i in keep_indices]


def test_a_request_alone_is_retracted_once_for_each_token(say):
    retract = switch.retracting_the_last(Batch.retract_decode)
    say(switch.NONE)
    batch = Batch("a")
    (req,) = batch.reqs
    assert retract(batch, "arguments") == ([req], 1.0, []) and batch.reqs == []
    assert batch.released == [("a", 0, ("arguments",))]
    batch.reqs = [req]
    assert retract(batch, "arguments")[0] == ["the engine's choice"] and batch.reqs == [req]
    req.output_ids.append(8)
    assert retract(batch)[0] == [req] and len(batch.released) == 2


def test_requests_that_run_together_are_the_engines_business(say):
    retract = switch.retracting_the_last(Batch.retract_decode)
    say(switch.NONE)
    batch = Batch("a", "b")
    assert retract(batch) == (["the engine's choice"], 0.5, []) and batch.released == []
    say(switch.OFF)
    alone = Batch("a")
    assert retract(alone)[0] == ["the engine's choice"] and len(alone.reqs) == 1


def test_the_switch_leaves_the_hooks_in_place(monkeypatch, say):
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    monkeypatch.setattr(Mover, "load", Mover.load)
    monkeypatch.setattr(ScheduleBatch, "retract_decode", ScheduleBatch.retract_decode)
    switch.install()
    assert landed._landings[-1].missing() == []
    assert hasattr(Mover.load, "__wrapped__") and hasattr(ScheduleBatch.retract_decode, "__wrapped__")


def test_the_model_package_holds_the_engines_name():
    from zeroing import deepseek_v4

    from sglang_dsv4.models.deepseek_v4 import DeepseekV4ForCausalLM

    (entry,) = deepseek_v4.EntryClass
    assert entry.__name__ == DeepseekV4ForCausalLM.__name__ and issubclass(entry, DeepseekV4ForCausalLM)


def test_loads_and_zeroed_bytes_are_counted():
    loaded = "loaded 700 tokens, 1.9 MB in 3.00 ms; copies alive 1, 0.30 of 1.00 GiB held\n"
    log = f"[t] zeroed 512 bytes of c4_kv\n[t] {loaded}[t] zeroed 256 bytes of c4_kv\n[t] {loaded}"
    assert script.events(log, "c4_kv") == {"loads": 2, "zeroed": 2, "zeroed_bytes": 768}
    assert script.events(log, "c4_state") == {"loads": 2, "zeroed": 0, "zeroed_bytes": 0}


def found() -> dict[str, dict]:
    """Runs as they must be: two requests of four tokens, one changed by each family."""
    runs = {}
    for name in (script.CONTROL, "control again", switch.NONE, *script.FAMILIES):
        tokens = [[1, 2, 3, 4], [5, 6, 7, 8]]
        family = name in script.FAMILIES
        if family:
            tokens[1] = [5, 6, 0, 8]
        loads = 0 if "control" in name else 6
        answers = [stress.Answer("finished", row) for row in tokens]
        zeroed = 6 if family else 0
        runs[name] = {"answers": answers, "loads": loads, "zeroed": zeroed, "zeroed_bytes": zeroed, "seconds": 1.0}
    return runs


def missed(runs: dict[str, dict], trouble: list[str] | None = None) -> list[str]:
    return [bound["name"] for bound in script.judge(script.compared(runs), trouble or []) if not bound["ok"]]


def test_a_good_experiment_is_good_and_tells_where_tokens_part():
    runs = found()
    assert missed(runs) == []
    rows = {row["run"]: row for row in script.compared(runs)}
    assert rows["swa_kv"]["first_other_token"] == [None, 2] and rows["swa_kv"]["changed"] == 1
    assert rows[switch.NONE]["first_other_token"] == [None, None] and rows[switch.NONE]["changed"] == 0


def change_tokens(run):
    run["answers"][0].tokens[1] = 99


def same_tokens(run):
    run["answers"][1].tokens[2] = 7


def lose(run):
    run["answers"][0].outcome = "lost"


@pytest.mark.parametrize(
    ("name", "fault", "miss"),
    [
        ("control again", change_tokens, ["requests changed in the control's repetition"]),
        (switch.NONE, change_tokens, ["requests changed by exact loads"]),
        (switch.NONE, lambda run: run.update(loads=0), ["retracts with exact loads"]),
        (script.CONTROL, lambda run: run.update(loads=1), ["retracts in the control"]),
        ("c128_state", same_tokens, ["requests changed by zeroing c128_state"]),
        ("c4_indexer", lambda run: run.update(zeroed=5), ["loads without zeroed c4_indexer"]),
        (
            "swa_kv",
            lambda run: run.update(zeroed=0),
            ["loads of zeroed swa_kv", "loads without zeroed swa_kv"],
        ),
        ("c4_state", lose, ["requests lost in the other runs"]),
    ],
)
def test_each_fault_misses_its_bound(name, fault, miss):
    runs = found()
    fault(runs[name])
    assert missed(runs) == miss


def test_trouble_in_the_log_misses_its_bound():
    assert missed(found(), ["VerifyMismatch"]) == ["trouble in the log"]


def test_the_requests_outgrow_the_indexers_choice_and_close_a_block():
    arguments = script.parse(["--model-path", "m", "--", "--tp", "1"])
    load = script.load_of(arguments)
    assert arguments.server == ["--tp", "1"] and arguments.concurrency == 1
    assert [len(prompt) for prompt in load.prompts] == arguments.prompt and min(arguments.prompt) > 4 * 512
    for prompt, new in zip(load.prompts, load.new_tokens, strict=True):
        assert len(prompt) // 128 < (len(prompt) + new) // 128
    assert script.load_of(arguments) == load
