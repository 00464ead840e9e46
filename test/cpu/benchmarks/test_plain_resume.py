"""A restore beside a recompute: which token ends a wait, which way it was, what is worth it, and each missed bound."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from fake_http import Decode, running

from benchmarks.plain import resume as bench
from benchmarks.plain.timed_restores import VARIABLE, deepseek_v4
from sglang_dsv4.errors import HostMemoryExhausted

ARRIVED = {1: 999.0, 5: 1000.005, 6: 1000.030, 7: 1000.040, 9: 1002.000}


def test_a_wait_ends_with_the_first_token_that_was_not_there_before():
    returns = [{"admitted": 1000.0, "had": 5, "extend": 1}, {"admitted": 1000.5, "had": 7, "extend": 800},
               {"admitted": 1003.0, "had": 9, "extend": 0}]  # fmt: skip
    found = bench.waits(returns, ARRIVED)
    assert found == {"restore": [pytest.approx(30, abs=0.01)], "recompute": [pytest.approx(1500, abs=0.01)]}


def test_every_other_save_has_no_room():
    save = deepseek_v4.every_other(lambda slots: slots)
    assert save(1) == 1
    with pytest.raises(HostMemoryExhausted):
        save(2)
    assert save(3) == 3


def test_a_pass_notes_those_that_it_takes_back(tmp_path):
    file = tmp_path / "notes"
    file.touch()
    reqs = [SimpleNamespace(rid=rid, is_retracted=rid != "new", output_ids=[0] * 7) for rid in ("new", "a", "b")]

    def a_pass(scheduler, running_batch):
        for req in reqs:
            req.is_retracted = False  # as the engine does
        batch = SimpleNamespace(reqs=reqs[:2], extend_lens=[30, 1])
        joined = SimpleNamespace(reqs=reqs[2:] if running_batch else [])
        return SimpleNamespace(batch_to_run=batch if running_batch else None, running_batch=joined)

    noted = deepseek_v4.noting(a_pass, file)
    noted(SimpleNamespace(waiting_queue=reqs[:0]), True)
    assert file.read_text() == ""
    for req in reqs[1:]:
        req.is_retracted = True
    scheduler = SimpleNamespace(waiting_queue=reqs)
    assert noted(scheduler, False).batch_to_run is None and file.read_text() == ""
    for req in reqs[1:]:
        req.is_retracted = True
    noted(scheduler, True)
    found = [(line["rid"], line["had"], line["extend"]) for line in bench.lines(file)]
    assert found == [("b", 7, 0), ("a", 7, 1)]  # one joined the decode batch


def row(tokens: int, faster: float | None) -> dict:
    found = {"tokens": tokens, "restores": 4, "recomputes": 4}
    return found if faster is None else found | {"faster": faster}


def test_a_copy_is_worth_it_from_where_no_longer_one_is_slower():
    assert bench.worth_it_from([row(512, 1.2), row(768, 0.9), row(1024, 1.1), row(2048, 3)]) == 1024
    assert bench.worth_it_from([row(512, 2), row(768, None)]) is None


def test_bounds_are_of_the_long_lengths():
    good = [row(512, 0.5), row(4096, 8.1), row(16384, 31), row(65536, 101)]
    assert all(bound["ok"] for bound in bench.judge(good)) and len(bench.judge(good)) == 9
    for number, worse in ((1, {"faster": 7.9}), (2, {"restores": 2}), (3, {"recomputes": 0})):
        rows = [entry | worse if at == number else entry for at, entry in enumerate(good)]
        assert [bound["ok"] for bound in bench.judge(rows)].count(False) == 1
    assert not all(bound["ok"] for bound in bench.judge([row(4096, None)]))


class Retracting(Decode):
    """Notes two returns of each timed request: a restore and a recompute."""

    def do_POST(self) -> None:
        rid = self.body()["rid"]
        with self.file.open("a") as out:
            for had, extend in ((1, 1), (2, 900)):
                print(json.dumps({"rid": rid, "admitted": 0.0, "had": had, "extend": extend}), file=out)
        super().do_POST()


def test_each_length_is_measured_both_ways(tmp_path, monkeypatch):
    words = ["--config", "c.json", "--experts", "4", "--tokens", "40", "--sweep", "--repeats", "2", "--new-tokens", "6"]
    arguments = bench.parse([*words, "--logs", str(tmp_path), "--", "--mem-fraction-static", "0.9"])
    given = []

    def launch(role, model, options, environment, folder):
        given.append((role, options, environment))
        Retracting.file = bench.Path(environment[VARIABLE])
        return SimpleNamespace(url=url, stop=lambda: None)

    monkeypatch.setattr(bench.servers, "launch", launch)
    monkeypatch.setattr(bench.servers, "wait_until_up", lambda *_: None)
    monkeypatch.setattr(bench, "write_model", lambda *_: ("model", {"vocab_size": 500}))
    monkeypatch.setattr(bench.time, "sleep", lambda _: None)
    monkeypatch.setattr(bench, "KEEPER", 3)
    with running(Retracting) as url:
        (found,) = bench.measure(arguments)
    assert (found["tokens"], found["restores"], found["recomputes"]) == (40, 2, 2)
    ((role, options, environment),) = given
    assert role == "plain" and options[-2:] == ["--mem-fraction-static", "0.9"]
    assert environment["SGLANG_RADIX_FORCE_MISS"] == environment["SGLANG_TEST_RETRACT"] == "1"
