"""The comparison of answers with penalties: what is asked, what is compared, and each missed bound."""

from __future__ import annotations

import contextlib
from http.server import ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from fake_http import Decode, running

from benchmarks import plain_penalties as bench

WORDS = ["--rounds", "2", "--new-tokens", "20"]
RETRACTED = "[t] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 9\n"
LOADED = "[t] loaded 700 tokens, 1.9 MB in 1.50 ms; copies alive 0, 0.00 of 1.00 GiB held\n"


class Forgetful(Decode):
    """A plain server; of the answers' tokens the last ``again`` are the first one again."""

    again, log, said = 0, None, ""
    asked: list[dict[str, float]] = []  # noqa: RUF012

    def answer(self, prompt: list[int], count: int) -> list[int]:
        self.asked.append(self.body()["sampling_params"])
        with self.log.open("a") as out:
            out.write(self.said)
        tokens = super().answer(prompt, count)
        return [*tokens[: count - self.again], *tokens[:1] * self.again]


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Runs the benchmark over fake servers that repeat so many tokens, by apart; the arguments and the rows."""

    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 2 * bench.AT_ONCE)  # a round comes all at once

    def command(*again: int):
        launched = []
        with contextlib.ExitStack() as stack:

            def launch(role, model, words, environment, folder, apart):
                number = len(launched)
                log = tmp_path / f"{number}.log"
                log.write_text(RETRACTED * 9)  # while it was warmed up
                forced = environment.get("SGLANG_TEST_RETRACT_INTERVAL") == "6"
                said = (RETRACTED + LOADED * (environment["DSV4_ENABLED"] == "1")) if forced else ""
                kind = type("Kind", (Forgetful,), {"again": again[number], "log": log, "said": said, "asked": []})
                launched.append((role, words, apart, kind, environment["DSV4_ENABLED"]))
                return SimpleNamespace(url=stack.enter_context(running(kind)), log=log)

            monkeypatch.setattr(bench.servers, "launch", launch)
            monkeypatch.setattr(bench.servers, "wait_until_up", lambda *_: None)
            monkeypatch.setattr(bench.servers, "stop_all", lambda _: {})
            monkeypatch.setattr(bench, "warm_up", lambda *_: None)
            arguments = bench.parse(["--model-path", "m", *WORDS, "--logs", str(tmp_path), "--", "--mem", "0.2"])
            return launched, bench.measure(arguments)

    return command


def missed(rows):
    return [bound["name"] for bound in bench.judge(rows) if not bound["ok"]]


def test_three_servers_are_asked_alike_and_compared(measured):
    launched, rows = measured(0, 0, 5)
    assert [(role, apart, enabled) for role, _, apart, _, enabled in launched] == [
        ("plain", 0, "1"), ("plain", 50, "1"), ("plain", 100, "0")
    ]  # fmt: skip
    assert all(words == [*bench.SERVER, "--mem", "0.2"] for _, words, *_ in launched)
    asked = [[params for params in kind.asked if "frequency_penalty" in params] for *_, kind, _ in launched]
    assert [len(params) for params in asked] == [48, 48, 24]
    assert all(params["frequency_penalty"] == 1.5 and params["temperature"] == 0 for of in asked for params in of)
    ours, stock = rows[3], rows[6]
    assert (ours["answers"], ours["from_undisturbed"], ours["equal_answers"]) == (48, 0.0, 48)
    assert (stock["answers"], round(stock["from_undisturbed"], 3)) == (24, -0.25)
    assert [row["retracts"] for row in rows[9:]] == [0, 2 * 3 * 48, 2 * 3 * 24]
    assert missed(rows) == []


def test_a_penalty_that_forgets_misses_its_bound(measured):
    _, rows = measured(0, 1, 5)
    assert missed(rows) == [f"share of distinct tokens from the undisturbed, {name}" for name in bench.PENALTIES]


def test_answers_that_say_more_than_the_undisturbed_miss_it_too(measured):
    _, rows = measured(1, 0, 5)
    assert len(missed(rows)) == len(bench.PENALTIES)


def test_prompts_have_twelve_lengths_in_each_round():
    arguments = bench.parse(["--model-path", "m"])
    lengths = [len(prompt) for prompt in bench.prompts_of(arguments)]
    assert len(lengths) == bench.AT_ONCE * arguments.rounds
    assert set(lengths) == set(lengths[: bench.LENGTHS]) and len(set(lengths)) == bench.LENGTHS
    assert (min(lengths), max(lengths)) == (bench.SHORTEST, bench.LONGEST)


@pytest.mark.parametrize(
    ("row", "change", "name"),
    [
        (3, {"from_undisturbed": -0.0041}, "share of distinct tokens from the undisturbed, presence_penalty"),
        (4, {"answers": 23}, "answers compared, repetition_penalty"),
        (0, {"lost": 1}, "requests lost or refused"),
        (9, {"retracts": 1}, "retracts, undisturbed"),
        (10, {"retracts": 3}, "retracts"),
        (10, {"loads": 3}, "loads"),
        (11, {"trouble": ["leak detected"]}, "trouble in the logs"),
    ],
)
def test_each_fault_misses_its_bound(row, change, name):
    runs = (bench.UNDISTURBED, bench.RETRACTS, bench.STOCK)
    rows = [{"run": run, "penalty": penalty, "answers": 48, "lost": 0, "from_undisturbed": -0.02 * (run == bench.STOCK)}
            for run in runs for penalty in bench.PENALTIES]  # fmt: skip
    rows += [{"run": f"log, {run}", "retracts": 99 * bool(at), "loads": 99, "trouble": []} for at, run in
             enumerate(runs)]  # fmt: skip
    assert missed(rows) == []
    rows[row] |= change
    assert missed(rows) == [name]


def test_stock_that_forgets_nothing_shows_nothing(measured):
    _, rows = measured(0, 0, 0)
    assert missed(rows) == ["the same of stock, where it is farthest"]


def test_no_round_begins_too_late(monkeypatch):
    arguments = bench.parse(["--model-path", "m", *WORDS, "--most-seconds", "-1"])
    assert bench.answers_of("http://127.0.0.1:9", 2, arguments) == {}
