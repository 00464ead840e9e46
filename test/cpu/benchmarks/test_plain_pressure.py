"""Conversations under pressure: second turns follow first ones, the rate is that of a full queue, faults are seen."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
from fake_http import Plain, running

from benchmarks import plain_pressure as pressure
from benchmarks.plain_pressure import PACKAGE, PAGE, STOCK, WINDOW, Conversations, Talks
from sglang_dsv4.livetest import score
from sglang_dsv4.livetest.load import Answer, Load

WORDS = ["--model-path", "m", "--rounds", "2", "--conversations", "6", "--concurrency", "2", "--shared", "9",
         "--prompt", "3", "40", "--new-tokens", "4", "9"]  # fmt: skip
RETRACT = "[t] Testing retraction. #retracted_reqs: 60, #new_tokens_gained: 9\n"
PREFILL = "[t] Prefill batch, #new-seq: 1, #new-token: 500, #cached-token: 0, #running-req: 3\n"
LOADED = "[t] loaded 700 tokens, 1.9 MB in 1.50 ms; copies alive 0, 0.00 of 1.00 GiB held\n"


@pytest.mark.parametrize("prompt", range(1, 2 * PAGE, 37))
def test_half_of_the_first_turns_end_a_little_behind_an_edge(prompt):
    for wanted in range(1, 300, 13):
        new = pressure.ending_behind_an_edge(prompt, wanted)
        assert wanted <= new < wanted + PAGE and 0 < (prompt + new - 1) % PAGE < WINDOW


def test_both_servers_get_the_same_conversations_and_rounds_differ():
    arguments = pressure.parse(WORDS)
    first, again, other = (Conversations.of(seed, arguments) for seed in ("1-0", "1-0", "1-1"))
    assert first == again != other
    beginnings = {tuple(prompt[:9]) for prompt in first.first.prompts}
    assert len(beginnings) == pressure.SHARED and len(first.first.prompts) == 6


def of(rows, name):
    """The rows of one server's rounds."""
    return [row for row in rows if row["run"] == name]


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The rows of a run over two fake servers, whose logs grow at each flush."""
    with running(Plain) as url:

        def server(name: str) -> SimpleNamespace:
            log = tmp_path / f"{name}.log"
            log.touch()
            awake = contextlib.nullcontext
            return SimpleNamespace(url=url, log=log, awake=awake, wake=lambda: None, suspend=lambda: None)

        servers = {PACKAGE: server("package"), STOCK: server("stock")}
        posts = pressure.servers.post

        def post(where, path, body, timeout):
            if not path.startswith("/flush"):
                return posts(where, path, body, timeout)
            for name, one in servers.items():
                one.log.write_text(one.log.read_text() + RETRACT + PREFILL + LOADED * (name == PACKAGE))

        monkeypatch.setattr(pressure.servers, "post", post)
        monkeypatch.setattr(pressure, "package_and_stock", lambda _: contextlib.nullcontext(servers))
        monkeypatch.setattr(pressure, "counted_at", lambda _: {"held_bytes_at_end": 0})
        yield pressure.measure(pressure.parse(WORDS))


def test_a_run_gives_its_rows_and_bounds(measured):
    arguments = pressure.parse(WORDS)
    bounds = {bound["name"]: bound for bound in pressure.judge(measured, arguments)}
    missed = [name for name, bound in bounds.items() if not bound["ok"]]
    assert [name for name in missed if not name.startswith(("tokens a second", "the same"))] == []
    assert [row["run"] for row in of(measured, PACKAGE)] == [PACKAGE] * 2
    assert {row["finished"] for row in of(measured, PACKAGE)} == {12}
    assert {row["engine_retracts"] for row in of(measured, STOCK)} == {60}, "each round reads its own lines"
    assert [row["answers"] for row in measured if row["run"].startswith("score of")] == [24, 24]
    assert [row["loads"] for row in of(measured, PACKAGE)] == [1, 1]


def test_a_second_turn_continues_the_first_ones_answer():
    arguments = pressure.parse(WORDS)
    talks = Conversations.of("1-0", arguments)
    with running(Plain) as url:
        run = Talks(talks, arguments, url).execute("x")
    for number, prompt in enumerate(talks.first.prompts):
        first, second = run.answers[2 * number : 2 * number + 2]
        assert run.load.prompts[2 * number] == prompt
        assert run.load.prompts[2 * number + 1] == prompt + first.tokens + talks.follow_ups[number]
        assert len(second.tokens) == talks.later_tokens[number]
    assert score.scored("x", "http://127.0.0.1:9", run.load, [Answer("lost")] * 12, 1)["answers"] == 0


def test_the_rate_is_of_the_time_in_which_requests_wait_to_be_sent():
    run = Talks(Conversations(Load([], []), [], []), pressure.parse(WORDS), "url")
    now = time.monotonic()
    run.began, run._last_begun, run.seconds = now, now + 2, 5.0
    run.answers = [Answer("finished", arrived=[(now + 1, 4), (now + 1.5, 6), (now + 4, 9)]), Answer("lost")]
    run.load = Load([[1], [2]], [9, 9])
    found = run.summary()
    assert (found["busy_seconds"], found["busy_tokens_a_second"]) == pytest.approx((2, 3))


class Slow(Plain):
    """Answers until it is told to abort; then no more."""

    def do_POST(self) -> None:
        body = self.body()
        if self.path == "/abort_request":
            assert body["abort_all"]
            self.begin()
            self.wfile.write(b"{}")
            stop.set()
            return
        if stop.wait(0 if body["sampling_params"]["max_new_tokens"] < 7 else 10):
            self.begin()
            finish = {"type": "abort", "message": "by all"}
            self.chunk({"output_ids": [], "meta_info": {"completion_tokens": 0, "finish_reason": finish}})
            return
        super().do_POST()


stop = threading.Event()


def test_a_round_that_takes_too_long_is_cut_off():
    arguments = pressure.parse([*WORDS, "--most-seconds", "0.3"])
    stop.clear()
    with running(Slow) as url:
        run = Talks(Conversations.of("1-0", arguments), arguments, url).execute("x")
    found = run.summary()
    assert found["cut"] > 0 and found["lost"] == found["refused"] == 0
    assert found["cut"] + found["finished"] == 12 and 0.25 < found["busy_seconds"] < 5


def rows(**change: object) -> list[dict]:
    base = {"lost": 0, "finished": 12, "refused": 0, "trouble": [], "engine_retracts": 60, "loads": 9}
    found = []
    for round_ in range(2):
        for name, rate in ((PACKAGE, 110.0), (STOCK, 100.0)):
            found.append({"run": name, "round": round_, "busy_tokens_a_second": rate, **base})
    for key, value in change.items():
        if key in found[0]:
            found[0 if key != "engine_retracts" else 1][key] = value
    held = {} if change.get("dark") else {"held_bytes_at_end": change.get("held", 0)}
    scores = {score.CONTROL: -1.4, PACKAGE: change.get("mean", -1.4)}
    return [
        *found, {"run": f"all of {PACKAGE}", **held}, {"run": f"all of {STOCK}"},
        *({"run": f"score of {name}", "answers": 24, "mean": mean, "unlikely": 0} for name, mean in scores.items()),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"lost": 1}, ["requests lost or refused"]),
        ({"trouble": ["leak detected"]}, ["trouble in the log"]),
        ({"engine_retracts": -50}, [f"retracts, {STOCK}"]),
        ({"dark": True}, ["metrics of this package"]),
        ({"held": 1}, ["host memory held at the end, bytes"]),
        ({"busy_tokens_a_second": 95.0}, ["the same, low end of the 99% interval"]),
        ({"mean": -2.0}, [f"mean log probability of a token, {PACKAGE}"]),
    ],
)
def test_each_fault_misses_its_bound(change, missed):
    bounds = pressure.judge(rows(**change), pressure.parse(WORDS))
    assert [bound["name"] for bound in bounds if not bound["ok"]] == missed
