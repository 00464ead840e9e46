"""Scenes beside played servers: the benchmark runs to its end, and each fault of a server misses its bound."""

from __future__ import annotations

import contextlib
import json
import random
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
from fake_http import Plain, play_servers, running, series
from PIL import Image

from benchmarks import plain_pressure, scenes
from benchmarks.scenes import ALL, PACKAGE, PAGE, SCENES, STOCK
from sglang_dsv4.livetest.load import SHAPES
from sglang_dsv4.livetest.score import APART
from sglang_dsv4.metrics import SessionCounters

OTHERS = {scenes.WINDOWS: (1, 30), scenes.PAGES: (1, 90)}
KIND_AFTER = {30: "window", 90: "pages"}
SLOW, SLOWER = 0.02, 0.08  # seconds of a prefill; where times are judged, which a busy machine makes longer
EVICTING = [scene.name for scene in SCENES if scene.lost]
HITS, READ = "later prompts that hit, share, ", "later prompts read that it has cached, share, "
FAR = "scores from those on a flushed server, beyond stock's and 3 standard errors, "
TOKENS = "first token, median, by stock's, "


def begins(tokens: list[int], known: set[int]) -> int:
    """The longest beginning of whole pages, of all tokens but the last, that is known."""
    ends = range((len(tokens) - 1) // PAGE * PAGE, 0, -PAGE)
    return next((end for end in ends if hash(tuple(tokens[:end])) in known), 0)


class Stock(Plain):
    """A server that knows the pages of all it computed until others evict them, or a flush."""

    device: ClassVar[set[int]] = set()
    evicts, flushes, slow, short, off = True, True, SLOW, 0, 0.1  # off: scores of cached tokens

    def do_POST(self) -> None:
        if self.path.startswith("/flush_cache"):
            self.flush()
            self.begin()
            return
        body = self.body()
        prompt = body["input_ids"]
        if len(prompt) in KIND_AFTER:
            self.evict(KIND_AFTER[len(prompt)])
            super().do_POST()
        elif len(prompt) in SHAPES and body["sampling_params"]["temperature"] == 0 and not body.get("stream"):
            super().do_POST()  # a warm-up
        elif body.get("return_logprob"):
            self.had = self.find(prompt[: body["logprob_start_len"] + 1])
            super().do_POST()
        elif body.get("stream"):
            had = self.find(prompt)
            self.facts = {"cached_tokens": had, "cached_tokens_details": {"host": had}}
            time.sleep(0 if had else self.slow)
            super().do_POST()
            self.compute(prompt)
        else:
            self.first_answers(prompt, **body["sampling_params"])

    def first_answers(self, prompt, max_new_tokens, temperature, ignore_eos, n=1, stop_token_ids=()) -> None:
        assert temperature > 0 and ignore_eos != bool(stop_token_ids)
        count = max_new_tokens - self.short if ignore_eos else 5
        answers = [random.choices(range(10, 2000), k=count) for _ in range(n)]
        for answer in answers:
            self.compute([*prompt, *answer])
        said = [{"output_ids": answer, "meta_info": {}} for answer in answers]
        self.begin()
        self.wfile.write(json.dumps(said if n > 1 else said[0]).encode())

    def flush(self) -> None:
        if self.flushes:
            self.device.clear()

    def evict(self, kind: str) -> None:
        if self.evicts:
            self.device.clear()

    def compute(self, tokens: list[int]) -> None:
        self.device.update(hash(tuple(tokens[:end])) for end in range(PAGE, len(tokens), PAGE))

    def find(self, prompt: list[int]) -> int:
        return begins(prompt, self.device)

    def cached(self, prompt: list[int]) -> int:
        return self.had

    def scores(self, prompt: list[int], answer: list[int]) -> list[float]:
        return [-2.0 + self.off * bool(self.had) for _ in answer]


class Package(Stock):
    """A server that keeps sessions of all it computed on its host."""

    device: ClassVar[set[int]] = set()
    host: ClassVar[set[int]] = set()
    sessions = SessionCounters()
    kind = "pages"
    finds, compares, forgets, lies = True, True, True, 0.0

    def flush(self) -> None:
        super().flush()
        self.host.clear()
        self.sessions.points = 0 if self.forgets else 1

    def evict(self, kind: str) -> None:
        super().evict(kind)
        type(self).kind = kind

    def compute(self, tokens: list[int]) -> None:
        super().compute(tokens)
        self.host.update(hash(tuple(tokens[:end])) for end in range(PAGE, len(tokens), PAGE))

    def find(self, prompt: list[int]) -> int:
        there, kept = super().find(prompt), begins(prompt, self.host) * self.finds
        if kept > there:
            self.sessions.hits[self.kind] += 1
            self.sessions.verified += self.compares
            self.off = Stock.off + self.lies
        return max(there, kept)

    def do_GET(self) -> None:
        self.begin()
        if self.path == "/metrics":
            self.wfile.write(series(0, sessions=self.sessions))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command beside played servers; returns its status, the bounds that it misses, and what it started."""
    started = {}

    def launch(role, model, words, environment, folder, apart=0):
        handler = Stock if apart == APART else Package
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "plain.log"
        log.write_text(command.log if handler is Package else "")
        started[handler] = words, environment
        url = stack.enter_context(running(handler))
        return SimpleNamespace(url=url, log=log, stop=written, suspend=int, awake=contextlib.nullcontext)

    def written():
        assert (tmp_path / "sessions-scenes.json").exists(), "the run may be cut off while servers end"

    def command(*words, stock=None, **package):
        for handler, given in ((Stock, stock or {}), (Package, package)):
            for name, value in given.items():
                monkeypatch.setattr(handler, name, value, raising=name != "log")
        command.log = package.get("log", "")
        sizes = "--conversations 2 --prompt 600 900 --new-tokens 260 300"
        folders = ["--logs", str(tmp_path), "--out", str(tmp_path)]
        status = scenes.main(["--model-path", "m", *sizes.split(), *folders, *words])
        bounds = json.loads((tmp_path / "sessions-scenes.json").read_text())["bounds"]
        return status, [bound["name"] for bound in bounds if not bound["ok"]], started

    play_servers(monkeypatch, launch)
    monkeypatch.setattr(plain_pressure, "warm_up", lambda *_: None)
    monkeypatch.setattr(scenes, "SETTLES", 0)
    monkeypatch.setattr(scenes, "PAUSE", 0)
    monkeypatch.setattr(scenes, "OTHERS", OTHERS)
    monkeypatch.setattr(Package, "sessions", SessionCounters())
    for handler in (Stock, Package):
        handler.device.clear()
    command.folder = tmp_path
    with contextlib.ExitStack() as stack:
        yield command


def test_every_scene_has_a_row_of_both_servers(run):
    status, missed, started = run("--host-gb", "2", "--", "--mem-fraction-static", "0.5", stock={"slow": SLOWER})
    assert (status, missed) == (0, [])
    *rows, total = json.loads((run.folder / "sessions-scenes.json").read_text())["rows"]
    assert {(row["scene"], row["run"]) for row in rows} == {(s.name, name) for s in SCENES for name in (PACKAGE, STOCK)}
    assert len(rows) == 2 * len(SCENES) and (total["scene"], total["run"]) == (ALL, PACKAGE)
    of = {row["scene"]: row for row in rows if row["run"] == PACKAGE}
    assert [len(of[name]["cached"]) for name in ("later turn", "three forks of an answer")] == [2, 6]
    assert len(of["a turn behind each of best of 4"]["first_token_ms"]) == 8
    assert of["prompt of 4,096 k + 1 tokens"]["cached"] == of["prompt of 4,096 k + 1 tokens"]["on_host"] == [4096, 8192]
    assert of["later turn, windows lost"]["loads"]["window"] > 0 == of["tool call back in 50 ms"]["loads"]["pages"]
    trimmed = of["reply trimmed by 31 tokens"]  # the second one across a page end; this server has each page end
    assert trimmed["could_be"][0] == trimmed["cached"][0] and trimmed["could_be"][1] < trimmed["cached"][1]
    table = (run.folder / "sessions-scenes.md").read_text()
    assert all(f"| {scene.name} | {scene.lost or 'nothing'} |" in table for scene in SCENES)
    assert table.endswith("All bounds are met.\n")
    with Image.open(run.folder / "sessions-scenes.png") as picture:
        assert len(picture.getcolors(9999)) > 3
    words, environment = started[Package]
    assert words == started[Stock][0] and words[-2:] == ["--mem-fraction-static", "0.5"]
    kept = [environment[f"DSV4_{name}"] for name in ("SESSIONS", "HOST_GB", "VERIFY")]
    assert kept == ["auto", "2.0", "1"] and "DSV4_SESSIONS" not in started[Stock][1]


@pytest.mark.parametrize(("words", "package", "missed"), [
    ((), {"finds": False}, ["loads of windows alone where they were evicted",
     *(bound + name for name in EVICTING for bound in (HITS, READ))]),
    ((), {"lies": 0.5}, [FAR + name for name in (*EVICTING, ALL)]),
    ((), {"compares": False}, ["loads of sessions not compared with their copy"]),
    (("--verify", "0"), {"compares": False}, []), ((), {"forgets": False}, ["points left after a flush"]),
    ((), {"short": 2}, ["requests without a whole answer"]),
    ((), {"log": "[t] leak detected\n"}, ["trouble in the log"]),
])  # fmt: skip
def test_each_fault_misses_its_bound(run, words, package, missed):
    status, found, _ = run(*words, **package)
    assert [name for name in found if not name.startswith(TOKENS)] == missed  # those are by chance here
    assert status == int(bool(found))
    table = (run.folder / "sessions-scenes.md").read_text()
    assert all(f"- {name}: " in table for name in missed)


def test_a_server_that_loads_slower_than_stock_computes_misses_its_bound(run, monkeypatch):
    monkeypatch.setattr(Stock, "slow", 0)
    find = Package.find
    monkeypatch.setattr(Package, "find", lambda server, prompt: time.sleep(SLOWER) or find(server, prompt))
    assert run()[1] == [TOKENS + name for name in EVICTING]


def test_a_stock_server_that_evicts_nothing_or_has_nothing_tells_nothing(run):
    missed = run(stock={"evicts": False})[1]
    assert "share that stock has cached where everything was evicted" in missed
    missed = run(stock={"find": lambda *_: 0})[1]
    assert missed == ["later prompts read that stock has cached, share"]


def test_a_flush_that_empties_nothing_is_seen(run):
    assert "tokens found after a flush" in run(flushes=False)[1]


@pytest.mark.parametrize(("prompt", "first", "said", "end"), [
    (range(300), 300, 600, 256),  # regenerate
    (range(257), 257, 600, 256), (range(256), 256, 600, 0),
    (range(900), 300, 513, 512),  # a next turn
    (range(900), 300, 512, 256),
    (range(900), 300, 1200, 256),  # a reply that was cut before its last page end
    ([*range(256), 5, 5], 300, 600, 0), ([*range(257), 5, 5], 257, 600, 256), ([5], 300, 600, 0),
])  # fmt: skip
def test_a_prompt_can_go_on_from_the_last_page_end_that_was_kept(prompt, first, said, end):
    assert scenes.reach([*prompt], [*range(first)], [*range(first, said)]) == end
