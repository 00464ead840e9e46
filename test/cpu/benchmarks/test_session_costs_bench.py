"""The benchmark of sessions' costs runs each scene beside played servers, and each bad figure misses its bound."""

import contextlib
import itertools
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from fake_http import Plain, play_servers, running, series

from benchmarks import session_costs as costs
from benchmarks.session_costs import ALL, OFF, SESSIONS
from sglang_dsv4.livetest.score import APART
from sglang_dsv4.metrics import SessionCounters

CONFIG = Path(__file__).parents[3] / "tools" / "tiny_checkpoint" / "v4" / "config.json"
LONG = 2048


class Off(Plain):
    """A server that streams long answers until an abort, and lets requests wait that it has no room for."""

    cumulative = False
    waiting = 0  # requests
    holds: ClassVar[tuple[int, ...]] = ()  # lengths of prompts that wait for ever
    aborted: ClassVar = threading.Event()
    log, sessions, gap = Path(), None, 0.001

    def do_POST(self) -> None:
        if self.path == "/abort_request":
            self.aborted.set()
        if not self.path.startswith("/generate"):
            type(self).waiting = 0
            self.begin()
            return
        body = self.body()
        prompts, new = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        if self.sessions is not None:
            self.sessions.kept(2**20, 0.001)
        if isinstance(prompts[0], int):
            if new < costs.LASTS:
                super().do_POST()
            else:
                self.decode()
            return
        if len(prompts[0]) in self.holds:
            type(self).waiting = len(prompts)
            self.aborted.wait(20)
        self.begin()
        facts = {"meta_info": {"e2e_latency": 1.0}}
        self.wfile.write(json.dumps([{"output_ids": self.answer(prompt, new), **facts} for prompt in prompts]).encode())

    def decode(self) -> None:
        self.aborted.clear()
        self.begin()
        for end in range(1, costs.LASTS):
            over = self.aborted.wait(self.gap)
            reason = {"type": "abort", "message": "aborted"} if over else None
            self.chunk({"output_ids": [7], "meta_info": {"completion_tokens": end, "finish_reason": reason}})
            if over:
                return

    def do_GET(self) -> None:
        self.begin()
        if self.path == "/metrics":
            self.wfile.write(series(0, sessions=self.sessions))
            self.wfile.write(f'sglang:num_queue_reqs{{priority=""}} {float(self.waiting)}\n'.encode())


