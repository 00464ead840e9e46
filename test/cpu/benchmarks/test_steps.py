"""The step benchmark: its arithmetic on made-up blocks, its judgement, its run over a fake decode server."""

from __future__ import annotations

import dataclasses
import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_http import Decode, running

from benchmarks.steps import run as bench
from benchmarks.steps import summary

ORDERS = ((True, False, False, True), (False, True, True, False))


RUN = ("--model-path", "m", "--batches", "1", "3", "--prompt", "5", "9")


def made_up(gain: float, groups: int = 30, rounds: int = 2, noise: float = 0.02, batch: int = 1, prep=True, drift=0.0):
    """Blocks of 10 steps of 1 ms; with the hooks ``gain`` times as fast; each block ``drift`` longer than the last."""
    draw = np.random.default_rng(3)
    found = []
    for round_ in range(rounds):
        for group in range(groups):
            for place, hooked in enumerate(ORDERS[draw.integers(2)]):
                level = 1e6 * (1 + round_) * (1 + drift * (4 * group + place)) / (gain if hooked else 1)
                spans = level * (1 + noise * draw.standard_normal(10))
                prepared = 32 if hooked and prep else 0
                found.append(summary.Block(round_, group, batch, hooked, True, prepared, tuple(int(s) for s in spans)))
    return found


@pytest.mark.parametrize("gain", [0.95, 1.02])
def test_the_interval_holds_the_gain_and_is_narrow(gain):
    row = summary.summarise(made_up(gain), [1])[0]
    assert row["low"] < gain < row["high"] and row["high"] - row["low"] < 0.01
    drifting = summary.summarise(made_up(gain, noise=0, drift=0.01), [1])[0]
    assert drifting["ratio"] == pytest.approx(gain, abs=1e-4), "what grows or slows with time cancels"


def test_a_group_that_was_cut_off_does_not_count():
    blocks = made_up(1.0, groups=3, rounds=1)
    assert [len(found) for found in summary.abba_groups(blocks[:-1], 1).values()] == [2]
    with pytest.raises(RuntimeError, match="batch 4"):
        summary.summarise(blocks, [4])


STUCK = [dataclasses.replace(block, as_meant=block.hooked) for block in made_up(1.0)]
WRONG_SIDE = [dataclasses.replace(block, prepared=32) for block in made_up(1.0)]


@pytest.mark.parametrize(
    ("blocks", "requests", "missed"),
    [
        (made_up(1.0), (0, 0), []),
        (STUCK, (0, 0), ["blocks that ran otherwise than meant"]),
        (made_up(0.98), (0, 0), ["low end"]),
        (made_up(1.0, noise=1.0, groups=8), (0, 0), ["low end", "width of the interval"]),
        (made_up(1.0), (1, 0), ["requests lost"]),
        (made_up(1.0), (0, 1), ["requests retracted"]),
        (made_up(1.0, prep=False), (0, 0), ["steps with the hooks, prepared here"]),
        (WRONG_SIDE, (0, 0), ["steps without them, prepared here"]),
    ],
)
def test_each_fault_misses_its_bound(blocks, requests, missed):
    arguments = bench.parse([*RUN, "--prep", "stream"])
    bounds = summary.judge(summary.summarise(blocks, [1]), summary.Requests(*requests), arguments)
    names = [bound["name"] for bound in bounds if not bound["ok"]]
    assert len(names) == len(missed) and all(name.endswith(end) for name, end in zip(names, missed, strict=True))


class Up:
    """A server by its address, with its log, that writes its blocks when it goes to sleep."""

    awakes = 0

    def __init__(self, url: str, log: Path, file: Path, lines: str) -> None:
        self.url, self.log = url, log
        self.suspend = lambda: file.write_text(lines)

    @contextmanager
    def awake(self):
        self.awakes += 1
        yield self


@pytest.mark.parametrize("role", ["decode", "plain"])
def test_each_start_is_measured_alone_and_all_are_stopped(tmp_path, monkeypatch, role):
    sizes = ("--rounds", "2", "--groups", "1", "--steps", "6")
    given = ["--plain"] if role == "plain" else []
    found = bench.parse([*RUN, *sizes, "--prep", "stream", *given, "--logs", str(tmp_path)])
    rooms = []
    started, stopped = [], []
    log = tmp_path / "log"
    lines = ("host copies: 1", bench.PREP_AT_WORK, *([f"{bench.PLAIN_AT_WORK}, without a prefill"] if given else []))
    log.write_text("\n".join(lines))
    blocks = [block for batch in (1, 3) for block in made_up(1.0, 1, 1, batch=batch)]

    class Heard(Decode):
        def body(self):
            rooms.append(super().body().get("bootstrap_room"))
            return super().body()

    with running(Heard) as url:

        def launch(kind, model, options, environment, folder, apart):
            assert kind == role and options == (bench.PLAIN_ROOM if given else [])
            assert environment["DSV4_PREP"] == "stream"
            assert environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "benchmarks.steps.toggle_hooks"
            file = Path(environment[bench.FILE])
            assert file.is_absolute()
            written = [{k: v for k, v in dataclasses.asdict(block).items() if k != "round"} for block in blocks]
            started.append((apart, Up(url, log, file, "".join(json.dumps(line) + "\n" for line in written))))
            return started[-1][1]

        monkeypatch.setattr(bench.servers, "launch", launch)
        monkeypatch.setattr(bench.servers, "wait_until_up", lambda *_: None)
        monkeypatch.setattr(bench.servers, "stop_all", lambda servers, patience: stopped.extend(servers))
        measured, requests = bench.measure(found)
    assert requests == summary.Requests(0, 0) and len(measured) == 2 * len(blocks)
    assert len({apart for apart, _ in started}) == 2 and [server.awakes for _, server in started] == [1, 1]
    assert stopped == [server for _, server in started]
    assert [row["groups"] for row in summary.summarise(measured, [1, 3])] == [2, 2]
    assert set(rooms) == {None} if given else None not in rooms
    assert found.new_tokens == 2 * 4 * 6, "the ramp and the groups fit in the tokens asked for"


def test_a_request_that_ends_early_is_lost(tmp_path):
    class Broken(Decode):
        def body(self):
            given = super().body()
            given["sampling_params"]["max_new_tokens"] -= 1
            return given

    with running(Broken) as url:
        found = bench.parse([*RUN, "--groups", "1", "--steps", "5"])
        assert bench.send_all(SimpleNamespace(url=url, log=tmp_path), "x", found) == 4
