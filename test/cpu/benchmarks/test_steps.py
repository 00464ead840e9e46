"""The step benchmarks: blocks with and without the hooks, what is made of their times, what the hooks cost idle."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_http import Decode, running

from benchmarks.steps import hooks, summary
from benchmarks.steps import run as bench
from benchmarks.steps.toggle_hooks import graphs, switch
from sglang_dsv4.engine.prep_attach import NAME
from sglang_dsv4.engine.releases import engine_version

BLOCK = 6

# ---------------------------------------------------------------------- blocks


def test_every_hook_of_a_step_goes_and_comes_back(monkeypatch):
    for name, way in {"PREP": "engine", "PLAIN": "off"}.items():
        monkeypatch.setenv(f"DSV4_{name}", way)
    assert set(switch.places()) == set(hooks.EACH_STEP), "those of a step with a graph"
    for name, way in {"PREP": "stream", "PLAIN": "auto"}.items():
        monkeypatch.setenv(f"DSV4_{name}", way)
    places = switch.places()
    assert set(places) == set(switch.OF_A_STEP)
    try:
        for name, place in places.items():
            place.put(False)
            assert not place.is_in, name
            assert getattr(place.owner, place.name).__module__.startswith("sglang.srt.")
            place.put(True)
            assert place.is_in, name
    finally:
        for place in places.values():
            place.put(True)


def test_without_the_early_start_alone_the_builder_stays(monkeypatch):
    monkeypatch.setenv("DSV4_PREP", "stream")
    assert set(switch.places(switch.EARLY_START)) == set(switch.EARLY_START)
    assert set(switch.EARLY_START) < set(switch.OF_A_STEP)


def test_the_hooks_of_a_graph_go_and_come_back_where_they_are(monkeypatch):
    for way, wanted in (("stream", ()), ("graph", switch.OF_A_GRAPH)):
        monkeypatch.setenv("DSV4_PREP", way)
        places = switch.places(switch.OF_A_GRAPH)
        assert set(places) == set(wanted)
        for place in places.values():
            place.put(False)
            assert not place.is_in
            place.put(True)
            assert place.is_in


def test_the_engine_captures_as_the_switch_takes_it():
    """Names of its own that the switch relies on."""
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend as Engine

    names = list(inspect.signature(Engine.capture_one).parameters)
    assert names == ["self", "shape_key", "forward_fn", "capture_inputs", "post_warmup_hook"]
    for method in (Engine.capture_one, Engine.replay):
        assert {"_graphs", "_outputs"} <= set(method.__code__.co_names)


def test_each_graph_is_captured_both_ways_and_switched():
    """What is captured depends on the hooks alone; the raw metadata is put back before the second capture."""
    method, raw = Other(), [True]

    class Backend:
        def __init__(self) -> None:
            self._graphs, self._outputs = {}, {}

        def capture_one(self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None):
            assert raw == [True], "the capture would not make the metadata"
            raw.clear()
            self._graphs[shape_key], self._outputs[shape_key] = f"{shape_key} {method.is_in}", object()

    found = graphs.Graphs([method])
    found.put(True)
    assert found.is_in is None, "no graph, nothing to compare"
    capture, target, draft = found.capture(Backend.capture_one), Backend(), Backend()
    for backend, shape in ((target, 4), (target, 8), (draft, 8)):
        raw[:] = [True]
        capture(backend, shape, None, post_warmup_hook=lambda: raw.append(True))
    assert found.is_in is True and method.is_in
    outputs = set()
    for hooked in (True, False, True):
        found.put(hooked)
        assert found.is_in is hooked
        assert target._graphs == {4: f"4 {hooked}", 8: f"8 {hooked}"} and draft._graphs == {8: f"8 {hooked}"}
        outputs.add(target._outputs[4])
    assert len(outputs) == 2, "each way has its own"


class Other:
    """A place that remembers what was put there."""

    is_in = True

    def put(self, hooked: bool) -> None:
        self.is_in = hooked


def run(tmp_path, keys) -> tuple[list[dict], list[bool]]:
    """What ``keys``, one a step, write; whether each step had the hooks."""
    ticks = itertools.count(step=10)
    other = Other()
    out = tmp_path / "blocks"
    out.write_text("")
    found = switch.Toggling([other], BLOCK, out, 1, lambda: next(ticks))
    hooked = []
    prepared = 0
    for key in keys:
        found.step(key, prepared)
        hooked.append(other.is_in)
        prepared += other.is_in
    return [json.loads(line) for line in out.read_text().splitlines()], hooked


def test_blocks_come_in_groups_with_each_side_as_early_as_the_other(tmp_path):
    lines, hooked = run(tmp_path, [(2, "a", "b")] * (12 * 4 * BLOCK + 1))
    assert len(lines) == 48
    kinds = set()
    for group in range(12):
        sides = [line["hooked"] for line in lines if line["group"] == group]
        kinds.add(tuple(sides))
        assert sides == [hooked[(4 * group + n) * BLOCK] for n in range(4)]
    assert kinds == {(True, False, False, True), (False, True, True, False)}, "neither is always first"
    for line in lines:
        assert line["ns"] == [10] * (BLOCK - switch.SETTLING)
        assert line["prepared"] == BLOCK * line["hooked"] and line["batch"] == 2 and line["as_meant"]


@pytest.mark.parametrize("other", [None, (2, "c", "d")])
def test_a_batch_that_changes_begins_a_group_anew(tmp_path, other):
    same = [(2, "a", "b")] * (BLOCK + 2)
    lines, _ = run(tmp_path, [*same, other, *same])
    assert [line["group"] for line in lines] == [0, 2]
    assert all(line["ns"] == [10] * (BLOCK - switch.SETTLING) for line in lines)


# ------------------------------------------------------------ what is made of them

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
    assert summary.summarise(blocks, [4]) == [], "a batch that has none yet"


STUCK = [dataclasses.replace(block, as_meant=block.hooked) for block in made_up(1.0)]
WRONG_SIDE = [dataclasses.replace(block, prepared=32) for block in made_up(1.0)]


@pytest.mark.parametrize(
    ("blocks", "requests", "missed"),
    [
        (made_up(1.0), (0, 0), []),
        (STUCK, (0, 0), ["blocks that ran otherwise than meant"]),
        (made_up(0.98), (0, 0), ["low end"]),
        (made_up(1.0, rounds=1), (0, 0), ["starts measured"]),
        ([], (0, 0), ["starts measured"]),
        (made_up(1.0, noise=1.0, groups=8), (0, 0), ["low end", "width of the interval"]),
        (made_up(1.0), (1, 0), ["requests lost"]),
        (made_up(1.0), (0, 1), ["requests retracted"]),
        (made_up(1.0, prep=False), (0, 0), ["steps with the hooks, prepared here"]),
        (WRONG_SIDE, (0, 0), ["steps without them, prepared here"]),
    ],
)
@pytest.mark.parametrize("eager", [["--prep", "stream"], ["--prep", "graph", "--", "--disable-cuda-graph"]], ids=str)
def test_each_fault_misses_its_bound(eager, blocks, requests, missed):
    arguments = bench.parse([*RUN, "--batches", "1", *eager])
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
        seen = []
        bench.measure(found, lambda *there: seen.append(there))
    assert [len(blocks) for blocks, _ in seen] == [8, 8, 16, 16], "what there is after each batch of each start"
    measured, requests = seen[-1]
    assert requests == summary.Requests(0, 0) and len(measured) == 2 * len(blocks)
    assert len({apart for apart, _ in started}) == 2 and [server.awakes for _, server in started] == [2, 2]
    assert stopped == [server for _, server in started]
    assert [row["groups"] for row in summary.summarise(measured, [1, 3])] == [2, 2]
    assert set(rooms) == {None} if given else None not in rooms
    assert found.new_tokens == 2 * 4 * 6, "the ramp and the groups fit in the tokens asked for"


def test_a_run_that_is_cut_off_has_written_what_it_had(tmp_path, monkeypatch):
    def measure(arguments, report):
        report(made_up(1.0, rounds=1), summary.Requests())
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["run", *RUN, "--out", str(tmp_path), "--name", "cut"])
    monkeypatch.setattr(bench.servers, "end_when_told", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        bench.main()
    found = json.loads((tmp_path / "cut.json").read_text())
    assert [row["groups"] for row in found["rows"]] == [30] and (tmp_path / "cut.md").exists()
    missed = [bound["name"] for bound in found["bounds"] if not bound["ok"]]
    assert missed == ["batch 1: starts measured", "batch 3: starts measured"]


@pytest.mark.parametrize("drafts", [[], [bench.DRAFTS, "EAGLE"], [f"{bench.DRAFTS}=EAGLE"]])
def test_a_server_with_drafts_has_one_token_a_step(tmp_path, monkeypatch, drafts):
    """Else its requests would end before the blocks, the earlier the more drafts are accepted."""
    given = ["--", *drafts]
    arguments = bench.parse([*RUN, "--prep", "graph", "--logs", str(tmp_path), *given])
    asked = []
    monkeypatch.setattr(bench.servers, "launch", lambda *given, **_: asked.append(given[3]))
    bench.launch(0, arguments)
    assert ("SGLANG_SIMULATE_ACC_LEN" in asked[0]) is bool(drafts)


@pytest.mark.parametrize("line", [summary.GRAPH_LEFT, summary.PREP_REFUSED])
def test_graphs_that_are_left_to_the_engine_later_miss_a_bound(line, tmp_path):
    log = tmp_path / "log"
    log.write_text(f"{line}: ragged verification\n")
    requests = summary.Requests()
    for _ in range(2):
        requests.count([log])
    assert requests.left == 1
    bounds = summary.judge([], requests, bench.parse([*RUN, "--prep", "graph"]))
    assert "kinds of graphs left to the engine" in [bound["name"] for bound in bounds if not bound["ok"]]


@pytest.mark.parametrize(("early", "prepared"), [(False, 3), (True, 1)])
def test_only_steps_that_were_started_early_count_where_that_is_switched(early, prepared):
    backend = SimpleNamespace(**{NAME: SimpleNamespace(counts=SimpleNamespace(overlapped=1, inline=2))})
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend)))
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="a")], forward_mode=SimpleNamespace(is_decode=lambda: True))
    seen = []
    toggling = SimpleNamespace(step=lambda *given: seen.append(given))
    switch.counting(lambda *_: None, toggling, early)(scheduler, batch)
    assert seen == [((1, "a", "a"), prepared)]


def test_it_measures_our_override(tmp_path):
    words = [sys.executable, "-m", "benchmarks.steps.hooks", "--loops", "2000", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=Path(hooks.__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "hooks.json").read_text())
    assert found["versions"]["sglang"] == engine_version()
    assert [row["hook"] for row in found["rows"]] == list(hooks.EACH_STEP)
    assert all(row["added_ns"] > 20 for row in found["rows"]), "a call of ours takes longer than that"


@pytest.mark.parametrize(
    ("said", "right"), [([bench.GRAPH_PREP], True), ([], False), ([bench.GRAPH_PREP, bench.GRAPH_LEFT], False)]
)
def test_graphs_that_are_the_engines_are_not_measured_as_ours(said, right, tmp_path):
    arguments = bench.parse([*RUN, "--prep", "graph"])
    log = tmp_path / "log"
    log.write_text("\n".join([bench.PACKAGE_AT_WORK, bench.PREP_AT_WORK, *said]))
    if right:
        bench.check_kind(arguments, log)
    else:
        with pytest.raises(bench.WrongServer):
            bench.check_kind(arguments, log)
