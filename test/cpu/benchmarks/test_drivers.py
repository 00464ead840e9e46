"""The benchmarks that start servers, beside servers that answer at once: how each is started, asked, and written."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_http import Decode, running

from benchmarks import client, in_server, online_stress, resume, steps

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


def test_a_request_is_retracted_and_the_result_written(tmp_path, monkeypatch):
    config = tmp_path / "config.json"
    config.write_text('{"n_routed_experts": 256, "vocab_size": 500}')
    words = ["--config", str(config), "--experts", "4", "--tokens", str(TOKENS), "--repeats", "3", "--new-tokens", "6"]
    words += ["--logs", str(tmp_path), "--out", str(tmp_path), "--", "--mem-fraction-static", "0.9"]
    started = []

    def launch(kind, model, given, environment, folder):
        assert json.loads((Path(model) / "config.json").read_text())["n_routed_experts"] == 4
        started.append((kind, given, environment))
        Retracting.notes = Path(environment.get(in_server.NOTES, tmp_path / "stock.jsonl"))
        return SimpleNamespace(url=url, stop=lambda: None)

    monkeypatch.setattr(sys, "argv", ["resume", *words])
    monkeypatch.setattr(client.servers, "launch", launch)
    monkeypatch.setattr(client.servers, "wait_until_up", lambda *_: None)
    monkeypatch.setattr(client.servers, "end_when_told", lambda: None)
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    monkeypatch.setattr(client, "KEEPER", 3)
    with running(Retracting) as url:
        assert resume.main() == 1
    kind, given, environment = started[0]
    assert kind == "decode" and given[-2:] == ["--mem-fraction-static", "0.9"]
    assert int(given[given.index("--context-length") + 1]) > TOKENS + (1 << 14) + client.KEEPER
    assert environment[in_server.MODULE] == resume.__name__ and environment["SGLANG_TEST_RETRACT"] == "1"
    found = json.loads((tmp_path / "resume.json").read_text())
    row = next(row for row in found["rows"] if row.get("tokens") == TOKENS)
    assert row["resumes"] == 6 and row["recompute_ms"] > 0
    assert [bound["name"] for bound in found["bounds"] if not bound["ok"]] == MISSED
    assert started[1][0] == "plain" and started[1][2]["DSV4_ENABLED"] == "0"


@pytest.mark.parametrize("name", ["online_stress", "resume", "steps"])
def test_the_engine_has_what_a_benchmark_hooks(name, tmp_path, monkeypatch):
    monkeypatch.setenv(online_stress.LATE, "1")
    for variable, value in (in_server.environment(f"benchmarks.{name}", tmp_path / "notes")).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delitem(sys.modules, "benchmarks.in_server.deepseek_v4", raising=False)
    (model,) = importlib.import_module("benchmarks.in_server.deepseek_v4").EntryClass
    assert model.__name__ == "DeepseekV4ForCausalLM"
    module, hooked = importlib.import_module(f"benchmarks.{name}"), []
    monkeypatch.setattr(module, "around", lambda owner, method, hook: hooked.append(getattr(owner, method)))
    for variable in (steps.STEPS, steps.SEED):
        monkeypatch.setenv(variable, "9")
    module.install(tmp_path / "notes")
    assert hooked


@pytest.mark.parametrize(
    ("gain", "groups", "lost", "prepared", "missed"),
    [
        (1.01, 9, 0, 10, []), (0.97, 9, 0, 10, ["low end", "without / with"]), (1.01, 0, 0, 10, ["starts measured"]),
        (1.01, 9, 1, 10, ["requests without a whole answer"]), (1.01, 9, 0, 0, ["steps with the hooks, prepared here"]),
    ],
)  # fmt: skip
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
        Stepping.notes = Path(environment[in_server.NOTES])
        log = folder / "decode.log"
        log.touch()
        started.append((words, environment))
        return SimpleNamespace(url=url, log=log, suspend=int, awake=contextlib.nullcontext)

    words = ["--model-path", "m", "--batches", "1", "--rounds", "1", "--groups", "4", "--steps", "6"]
    words += ["--prompt", "3", "9", "--logs", str(tmp_path), "--out", str(tmp_path), "--", "--tp", "1"]
    monkeypatch.setattr(sys, "argv", ["steps", *words])
    monkeypatch.setattr(Stepping, "gain", gain)
    monkeypatch.setattr(steps.servers, "launch", launch)
    monkeypatch.setattr(steps.servers, "wait_until_up", lambda *_: None)
    monkeypatch.setattr(steps.servers, "stop_all", lambda *_, patience: {})
    monkeypatch.setattr(steps.servers, "end_when_told", lambda: None)
    with running(Stepping) as url:
        assert steps.main() == int(bool(missed))
    bounds = json.loads((tmp_path / "steps-eager.json").read_text())["bounds"]
    assert [bound["name"] for bound in bounds if not bound["ok"]] == missed
    ((given, environment),) = started
    assert "--disable-cuda-graph" in given and environment["DSV4_PREP"] == "auto"
