"""The benchmarks that start servers, beside servers that answer at once: how each is started, asked, and written."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_http import Decode, play_servers, running

from benchmarks import client, resume, stall, steps
from sglang_dsv4.livetest import in_server

TOKENS = 65536
LINE = {"tokens": TOKENS, "admitted": 0.0, "load_ms": 1e3, "bytes": 10}
MISSED = [
    f"admission to token, recompute by resume, at {TOKENS} tokens",
    "load against recompute at 64K",
]  # it is played


class Retracting(Decode):
    """Notes two returns of each request."""

    def do_POST(self) -> None:
        for _ in range(2):
            in_server.note(self.notes, **LINE)
        super().do_POST()


@pytest.fixture
def played(tmp_path, monkeypatch):
    """In the place of starting servers: a fake one. Returns a function that runs a benchmark, and what was started."""
    config = tmp_path / "config.json"
    config.write_text('{"n_routed_experts": 256, "vocab_size": 500}')
    words = ["--config", str(config), "--experts", "4", "--tokens", str(TOKENS), "--repeats", "3", "--new-tokens", "6"]
    words += ["--logs", str(tmp_path), "--out", str(tmp_path), "--", "--mem-fraction-static", "0.9"]
    started = []

    def run(benchmark, handler):
        def launch(kind, model, given, environment, folder):
            assert json.loads((Path(model) / "config.json").read_text())["n_routed_experts"] == 4
            started.append((kind, given, environment))
            handler.notes = Path(environment.get(in_server.FILE, tmp_path / "stock.jsonl"))
            (folder / "decode.log").write_text("[t] pinned 32.00 GiB in 4.5 s\n") if kind == "decode" else None
            return SimpleNamespace(url=url, stop=lambda: None)

        name = benchmark.__name__.split(".")[-1]
        monkeypatch.setattr(sys, "argv", [name, *words])
        play_servers(monkeypatch, launch)
        with running(handler) as url:
            status = benchmark.main()
        return status, json.loads((tmp_path / f"{name}.json").read_text())

    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    monkeypatch.setattr(client, "KEEPER", 3)
    return run, started


def test_a_request_is_retracted_and_the_result_written(played):
    run, started = played
    status, found = run(resume, Retracting)
    assert status == 1
    kind, given, environment = started[0]
    assert kind == "decode" and given[-2:] == ["--mem-fraction-static", "0.9"]
    assert int(given[given.index("--context-length") + 1]) > TOKENS + (1 << 14) + client.KEEPER
    assert environment[in_server.FUNCTION] == f"{resume.__name__}:install" and environment["SGLANG_TEST_RETRACT"] == "1"
    row = next(row for row in found["rows"] if row.get("tokens") == TOKENS)
    assert row["resumes"] == 6 and row["recompute_ms"] > 0
    assert [bound["name"] for bound in found["bounds"] if not bound["ok"]] == MISSED
    assert started[1][0] == "plain" and started[1][2]["DSV4_ENABLED"] == "0"


class Stalling(Decode):
    """Notes a save and a load a request, and one of a request that is not asked about."""

    ms = 1.25

    def do_POST(self) -> None:
        stays = len(self.body()["input_ids"]) == client.KEEPER
        for what, tokens in () if stays else (("save", TOKENS + 9), ("load", TOKENS + 9), ("save", 70)):
            in_server.note(self.notes, what=what, tokens=tokens, began=time.time(), ms=self.ms)
        super().do_POST()


@pytest.mark.parametrize(("ms", "missed"), [(1.25, []), (1.75, ["save", "load"])])
def test_a_stall_runs_to_its_end(played, monkeypatch, ms, missed):
    run, started = played
    monkeypatch.setattr(Stalling, "ms", ms)
    monkeypatch.setattr(stall, "LEAST_SEEN", 3)
    status, found = run(stall, Stalling)
    ((kind, _, environment),) = started
    assert kind == "decode" and environment["SGLANG_TEST_RETRACT_INTERVAL"] == "24"
    assert [b["name"] for b in found["bounds"] if not b["ok"]] == [f"{m}, ms of the scheduler, median" for m in missed]
    (row,) = found["rows"]
    assert status == int(bool(missed)) and (row["saves"], row["loads"], row["save_ms_p50"]) == (3, 3, ms)
    assert (row["pinned_gib"], row["pinned_s"]) == (32, 4.5)


def test_gaps_are_those_from_an_event_on_and_those_before_it():
    """The request that stays gets its tokens late behind the save at 5.2 s, and at the load of 10.5 s."""
    arrived = [1, 2, 3, 4, 5, 6.5, 8.1, 9.1, 10, 11, 12.8, 14]
    noted = [{"what": what, "began": at, "ms": at} for what, at in (("save", 5.2), ("load", 10.5)) for _ in range(2)]
    row = stall.summarise(noted, arrived)
    assert (row["saves"], row["loads"], row["save_ms_p50"], row["load_ms_p99"]) == (2, 2, 5.2, 10.5)
    gaps = [row[f"{name}_p50"] for name in ("gap_ms", "gap_at_save_ms", "gap_at_load_ms")]
    assert gaps == pytest.approx([1000, 1600, 1800])


def test_a_stall_counts_as_the_package_does_and_keeps_loads_apart_from_saves(tmp_path, monkeypatch):
    hooks = {}
    monkeypatch.setattr(stall, "around", lambda _, name, hook: hooks.update({name: hook}))
    stall.install(tmp_path / "notes")
    host = SimpleNamespace(counters=SimpleNamespace(save_seconds=1.0, load_seconds=2.0))

    def counting(host, copy):
        host.counters.save_seconds += 0.003
        host.counters.load_seconds += 0.004
        return copy

    def passes():
        return [hooks["resume_retracted_reqs"](lambda _: ["resumed"], None) for _ in range(stall.APART + 1)]

    assert passes() == [["resumed"]] * (stall.APART + 1), "nothing was saved yet"
    copy = SimpleNamespace(tokens=7)
    assert hooks["save"](counting, host, copy) is copy
    assert passes() == [[]] * (stall.APART - 1) + [["resumed"]] * 2
    hooks["load"](counting, host, copy)
    noted = [(one["what"], one["tokens"], round(one["ms"], 6)) for one in in_server.read(tmp_path / "notes")]
    assert noted == [("save", 7, 3.0), ("load", 7, 4.0)]


def test_a_stall_of_a_server_without_copies_is_told(tmp_path):
    log = tmp_path / "decode.log"
    log.write_text("[t] request 'pinned 3.00 GiB in 4.0 s'\n")
    with pytest.raises(stall.servers.ServerDied, match="makes no copies"):
        stall.pinned(log)


@pytest.mark.parametrize("name", ["resume", "stall", "steps"])
def test_the_engine_has_what_a_benchmark_hooks(name, tmp_path, monkeypatch):
    module, hooked = importlib.import_module(f"benchmarks.{name}"), []
    monkeypatch.setattr(module, "around", lambda owner, method, hook: hooked.append(getattr(owner, method)))
    for variable in (steps.STEPS, steps.SEED):
        monkeypatch.setenv(variable, "9")
    module.install(tmp_path / "notes")
    assert hooked


@pytest.mark.parametrize(("gain", "groups", "lost", "prepared", "missed"), [
    (1.01, 9, 0, 10, []), (0.97, 9, 0, 10, ["low end", "without / with"]), (1.01, 0, 0, 10, ["starts measured"]),
    (1.01, 9, 1, 10, ["requests without a whole answer"]), (1.01, 9, 0, 0, ["steps with the hooks, prepared here"]),
])  # fmt: skip
def test_bounds_of_a_step_are_missed_by_a_bad_result(gain, groups, lost, prepared, missed):
    """The machine holds up one step of each block with the hooks."""
    blocks = [
        steps.Block(
            start, group, 1, hooked, prepared * hooked, (int(1e6 / (gain if hooked else 1)),) * 9 + (10**9,) * hooked
        )
        for start in range(2)
        for group in range(groups)
        for hooked in (True, False, False, True)
    ]
    asked = SimpleNamespace(batches=(1,), rounds=2, steps=10)
    bounds = steps.judge(steps.summarise(blocks, [1]), lost, 0, asked)
    names = [bound["name"] for bound in bounds if not bound["ok"]]
    assert len(names) == len(missed) and all(name.endswith(end) for name, end in zip(names, missed, strict=True)), names


class Stepping(Decode):
    """Notes four groups of blocks a request; with the hooks a step is as fast as ``gain`` says."""

    gain = 1.0

    def do_POST(self) -> None:
        for group in range(4):
            for hooked in (True, False, False, True):
                ns = [int(1e6 / (self.gain if hooked else 1))] * 2
                in_server.note(self.notes, group=group, hooked=hooked, batch=1, prepared=6 * hooked, ns=ns)
        super().do_POST()


@pytest.mark.parametrize(("gain", "missed"), [(1.0, []), (0.985, ["batch 1, without / with"])])
def test_steps_run_to_their_end(gain, missed, tmp_path, monkeypatch):
    started = []

    def launch(role, model, words, environment, folder, apart):
        Stepping.notes = Path(environment[in_server.FILE])
        log = folder / "decode.log"
        log.touch()
        started.append((words, environment))
        return SimpleNamespace(url=url, log=log, suspend=int, awake=contextlib.nullcontext)

    words = ["--model-path", "m", "--batches", "1", "--rounds", "1", "--groups", "4", "--steps", "6"]
    words += ["--prompt", "3", "9", "--logs", str(tmp_path), "--out", str(tmp_path), "--", "--tp", "1"]
    monkeypatch.setattr(sys, "argv", ["steps", *words])
    monkeypatch.setattr(Stepping, "gain", gain)
    play_servers(monkeypatch, launch)
    monkeypatch.setattr(steps.servers, "stop_all", lambda *_, patience: {})
    with running(Stepping) as url:
        assert steps.main() == int(bool(missed))
    bounds = json.loads((tmp_path / "steps-eager.json").read_text())["bounds"]
    assert [bound["name"] for bound in bounds if not bound["ok"]] == missed
    ((given, environment),) = started
    assert "--disable-cuda-graph" in given and environment["DSV4_PREP"] == "auto"