class Sessions(Off):
    aborted: ClassVar = threading.Event()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a scene beside played servers; returns its status, the bounds it misses, its rows and its servers."""
    started, awake = {}, []

    def launch(role, model, words, environment, folder, apart=0):
        handler = {0: Sessions, APART: Off}[apart]
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "plain.log"
        log.write_text("")
        started[handler] = words, environment
        url = stack.enter_context(running(handler))

        @contextlib.contextmanager
        def alone():
            awake.append(handler)
            yield

        return SimpleNamespace(url=url, log=log, stop=written, suspend=int, awake=alone)

    def written():
        assert list(tmp_path.glob("sessions-*.json")), "the run may be cut off while servers end"

    def command(scene, *words):
        sizes = ["--rounds", "2", "--seconds", "0.1", "--timeout", "20", "--long", str(LONG), "--experts", "2"]
        folders = ["--config", str(CONFIG), "--logs", str(tmp_path), "--out", str(tmp_path)]
        status = costs.main(["--scene", scene, *folders, *sizes, *words])
        found = json.loads((tmp_path / f"sessions-{scene}.json").read_text())
        return status, [b["name"] for b in found["bounds"] if not b["ok"]], found["rows"], started, awake

    play_servers(monkeypatch, launch)
    monkeypatch.setattr(costs, "warm_up", lambda *_: None)
    monkeypatch.setattr(costs, "AFTER", 0.05)
    monkeypatch.setattr(costs, "SETTLED", 3)
    monkeypatch.setattr(Sessions, "sessions", SessionCounters())
    with contextlib.ExitStack() as stack:
        yield command


def rows_of(rows: list[dict[str, Any]], size: int) -> list[str]:
    return [row["run"] for row in rows if row["size"] == size]


BY_TURNS = [SESSIONS, OFF, OFF, SESSIONS, ALL + OFF, ALL + SESSIONS]
SPEED = ("tokens a second", "the same", "latency", "longest", "gap, median", "a pass")  # of played servers: any


@pytest.mark.parametrize(("scene", "words", "sizes", "holds", "unlike"), [
    ("crowd", ["--running", "2", "4", "--prompt", "20", "40", "--new-tokens", "3", "5"], (2, 4), (),
     "--stream-interval"),
    ("together", ["--running", "8"], (8,), (), "0.5"),
    ("queue", ["--waiting", "20", "30"], (20, 30), (costs.QUEUED,), "4"),
    ("long", [], (LONG,), (), "--prefill-decode-interval"), ("waiting", [], (LONG,), (LONG,), "lof"),
])  # fmt: skip
def test_a_scene_runs_both_servers_by_turns_to_its_end(run, monkeypatch, scene, words, sizes, holds, unlike):
    monkeypatch.setattr(Off, "holds", holds)
    status, missed, rows, started, awake = run(scene, *words, "--", "--mem-fraction-static", "0.5")
    assert [name for name in missed if not name.startswith(SPEED)] == [] and status == bool(missed)
    assert {size: sorted(rows_of(rows, size)) for size in sizes} == {size: sorted(BY_TURNS) for size in sizes}
    assert rows_of(rows, sizes[0])[:4] == BY_TURNS[:4], "each round changes who is first"
    assert awake == [Off, Sessions, Sessions, Off, Off, Sessions] * len(sizes), "a round is not counted"
    measured = [row for row in rows if "round" in row]
    assert all(row["whole"] == row["asked"] > 0 and row["p50_ms"] > 0 for row in measured)
    (words, ours), (others, off) = started[Sessions], started[Off]
    assert words == others and unlike in words and words[-2:] == ["--mem-fraction-static", "0.5"]
    assert (ours.pop("DSV4_SESSIONS"), off.pop("DSV4_SESSIONS")) == ("auto", "off") and ours == off


def test_servers_are_made_for_the_largest_crowd():
    arguments = costs.parse(["--scene", "crowd", "--config", str(CONFIG)])
    words = costs.Crowd(arguments).words()
    told = dict(itertools.pairwise(words))
    assert told["--max-running-requests"] == told["--cuda-graph-max-bs-decode"] == "256"
    assert int(told["--max-total-tokens"]) >= 256 * (4096 + 200) and arguments.name == "sessions-crowd"


def test_a_prompt_that_does_not_wait_and_a_queue_that_stays_empty_miss_their_bounds(run, monkeypatch):
    monkeypatch.setattr(costs, "QUEUE_FILLS", 0.1)
    assert "rounds in which the prompt waited to the end, 2048 tokens waiting" in run("waiting")[1]
    assert "requests that waited, share, 20 waiting" in run("queue", "--waiting", "20")[1]


def test_a_pass_that_waits_for_sessions_is_seen_in_each_scene(run, monkeypatch):
    monkeypatch.setattr(Off, "holds", (costs.QUEUED,))
    monkeypatch.setattr(Sessions, "gap", 0.03)
    assert "a pass, ms longer, 20 waiting" in run("queue", "--waiting", "20")[1]
    monkeypatch.setattr(Sessions, "gap", 0.2)  # a busy machine holds single tokens of the other back, too
    assert "longest gap of another request, ms longer, 2048 tokens in one prompt" in run("long")[1]
    assert "longest gap of another request, ms longer, 8 end together" in run("together", "--running", "8")[1]


def test_requests_beside_that_end_are_not_whole():
    over = threading.Event()

    class Ends(Off):
        def decode(self) -> None:
            self.begin()
            for end in range(1, 40):
                self.chunk({"output_ids": [7], "meta_info": {"completion_tokens": end}})
            over.wait(20)

    arguments = costs.parse(["--scene", "long", "--config", str(CONFIG)])
    with running(Ends) as url, costs.Decodes(url, 2, "", arguments) as beside:
        over.set()
        while len(beside.ended) < 2:
            time.sleep(0.01)
        assert beside.counted(3, 3) == {"asked": 5, "whole": 3}
        with pytest.raises(costs.servers.ServerDied, match="no tokens came"):
            beside.pass_ms(time.monotonic(), time.monotonic() + 1)


def test_an_error_of_the_server_is_no_answer():
    class Refuses(Off):
        def do_POST(self) -> None:
            self.begin(503)

    with running(Refuses) as url:
        assert costs.count_whole(url, b"{}", 1, 5) == (0, [])


GOOD = {
    "asked": 9, "whole": 9, "trouble": [], "copies": 0, "kept_bytes": 5, "tokens_a_second": 100.0, "p50_ms": 3.0,
    "p99_ms": 10.0, "max_ms": 40.0, "ended_last": 1.0, "waited": 1, "pass_ms": 3.0, "slower": 1.2,
}  # fmt: skip
GAP = "longest gap of another request, ms longer"
RATE = ["tokens a second, by those without, median round", "the same, low end of the 99% interval"]


def every(name: str) -> dict[str, list[str]]:
    """Returns the bound that each scene misses."""
    return {scene: [name] for scene in costs.SCENES}


@pytest.mark.parametrize("scene", costs.SCENES)
@pytest.mark.parametrize(("changed", "missed"), [
    ({}, {}), ({"whole": 8}, every("requests without a whole answer")),
    ({"trouble": ["leak detected"]}, every("trouble in a log")), ({"copies": 1}, every("copies held behind a round")),
    ({"kept_bytes": 0}, every("bytes of points kept, least round")), ({"tokens_a_second": 99.1}, {}),
    ({"tokens_a_second": 98.9}, {"crowd": RATE}),
    ({"p99_ms": 10.3}, {"crowd": ["latency of a request, p99, by that without"]}), ({"max_ms": 44.9}, {}),
    ({"max_ms": 45.1}, {"long": [GAP]}), ({"max_ms": 60.1}, {"long": [GAP], "together": [GAP]}),
    ({"ended_last": 0.8}, {"together": ["requests that ended with the last one, share"]}),
    ({"waited": 0}, {"queue": ["requests that waited, share"],
                     "waiting": ["rounds in which the prompt waited to the end"]}),
    ({"pass_ms": 3.09}, {}), ({"pass_ms": 3.11}, {"queue": ["a pass, ms longer"]}),
    ({"p50_ms": 3.04}, {"waiting": ["gap, median, by that without"]}),
    ({"slower": 1.22}, {"waiting": ["a pass, by one before the prompt came, by those without"]}),
])  # fmt: skip
def test_each_bad_figure_misses_its_bound(scene, changed, missed):
    words = ["--scene", scene, "--config", str(CONFIG), "--running", "64", "--waiting", "64", "--long", "2048"]
    made = costs.SCENES[scene](costs.parse(words if scene in ("crowd", "together") else [*words[:4], *words[6:]]))
    size = made.sizes[0]
    rows = [
        {"run": begins + name, "size": size, **GOOD, **(changed if name == SESSIONS else {})}
        for begins, rounds in (("", 3), (ALL, 1)) for _ in range(rounds) for name in (SESSIONS, OFF)
    ]  # fmt: skip
    bad = [b["name"].removesuffix(f", {size} {made.unit}") for b in costs.judge(rows, made) if not b["ok"]]
    assert bad == missed.get(scene, [])
