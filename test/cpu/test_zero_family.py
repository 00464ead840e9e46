"""The switch that zeroes one cache family before a load, the retract of a request that runs alone, the questions to
servers (fake ones), and the verdict.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import oracle
import pytest
import zero_answers as answers
import zero_family as script
import zero_verdict as verdict
from fake_http import Handler, running
from pool_fixture import make_world
from sglang_dsv4.transfer.mover import Mover
from zeroing import switch

from sglang_dsv4.engine import landed

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


@pytest.mark.parametrize("family", verdict.FAMILIES)
def test_one_family_is_zero_and_every_other_exact(world, say, monkeypatch, family):
    before, after = rows_after(world, say, monkeypatch, family)
    assert {key[0] for key in before} == set(verdict.FAMILIES)
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
    assert verdict.events(log, "c4_kv") == {"loads": 2, "zeroed": 2, "zeroed_bytes": 768}
    assert verdict.events(log, "c4_state") == {"loads": 2, "zeroed": 0, "zeroed_bytes": 0}


CHOICES = {5: -1.0, 6: -2.0, 7: -3.0}


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        (CHOICES, 0.0),
        ({5: -1.0, 6: -2.25, 7: -3.0}, 0.25),
        ({5: -0.5, 6: -2.0, 7: -3.25}, 0.5),
        ({6: -2.0, 7: -3.0, 8: -3.5}, 2.5),  # 5 is there at most as likely as 8
        ({5: -1.0, 6: -2.0, 9: -2.5}, 0.0),  # 7 may be as likely as it was
    ],
)
def test_the_distance_is_the_largest_that_is_certain(other, wanted):
    assert answers.distance(CHOICES, other) == pytest.approx(wanted)


def test_only_requests_answered_in_both_runs_are_compared():
    def given(*values: float | None) -> list[answers.Answer | None]:
        return [None if value is None else answers.Answer(3, {5: value}) for value in values]

    row = verdict.compared(given(-1, -1, None, -1), given(-1, -1.5, -9, None))
    assert row == {
        "requests": 4, "answered": 2, "other_first_token": 0, "changed": 1, "median": 0.25, "largest": 0.5,
    }  # fmt: skip
    assert verdict.compared(given(None), given(-1.0))["median"] == -1
    other = [answers.Answer(4, {5: -1.0})]
    assert verdict.compared(given(-1), other)["other_first_token"] == 1


class Fakes:
    """A prefill and a decode server, which answers as one that reads the switch, and logs as one."""

    def __init__(self, word: Path, log: Path) -> None:
        self.asked: dict[str, list[dict]] = {"prefill": [], "decode": []}
        self.shift = dict.fromkeys(verdict.FAMILIES, 0.5)
        self.delay = 0.0
        self.broken: dict | None = None
        self.word, self.log = word, log
        self.running = contextlib.ExitStack()
        self.url = {role: self.running.enter_context(running(self._handler(role))) for role in self.asked}

    def _handler(self, role: str) -> type[Handler]:
        fakes = self

        class Answers(Handler):
            def do_POST(self):
                body = self.body()
                fakes.asked[role].append(body)
                answer = json.dumps(fakes.answer(body) if role == "decode" else {}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # a client that waited no longer
                    self.wfile.write(answer)

        return Answers

    def answer(self, body: dict) -> dict:
        time.sleep(self.delay)
        word = self.word.read_text()
        with self.log.open("a") as log:
            if word in verdict.FAMILIES:
                log.write(f"zeroed 64 bytes of {word}\n")
            if word != switch.OFF:
                log.write("loaded 9 tokens, 1.9 MB in 3.00 ms; copies alive 1, 0.30 of 1.00 GiB held\n")
        shift = self.shift.get(word, 0.0)
        second = [[-1.0 - rank - shift, 100 + rank, None] for rank in range(answers.TOP)]
        meta = {"output_top_logprobs": [[[0.0, 1, None]] * answers.TOP, second]}
        return self.broken or {"output_ids": [11, 100], "meta_info": meta}

    def close(self) -> None:
        self.running.close()


@pytest.fixture
def fakes(tmp_path):
    word, log = tmp_path / "word", tmp_path / "decode.log"
    word.write_text(switch.OFF)
    log.touch()
    made = Fakes(word, log)
    yield made
    made.close()


def ask(fakes: Fakes, *options: str) -> list[dict]:
    arguments = script.parse(["--model-path", "m", "--short", "383", "511", "--long", "2175", *options])
    return script.ask_all(arguments, fakes.url["prefill"], fakes.url["decode"], fakes.word, fakes.log)


def missed(rows: list[dict], trouble: list[str] | None = None) -> list[str]:
    return [bound["name"] for bound in verdict.judge(rows, trouble or []) if not bound["ok"]]


def test_the_whole_experiment_on_fake_servers(fakes):
    rows = ask(fakes)
    assert missed(rows) == []
    assert {(row["set"], row["run"]) for row in rows} == {
        (kind, run) for kind in verdict.RUNS for run in verdict.RUNS[kind]
    }
    by_run = {(row["set"], row["run"]): row for row in rows}
    zeroed = by_run["short", "swa_kv"]
    assert zeroed["median"] == zeroed["largest"] == pytest.approx(0.5)
    assert (zeroed["changed"], zeroed["loads"], zeroed["zeroed"], zeroed["zeroed_bytes"]) == (2, 2, 2, 128)
    assert by_run["long", switch.NONE]["loads"] == 1 and by_run["long", switch.NONE]["largest"] == 0


def test_what_is_asked(fakes):
    ask(fakes)
    prefill, decode = fakes.asked["prefill"], fakes.asked["decode"]
    rooms = [body["bootstrap_room"] for body in decode]
    assert len(set(rooms)) == len(rooms) == len(prefill) and rooms == [body["bootstrap_room"] for body in prefill]
    prompts = {}
    for one, two in zip(prefill, decode, strict=True):
        assert two["sampling_params"] == {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
        assert two["return_logprob"] is True and two["top_logprobs_num"] == 20
        ((token, bias),) = one["sampling_params"].pop("logit_bias").items()
        assert one == two and bias > 1000
        assert prompts.setdefault(len(two["input_ids"]), (two["input_ids"], token)) == (two["input_ids"], token)
    assert sorted(prompts) == [383, 511, 2175]


@pytest.mark.parametrize(
    "broken", [{"error": "gone"}, {"output_ids": [1], "meta_info": {"output_top_logprobs": [[[0.0, 1, None]]]}}]
)
def test_after_a_lost_request_no_more_are_sent(fakes, broken):
    fakes.broken = broken
    rows = ask(fakes)
    assert len(fakes.asked["decode"]) == 2  # one to warm up, one that counts
    assert not any(row["answered"] for row in rows) and "requests lost" in missed(rows)


def test_a_silent_server_ends_the_experiment(fakes):
    fakes.delay = 1.0
    began = time.monotonic()
    rows = ask(fakes, "--timeout", "0.2", "--warm-up", "0.2")
    assert time.monotonic() - began < 2 and not any(row["answered"] for row in rows)


def test_past_the_limit_no_more_are_sent(fakes):
    fakes.delay = 0.05
    rows = ask(fakes, "--limit", "0.3")
    assert "requests lost" in missed(rows) and 3 < len(fakes.asked["decode"]) < 20


def good(short_noise: float = 0.0, long_noise: float = 0.0) -> dict[tuple[str, str], dict]:
    """Rows as they must be, of four requests: a repetition and exact loads at the noise, families far above."""
    rows = {}
    for kind, noise in (("short", short_noise), ("long", long_noise)):
        for run in verdict.RUNS[kind]:
            family = run in verdict.FAMILIES
            far = 0.0 if run == verdict.CONTROL else 1.0 if family else noise
            loads, zeroed = 0 if "control" in run else 4, 4 if family else 0
            rows[kind, run] = {
                "run": run, "set": kind, "requests": 4, "answered": 4, "changed": 4 if far else 0,
                "median": far, "largest": far, "loads": loads, "zeroed": zeroed, "zeroed_bytes": zeroed * 64,
            }  # fmt: skip
    return rows


def test_noise_in_long_prompts_is_borne_and_in_short_ones_misses_the_exact_bounds_alone():
    assert missed(list(good().values())) == []
    assert missed(list(good(long_noise=0.3).values())) == []
    exact = ["short: requests changed in the control's repetition", "short: requests changed by exact loads"]
    assert missed(list(good(short_noise=0.3).values())) == exact


@pytest.mark.parametrize("kind", ["short", "long"])
@pytest.mark.parametrize("noisy", [verdict.AGAIN, switch.NONE])
def test_a_family_within_twice_the_noise_misses(kind, noisy):
    rows = good(long_noise=0.3, short_noise=0.3)
    rows[kind, noisy] |= {"median": 0.6, "largest": 0.6}
    names = {name for name in missed(list(rows.values())) if "by zeroing" in name}
    assert names == {f"{kind}: median distance by zeroing {family}" for family in verdict.MATTER[kind]}


@pytest.mark.parametrize(
    ("key", "fault", "miss"),
    [
        (("short", verdict.AGAIN), {"changed": 1}, ["short: requests changed in the control's repetition"]),
        (("short", switch.NONE), {"changed": 1}, ["short: requests changed by exact loads"]),
        (("long", switch.NONE), {"median": 0.02}, ["long: median distance of exact loads"]),
        (("long", switch.NONE), {"loads": 3}, ["long: exact loads, other than one a request"]),
        (("short", verdict.CONTROL), {"loads": 1}, ["short: loads in the controls"]),
        (("short", "c128_state"), {"changed": 3}, ["short: requests unchanged by zeroing c128_state"]),
        (("short", "c4_kv"), {"median": 0.0}, ["short: median distance by zeroing c4_kv"]),
        (("long", "c4_indexer"), {"median": 0.0}, ["long: median distance by zeroing c4_indexer"]),
        (("long", "c4_indexer_state"), {"median": 0.0, "changed": 1}, []),
        (("long", "c4_indexer_state"), {"changed": 0}, ["long: requests changed by zeroing c4_indexer_state"]),
        (("long", "c4_indexer"), {"zeroed": 3}, ["long: loads other than one zeroed a request, c4_indexer"]),
        (("short", "swa_kv"), {"loads": 8}, ["short: loads other than one zeroed a request, swa_kv"]),
        (("short", "swa_kv"), {"zeroed_bytes": 0}, ["short: loads other than one zeroed a request, swa_kv"]),
        (("short", "c4_state"), {"answered": 3}, ["requests lost"]),
    ],
)
def test_each_fault_misses_its_bound(key, fault, miss):
    rows = good()
    rows[key] |= fault
    assert missed(list(rows.values())) == miss


def test_trouble_in_the_log_misses_its_bound():
    assert missed(list(good().values()), ["VerifyMismatch"]) == ["trouble in the log"]


def test_the_prompts_lie_on_both_sides_of_the_indexers_choice_and_close_their_blocks():
    arguments = script.parse(["--model-path", "m", "--", "--tp", "1"])
    assert arguments.server == ["--tp", "1"]
    assert (len(arguments.short), arguments.short[0], arguments.short[-1]) == (8, 383, 2047)
    assert (len(arguments.long), arguments.long[0], arguments.long[-1]) == (12, 3455, 6143)
    for lengths in (arguments.short, arguments.long):
        assert {length % 512 for length in lengths} == {383, 511}, "two numbers that the prefill server compiles for"
        assert {length % 256 for length in lengths} == {127, 255}, "a block that ends a page, and one that does not"
    drawn = answers.questions(arguments.long, 2000, 1)
    assert drawn == answers.questions(arguments.long, 2000, 1) != answers.questions(arguments.long, 2000, 2)
    assert tuple(len(question.prompt) for question in drawn) == arguments.long


@pytest.mark.parametrize("options", [["--short", "384"], ["--short", "2175"], ["--long", "1919"]])
def test_lengths_that_show_nothing_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        script.parse(["--model-path", "m", *options])
    assert options[0] in capsys.readouterr().err


def test_servers_that_started_are_stopped_whatever_comes(tmp_path, monkeypatch):
    stopped = []

    def launch(role, *_):
        return SimpleNamespace(role=role, url="", log=tmp_path / "log")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(script.servers, "stop_all", lambda started: stopped.extend(s.role for s in started))
    monkeypatch.setattr(script.servers, "launch", launch)
    monkeypatch.setattr(script.servers, "wait_until_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.run_all(script.parse(["--model-path", "m", "--logs", str(tmp_path)]))
    assert stopped == ["prefill", "decode"]
