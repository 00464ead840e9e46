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
from sglang_dsv4.livetest.in_server import FILE
from sglang_dsv4.livetest.score import APART
from sglang_dsv4.livetest.zeroing import OFF
from sglang_dsv4.metrics import SessionCounters

FAR = "second turns from a flushed cache, beyond stock's and 3 standard errors"
FOUND = "of them, found in the prefix cache"


OTHERS = {second_turns.WINDOWS: (3, 30), second_turns.PAGES: (3, 90)}
KIND_AFTER = {30: "window", 90: "pages"}


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
    """A server that saves and loads for each request, reads a word, and keeps sessions of conversations."""

    log, word, held = Path(), Path(), 0
    copies: ClassVar = [0]
    hit = 0.0
    sessions: SessionCounters | None = None
    kind, compares, forgets = "", True, True

    def do_POST(self) -> None:
        if self.path.startswith("/flush_cache"):
            self.keep(points=0 if self.forgets else 1)
        elif self.body().get("return_logprob"):
            self.go_on()
        else:
            self.keep(points=1)
            type(self).kind = KIND_AFTER.get(len(self.body()["input_ids"]), "")
            self.copies[0] += 1
            with self.log.open("a") as out:
                out.write(COPIED)
        type(self).wrong = self.hit * (self.word.read_text() != OFF)
        super().do_POST()

    def keep(self, points: int) -> None:
        if self.sessions is not None:
            self.sessions.points = points

    def go_on(self) -> None:
        """After other requests, a conversation that is not flushed is loaded."""
        if self.sessions is not None and self.has and self.kind:
            self.sessions.hits[self.kind] += 1
            self.sessions.verified += self.compares

    def do_GET(self) -> None:
        self.begin()
        if self.path == "/metrics":
            self.wfile.write(series(self.copies[0], held=self.held, sessions=self.sessions))


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
            Package.log, Package.word = log, Path(environment[FILE])
        started[handler] = words, environment
        url = stack.enter_context(running(handler))
        return SimpleNamespace(
            url=url, log=log, stop=int, suspend=int, wake=int, awake=contextlib.nullcontext, handler=handler
        )

    def command(*words, **package):
        monkeypatch.setattr(Package, "sessions", SessionCounters() if "--sessions" in words else None)
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
    monkeypatch.setattr(second_turns, "OTHERS", OTHERS)
    monkeypatch.setattr(Package, "copies", [0])
    monkeypatch.setattr(Package, "kind", "")
    with contextlib.ExitStack() as stack:
        command.folder = tmp_path
        yield command


HICACHE = ("--", "--enable-hierarchical-cache", "--hicache-ratio", "2")


def test_it_runs_to_its_end(run):
    status, missed, started = run(*HICACHE)
    assert (status, missed) == (0, [])
    assert all(words[-3:] == list(HICACHE[1:]) for words, _ in started.values())
    environment = started[Package][1]
    assert environment["SGLANG_TEST_RETRACT_INTERVAL"] == "15" and environment["DSV4_VERIFY"] == "1"
    assert "SGLANG_TEST_RETRACT" not in started[Stock][1] and started[Stock][1]["DSV4_ENABLED"] == "0"


def test_sessions_are_read_when_the_windows_are_lost_and_when_all_is(run):
    status, missed, started = run("--sessions", "--host-gb", "2")
    assert (status, missed) == (0, [])
    environment = started[Package][1]
    assert (environment["DSV4_SESSIONS"], environment["DSV4_HOST_GB"]) == ("auto", "2.0")
    assert "DSV4_SESSIONS" not in started[Stock][1]
    result = json.loads((run.folder / "second-turns.json").read_text())
    assert {row["run"]: row["hits"] for row in result["rows"]} == {
        "stock": {}, "with this package, windows lost": {"window": 5},
        "with this package, all lost": {"pages": 5, "window": 0},
        f"{second_turns.DAMAGED}, all lost": {"pages": 5, "window": 0},
    }  # fmt: skip


LOADED = "conversations loaded, with this package"


@pytest.mark.parametrize(
    ("package", "missed"),
    [
        ({"hit": 0.0}, [f"{FAR}, {second_turns.DAMAGED}, all lost"]),
        ({"compares": False}, ["loads of sessions not compared with their copy"]),
        ({"forgets": False}, ["points left after a flush"]),
        ({"go_on": lambda _: None}, [f"{LOADED}, windows lost: window", f"{LOADED}, all lost: pages"]),
    ],
)
def test_each_fault_of_sessions_misses_its_bound(run, package, missed):
    assert run("--sessions", **package)[:2] == (1, missed)


def test_sessions_that_are_wrong_without_damage_are_seen(run, monkeypatch):
    monkeypatch.setattr(Package, "do_POST", wrong_when_loaded(Package.do_POST))
    assert run("--sessions")[1] == [f"{FAR}, with this package, windows lost", f"{FAR}, with this package, all lost"]


def wrong_when_loaded(answer):
    def do_POST(self):
        self.word.write_text("c4_kv" if self.kind else self.word.read_text())
        answer(self)

    return do_POST


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
