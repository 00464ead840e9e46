"""The plain drill over a fake server: what happens while copies wait, who was meant, and the switch on real classes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import prometheus_client
import pytest
from fake_http import Handler, running

from sglang_dsv4.livetest import plain, servers
from sglang_dsv4.livetest.hold_resumes import switch
from sglang_dsv4.metrics import Exporter


class Plain(Handler):
    """A plain server: requests end when the switch says go; metrics show copies while it says hold."""

    word: ClassVar = None
    aborted: ClassVar[set[str]] = set()
    posted: ClassVar[list[str]] = []
    seen: ClassVar[threading.Event] = threading.Event()  # copies were seen to wait

    def do_GET(self) -> None:
        self.begin()
        registry = prometheus_client.CollectorRegistry()
        exporter = Exporter({"tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}, 2**30, registry)
        hold = self.word.read_text() == switch.HOLD
        exporter.holds(7 if hold else 0, 100 if hold else 0, 100)
        if hold:
            self.seen.set()
        if "/update_weights_from_tensor" in self.posted:
            exporter.fell_back("StaleWeights")
        self.wfile.write(prometheus_client.generate_latest(registry))

    def do_POST(self) -> None:
        body = self.body()
        self.posted.append(self.path)
        self.begin(400 if self.path == "/flush_cache" else 200)
        if self.path == "/abort_request":
            self.aborted.add(body["rid"])
        if self.path != "/generate":
            self.wfile.write(b'{"success": true}')
            return
        while not self.seen.wait(0) or self.word.read_text() == switch.HOLD:
            time.sleep(0.01)
        count = body["sampling_params"]["max_new_tokens"]
        finish = {"type": "abort", "message": "by name"} if body["rid"] in self.aborted else {"type": "length"}
        meta = {"completion_tokens": count, "finish_reason": finish}
        self.chunk({"output_ids": [1] * count, "meta_info": meta})


@pytest.fixture
def stage(tmp_path, monkeypatch):
    monkeypatch.setattr(plain, "APART", 0)
    monkeypatch.setattr(plain, "SETTLES", 0)
    monkeypatch.setattr(plain.weights, "read_log", lambda _: {"copies_alive_at_end": 3})
    Plain.word = tmp_path / "word"
    Plain.word.write_text(switch.GO)
    log = tmp_path / "plain.log"
    log.touch()
    arguments = SimpleNamespace(seed=1, vocabulary=2000, timeout=10)
    with running(Plain) as url:
        server = SimpleNamespace(url=url, log=log, alive=True, role="plain")
        yield plain.Stage(server, Plain.word, arguments, 8)
    Plain.aborted.clear()
    Plain.posted.clear()
    Plain.seen.clear()


@pytest.mark.parametrize("name", ["abort", "flush", "weights", "pause"])
def test_it_happens_while_copies_wait(stage, monkeypatch, name):
    trial = plain.TRIALS[name]
    row = plain.play(name, trial, stage)
    assert [bound["name"] for bound in plain.judge([row]) if not bound["ok"]] == []
    assert row["copies_when_it_happened"] == 7 and row["finished"] == plain.REQUESTS - trial.answered[0]
    assert len(set(Plain.posted)) > 1


def test_an_urgent_request_is_one_more(stage):
    row = plain.play("priority", plain.TRIALS["priority"], stage)
    assert row["finished"] == plain.REQUESTS + 1
    assert [b["name"] for b in plain.judge([row]) if not b["ok"]] == ["priority: requests answered as meant"]


GOOD = {"run": "weights", "lost": 0, "meant": 0, "refused": 0, "copies_when_it_happened": 3, "copies_after": 0,
        "held_bytes_at_end": 0, "loads": 5, "verified": 5, "trouble": [], "alive": 1,
        "fallbacks": {"StaleWeights": 2}}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"lost": 1}, ["requests lost"]),
        ({"refused": 1}, ["requests answered otherwise than with tokens"]),
        ({"run": "abort"}, ["requests answered as meant"]),
        ({"copies_when_it_happened": 2}, ["copies when it happened"]),
        ({"copies_after": 1}, ["copies afterwards"]),
        ({"held_bytes_at_end": 1}, ["host memory held afterwards, bytes"]),
        ({"verified": 4}, ["loads not compared with their copy"]),
        ({"trouble": ["leak detected"]}, ["trouble in the log"]),
        ({"alive": 0}, ["server alive"]),
        ({"fallbacks": {}}, ["counted as StaleWeights"]),
    ],
)
def test_each_fault_misses_its_bound(change, missed):
    bounds = plain.judge([GOOD | change])
    assert [bound["name"].partition(": ")[2] for bound in bounds if not bound["ok"]] == missed


def test_every_trial_has_a_server_of_its_kind():
    assert {trial.kind for trial in plain.TRIALS.values()} == set(plain.KINDS)


def test_a_retracted_request_of_a_plain_server_is_held(tmp_path):
    word = tmp_path / "word"
    add = switch.holding_back(lambda adder, req, *rest: (req, rest), word, "refused")
    retracted, new = (SimpleNamespace(is_retracted=is_retracted) for is_retracted in (True, False))
    for text, expected in ((switch.HOLD, "refused"), (switch.GO, (retracted, (False, None)))):
        word.write_text(f"{text}\n")
        assert add(None, retracted, False, None) == expected
        assert add(None, new, True) == (new, (True,))


def test_the_last_request_fails_once(tmp_path):
    word = tmp_path / "word"
    word.write_text(switch.LAST_FAILS)
    retract = switch.failing_the_last(lambda batch: batch.check_decode_mem(selected_indices=[0]), word)

    class Batch:
        def check_decode_mem(self, selected_indices=None):
            return True

    batch = Batch()
    assert [retract(batch), retract(batch)] == [False, True] and word.read_text() == switch.GO


def test_the_switch_fits_the_engines_classes(monkeypatch, tmp_path):
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

    for owner, name in ((DecodePreallocQueue, "resume_retracted_reqs"), (PrefillAdder, "add_one_req"),
                        (ScheduleBatch, "retract_decode")):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))
    word = tmp_path / "word"
    word.write_text(switch.HOLD)
    monkeypatch.setenv(switch.VARIABLE, str(word))
    switch.install()
    assert PrefillAdder.add_one_req(None, SimpleNamespace(is_retracted=True), False, None) == AddReqResult.OTHER
    assert hasattr(ScheduleBatch, "check_decode_mem")


def test_the_drill_runs_to_its_end(stage, monkeypatch, tmp_path):
    """A trial of one kind of server, from the command line to the result."""
    ended = []

    def launch(role, model, arguments, environment, folder, apart=0):
        Plain.word = Path(environment[switch.VARIABLE])
        return stage.server

    monkeypatch.setattr(servers, "launch", launch)
    monkeypatch.setattr(servers, "wait_until_up", lambda *_: None)
    monkeypatch.setattr(servers, "stop_all", ended.extend)
    monkeypatch.setattr(servers, "end_when_told", lambda: None)
    monkeypatch.setattr(plain, "warm_up", lambda *_: None)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    folders = ["--logs", str(tmp_path), "--out", str(tmp_path)]
    assert plain.main(["--model-path", str(tmp_path), "--trials", "flush", "weights", *folders]) == 0
    found = json.loads((tmp_path / "drill-plain.json").read_text())
    assert [row["run"] for row in found["rows"]] == ["flush", "weights"]
    assert ended == [stage.server]
