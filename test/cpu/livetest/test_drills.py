"""The live drills against a fake decode server: who left, was aborted, finished or was lost; what misses a bound."""

from __future__ import annotations

import json
import time
from collections import Counter
from types import SimpleNamespace
from typing import ClassVar

import pytest
from fake_http import Handler, running

from sglang_dsv4.livetest import clients, servers, weights


class Decode(Handler):
    """Streams tokens; an aborted rid ends with an abort; one in ``broken`` ends early, one in ``silent`` pauses."""

    aborted: ClassVar[set[str]] = set()
    broken: ClassVar[set[str]] = set()
    silent: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        body = self.body()
        self.begin()
        if self.path != "/generate":
            self.aborted.add(body.get("rid", ""))
            self.wfile.write(b'{"success": true}')
            return
        rid, count = body.get("rid", "one"), body["sampling_params"]["max_new_tokens"]
        for end in range(1, count + 1):
            finish = None
            if rid in self.aborted:
                finish = {"type": "abort", "message": "by name"}
            elif end == count or (rid in self.broken and end == 5):
                finish = {"type": "length"}
            chunk = {"output_ids": [1], "meta_info": {"completion_tokens": end, "finish_reason": finish}}
            try:
                self.chunk(chunk)
            except OSError:
                return  # the client left
            if finish:
                return
            time.sleep(2.5 * clients.SILENCE if rid in self.silent and end == 4 else 0.0005)


@pytest.fixture
def decode():
    with running(Decode) as url:
        yield url
    Decode.aborted.clear()
    Decode.broken.clear()
    Decode.silent.clear()


def test_a_disturbed_round(decode, monkeypatch):
    monkeypatch.setattr(clients, "SILENCE", 3.0)  # nobody is silent here, however busy the machine is
    some = clients.Clients(decode, seed=1)
    some.round(0, 20, calm=False)
    assert some.outcomes == {"finished": 12, "left": 4, "aborted": 4}
    assert {f"drill-{n:06d}" for n in (4, 9, 14, 19)} == Decode.aborted


@pytest.mark.parametrize("kind", ["broken", "aborted"])
def test_an_early_end_or_an_abort_that_nobody_asked_for_is_a_loss(decode, kind):
    getattr(Decode, kind).add("drill-000002")
    some = clients.Clients(decode, seed=3)
    some.round(0, 4, calm=True)
    assert some.outcomes == {"finished": 3, "lost": 1}


def test_those_who_fall_silent_are_left_or_aborted(decode):
    Decode.silent |= {f"drill-{n:06d}" for n in range(5)}
    some = clients.Clients(decode, seed=4)
    some.round(0, 5, calm=False)
    assert some.outcomes == {"finished": 1, "left when silent": 1, "aborted when silent": 1, "left": 1, "aborted": 1}
    assert set(clients.CUT_OFF) < set(some.outcomes)
    assert {"drill-000002", "drill-000004"} == Decode.aborted


GOOD_LOG = {
    "saves": 700, "loads": 680, "verified": 680, "copies_alive_peak": 15, "copies_alive_at_end": 0,
    "held_bytes_at_end": 0, "trouble": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("wild", "log", "missed"),
    [
        ({}, {}, []),
        ({"lost": 1}, {}, ["requests lost"]),
        ({"left when silent": 0}, {}, ["requests left when silent"]),
        ({"aborted when silent": 4}, {}, ["requests aborted when silent"]),
        ({"pauses": 0}, {}, ["pauses"]),
        ({"flushes": 2, "flush answered 400": 3, "flush answered 404": 40}, {}, ["flushes done or refused"]),
        ({}, {"saves": 691}, ["copies released without a load"]),
        ({}, {"copies_alive_at_end": 1}, ["copies alive after the calm round"]),
        ({}, {"held_bytes_at_end": 1}, ["host memory held after the calm round, bytes"]),
        ({}, {"verified": 679}, ["loads not compared with their copy"]),
        ({}, {"trouble": ["leak detected"]}, ["trouble in the log"]),
    ],
)  # fmt: skip
def test_every_bound_can_be_missed(wild, log, missed):
    good = Counter(dict.fromkeys(clients.CUT_OFF, 16), pauses=50, flushes=5) + Counter({"flush answered 400": 45})
    bounds = clients.judge(Counter({**good, **wild}), Counter(finished=32), GOOD_LOG | log, True)
    assert [bound["name"] for bound in bounds if not bound["ok"]] == missed


def test_every_bound_of_the_weights_drill_can_be_missed():
    log = {"saves": 9, "loads": 7, "fallbacks": {"StaleWeights": 1}, "copies_alive_at_end": 0, "trouble": []}
    fine = {"lost": 0, "refused": 0}
    assert all(entry["ok"] for entry in weights.judge(3, 3, fine, log, alive=True))
    for found in (
        weights.judge(2, 3, fine, log, alive=True),
        weights.judge(3, 3, {"lost": 0, "refused": 1}, log, alive=True),
        weights.judge(3, 3, fine, log | {"loads": 9}, alive=True),
        weights.judge(3, 3, fine, log | {"fallbacks": {}}, alive=True),
        weights.judge(3, 3, fine, log | {"copies_alive_at_end": 1}, alive=True),
        weights.judge(3, 3, fine, log, alive=False),
    ):
        assert sum(not entry["ok"] for entry in found) == 1


LOG = "[t] saved 900 tokens, 1.9 MB in 1.50 ms; copies alive 1, 0.30 of 1.00 GiB held\n"


@pytest.fixture
def launched(monkeypatch, decode, tmp_path):
    """In the place of starting servers: fake ones; whoever was begun must be ended."""
    begun, ended = [], []

    def launch(role, model, arguments, environment, folder, *_):
        log = folder / f"{role}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(LOG)
        begun.append(role)
        return SimpleNamespace(role=role, url=decode, log=log, alive=True, stop=lambda: ended.append(role))

    monkeypatch.setattr(servers, "launch", launch)
    monkeypatch.setattr(servers, "wait_until_up", lambda *_: None)
    monkeypatch.setattr(servers, "stop_all", lambda started: [server.stop() for server in started] and {})
    monkeypatch.setattr(servers, "end_when_told", lambda: None)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    yield ["--model-path", str(tmp_path), "--logs", str(tmp_path / "logs"), "--out", str(tmp_path)]
    assert begun and begun == ended


def test_the_clients_drill_runs_to_its_end(monkeypatch, launched, tmp_path):
    monkeypatch.setattr(clients, "CALM", 2)
    assert clients.main([*launched, "--requests", "3"]) == 1, "three cannot do all that must be seen"
    found = json.loads((tmp_path / "drill.json").read_text())
    wild, calm, log = found["rows"]
    assert (wild["finished"], calm["finished"], log["saves"]) == (3, 2, 1)
    assert {bound["name"] for bound in found["bounds"] if bound["ok"]} >= {"requests lost", "server alive at the end"}


def test_the_weights_drill_runs_to_its_end(launched, tmp_path):
    assert weights.main([*launched, "--requests", "2", "--updates", "1"]) == 1, "its copy stays alive"
    found = json.loads((tmp_path / "drill-weights.json").read_text())
    assert (found["rows"][0]["finished"], found["rows"][0]["updates"]) == (2, 1)
    assert found["bounds"][0]["ok"]
