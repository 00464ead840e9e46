"""Second turns beside played servers: the benchmark runs to its end, and a cache that lies misses its bound."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from fake_http import COPIED, Plain, running, series

from benchmarks import plain_pressure, second_turns
from sglang_dsv4.livetest.score import APART
from sglang_dsv4.livetest.zeroing import OFF, VARIABLE

FAR = "second turns from a flushed cache, beyond stock's and 3 standard errors"
FOUND = "of them, found in the prefix cache"


class Stock(Plain):
    """A server whose prefix cache has whole conversations; wrong: how far their scores are then from computed ones."""

    facts: ClassVar = {"cached_tokens": 9, "cached_tokens_details": {"device": 4, "host": 5}}
    has, wrong = True, 0.0

    def do_POST(self) -> None:
        if self.path.startswith("/flush_cache"):
            type(self).has = False
            self.begin()
        else:
            type(self).has |= not self.body().get("return_logprob")
            super().do_POST()

    def cached(self, prompt: list[int]) -> int:
        return (len(prompt) - 1) * self.has

    def scores(self, prompt: list[int], answer: list[int]) -> list[float]:
        return [-2.0 + self.has * self.wrong for _ in answer]


class Package(Stock):
    """A server that saves and loads for each request, and reads a word."""

    log, word, held = Path(), Path(), 0
    copies: ClassVar = [0]
    hit = 0.0

    def do_POST(self) -> None:
        if not self.path.startswith("/flush_cache") and not self.body().get("return_logprob"):
            self.copies[0] += 1
            with self.log.open("a") as out:
                out.write(COPIED)
        type(self).wrong = self.hit * (self.word.read_text() != OFF)
        super().do_POST()

    def do_GET(self) -> None:
        self.begin()
        if self.path == "/metrics":
            self.wfile.write(series(self.copies[0], held=self.held))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command beside played servers; returns its status, the bounds that it misses, and what it started."""
    started = {}

    def launch(role, model, words, environment, folder, apart=0):
        handler = Stock if apart == APART else Package
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "plain.log"
        log.touch()
        if handler is Package:
            Package.log, Package.word = log, Path(environment[VARIABLE])
        started[handler] = words, environment
        url = stack.enter_context(running(handler))
        return SimpleNamespace(
            url=url, log=log, stop=int, suspend=int, wake=int, awake=contextlib.nullcontext, handler=handler
        )

    def command(*words, **package):
        for name, value in {"hit": 1.0, "held": 0, "facts": Stock.facts, **package}.items():
            monkeypatch.setattr(Package, name, value)
        sizes = "--conversations 5 --concurrency 2 --shared 300 --prompt 3 40 --new-tokens 4 9 --at-least 10"
        folders = ["--logs", str(tmp_path), "--out", str(tmp_path)]
        status = second_turns.main(["--model-path", "m", *sizes.split(), *folders, *words])
        bounds = json.loads((tmp_path / "second-turns.json").read_text())["bounds"]
        return status, [bound["name"] for bound in bounds if not bound["ok"]], started

    for module in (plain_pressure.servers, second_turns.servers):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(plain_pressure.servers, "wait_until_up", lambda *_: None)
    monkeypatch.setattr(plain_pressure, "warm_up", lambda *_: None)
    monkeypatch.setattr(second_turns.servers, "end_when_told", lambda: None)
    monkeypatch.setattr(second_turns, "SETTLES", 0)
    monkeypatch.setattr(second_turns, "LEAST_LOADS", 10)
    monkeypatch.setattr(Package, "copies", [0])
    with contextlib.ExitStack() as stack:
        yield command


HICACHE = ("--", "--enable-hierarchical-cache", "--hicache-ratio", "2")


def test_it_runs_to_its_end(run):
    status, missed, started = run(*HICACHE)
    assert (status, missed) == (0, [])
    assert all(words[-3:] == list(HICACHE[1:]) for words, _ in started.values())
    environment = started[Package][1]
    assert environment["SGLANG_TEST_RETRACT_INTERVAL"] == "15" and environment["DSV4_VERIFY"] == "1"
    assert "SGLANG_TEST_RETRACT" not in started[Stock][1] and started[Stock][1]["DSV4_ENABLED"] == "0"


@pytest.mark.parametrize(
    ("words", "package", "missed"),
    [
        (HICACHE, {"facts": {"cached_tokens": 9}}, ["tokens of prompts that HiCache brought from the host"]),
        ((), {"facts": {"cached_tokens": 9}}, []),
        ((), {"hit": 0.0}, [f"{FAR}, {second_turns.DAMAGED}"]),
        ((), {"held": 7}, ["host memory held at the end, bytes"]),
        ((), {"cached": lambda *_: 0}, [f"{FOUND}, {name}" for name in ("with this package", second_turns.DAMAGED)]),
        (("--at-least", "11"), {}, ["retracts"]),
        (("--conversations", "4", "--at-least", "8"), {}, ["retracts answered by a load"]),
    ],
)
def test_each_fault_misses_its_bound(run, words, package, missed):
    assert run(*words, **package)[:2] == (int(bool(missed)), missed)


def test_a_cache_that_is_wrong_without_damage_is_seen():
    row = {"run": "stock", "distance": 0.1, "distance_error": 0.01}
    for distance, far in ((0.14, False), (0.15, True)):
        assert (second_turns.farther(row | {"distance": distance}, row) > 0) == far


@pytest.mark.parametrize("words", ["--zero", "--interval 0", "--prompt 9 3", "--model-path /nosuch", "--conv 3"])
def test_bad_arguments_end_in_one_line(words, capsys):
    with pytest.raises(SystemExit) as ended:
        second_turns.parse(["--model-path", "m", *words.split()])
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1
