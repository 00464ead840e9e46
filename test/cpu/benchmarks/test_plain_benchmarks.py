"""Runs the benchmark of a plain server under pressure over fake ones: a bad result misses its bounds."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from fake_http import Plain, running

from benchmarks import plain_pressure as pressure
from benchmarks.plain_pressure import PACKAGE, STOCK

RETRACTED = "[t] KV cache pool is full. Retract requests. #retracted_reqs: 60, #new_tokens_gained: 9\n"
PREFILL = "[t] Prefill batch, #new-seq: 1, #new-token: 500, #cached-token: 0, #running-req: 3\n"
LOADED = "[t] loaded 700 tokens, 1.9 MB in 1.50 ms; copies alive 0, 0.00 of 1.00 GiB held\n"
WORDS = ["--model-path", "m", "--rounds", "2", "--conversations", "6", "--concurrency", "2", "--shared", "9",
         "--prompt", "3", "40", "--new-tokens", "4", "9"]  # fmt: skip
SESSIONS = ["--sessions", "--turns", "3", "--follow-up", "5", "8"]
COUNTED = {"held_bytes_at_end": 0, "sessions": {"hits": {"window": 3, "pages": 0}, "points": 0}}

LOW_END = "the same, low end of the 99% interval"


def missed(bounds):
    return [bound["name"] for bound in bounds if not bound["ok"]]


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Runs the command's measurement beside fake servers; returns its rows and its servers."""

    def measure(arguments):
        def post(where, path, body, timeout):
            if not path.startswith("/flush"):
                return posts(where, path, body, timeout)
            for name, one in servers.items():
                one.log.write_text(one.log.read_text() + RETRACTED + PREFILL + LOADED * (name == PACKAGE))

        monkeypatch.setattr(pressure.servers, "post", post)
        monkeypatch.setattr(pressure, "counted_at", lambda _: COUNTED)
        return pressure.measure(servers, arguments), servers

    posts = pressure.servers.post
    with running(Plain) as url:
        servers = {
            name: SimpleNamespace(url=url, log=tmp_path / file, awake=contextlib.nullcontext, wake=int, suspend=int)
            for name, file in ((PACKAGE, "package.log"), (STOCK, "stock.log"))
        }
        for server in servers.values():
            server.log.touch()
        yield measure


def test_a_run_under_pressure_gives_its_rows_and_misses_what_is_bad(measured):
    arguments = pressure.parse(WORDS)
    rows, servers = measured(arguments)
    for row in rows:
        if row["run"] in servers:
            assert (row["whole"], row["engine_retracts"], row["loads"]) == (12, 60, int(row["run"] == PACKAGE))
            row["busy_tokens_a_second"] = 110.0 if row["run"] == PACKAGE else 100.0
    assert missed(pressure.judge(rows, arguments)) == []
    one = next(row for row in rows if row["run"] == PACKAGE and row["round"] == 0)
    for key, value, bound in (
        ("whole", 11, "requests without a whole answer, but for those cut off"),
        ("trouble", ["leak detected"], "trouble in the log"), ("busy_tokens_a_second", 95.0, LOW_END),
        ("engine_retracts", -11, f"retracts, {PACKAGE}"), ("loads", -1, "retracts answered by a load"),
    ):  # fmt: skip
        changed = [row | {key: value} if row is one else row for row in rows]
        assert bound in missed(pressure.judge(changed, arguments)), key
    beside_hicache = pressure.parse([*WORDS, "--", "--enable-hierarchical-cache"])
    for rate, slow in ((98.5, False), (97.5, True)):
        changed = [row | {"busy_tokens_a_second": rate} if row is one else row for row in rows]
        assert (LOW_END in missed(pressure.judge(changed, beside_hicache))) == slow, rate
        assert LOW_END in missed(pressure.judge(changed, arguments))


def test_conversations_that_go_on_are_judged_by_their_sessions(measured, monkeypatch):
    arguments = pressure.parse([*WORDS, *SESSIONS])
    asked = []
    monkeypatch.setattr(pressure.score, "score_each", lambda _, load, *__: asked.append(load) or scored(load))
    monkeypatch.setattr(Plain, "facts", {"cached_tokens": 9, "cached_tokens_details": {"device": 4, "host": 5}})
    rows, servers = measured(arguments)
    lengths = [len(prompt) for number, prompt in enumerate(asked[0].prompts[:18]) if number % 3]
    for row in rows:
        if row["run"] in servers:
            assert row["whole"] == 18, "three turns of six conversations"
            assert row["from_host"] == 18 * 5
            if row["round"] == 0:
                assert row["later_turns_cached"] == 12 * 9 / sum(lengths)
            row |= {"busy_tokens_a_second": 155.0 if row["run"] == PACKAGE else 100.0, "loads": 0, "engine_retracts": 1}
    first, second, third = asked[0].prompts[:3]
    assert second[: len(first)] == first and third[: len(second)] == second
    assert 5 <= len(second) - len(first) - asked[0].new_tokens[0] <= 8, "the answer, and what the turn adds"
    assert second[-5:] != asked[0].prompts[4][-5:], "each conversation has its own"
    assert missed(pressure.judge(rows, arguments)) == [], "no retract needs a load, and one is enough"
    ours = [row for row in rows if row["run"] == PACKAGE]
    all_of = next(row for row in rows if row["run"] == f"all of {PACKAGE}")
    sessions = COUNTED["sessions"]
    for where, key, value, bound in (
        (ours[0], "busy_tokens_a_second", 149.0, LOW_END), (ours[0], "engine_retracts", -1, f"retracts, {PACKAGE}"),
        (all_of, "sessions", sessions | {"hits": {}}, "turns that went on from a session"),
        (all_of, "sessions", sessions | {"points": 1}, "points left after a flush"),
        (all_of, "held_bytes_at_end", 1, "host memory held at the end, bytes"),
    ):  # fmt: skip
        changed = [row | {key: value} if row is where else row for row in rows]
        assert missed(pressure.judge(changed, arguments)) == [bound], key
    slow = [row | {"busy_tokens_a_second": 149.0} if row in ours else row for row in rows]
    assert missed(pressure.judge(slow, arguments)) == ["tokens a second, by stock's: median round", LOW_END]


def test_a_conversation_that_comes_to_its_time_before_it_is_cut_off_is_cut_off(monkeypatch):
    """The timer fires late: the first turn is whole, and the second one is not sent any more."""
    arguments = pressure.parse([*WORDS, *SESSIONS, "--most-seconds", "1000"])
    talks = pressure.Conversations.of("seed", arguments, arguments.turns, arguments.follow_up)
    with running(Plain) as url:
        run = pressure.Talks(talks, arguments, url)
        asked = run.ask

        def ask(*words):
            answer = asked(*words)
            run._ends = 0.0
            return answer

        monkeypatch.setattr(run, "ask", ask)
        outcomes = [answer.outcome for answer in run.execute("late").answers]
    assert outcomes.count("whole") >= 1
    assert outcomes.count("cut") == len(outcomes) - outcomes.count("whole") > 0


def scored(load):
    """The scores of ``load``, all alike."""
    return [[-1.0] * count for count in load.new_tokens]


@pytest.mark.parametrize(
    ("words", "found"),
    [([], {"DSV4_SESSIONS": "off"}), (["--sessions"], {"DSV4_SESSIONS": "auto", "DSV4_HOST_GB": "8"})],
)
def test_this_package_is_told_whether_to_keep_sessions(words, found, tmp_path, monkeypatch):
    started = {}

    def launch(role, model, given, environment, folder, apart=0):
        started[environment["DSV4_ENABLED"]] = environment
        return SimpleNamespace(url="", suspend=int, stop=int)

    monkeypatch.setattr("sys.argv", ["x", *WORDS, *words, "--logs", str(tmp_path), "--out", str(tmp_path)])
    for name, value in {"launch": launch, "wait_until_up": lambda *_: None, "end_when_told": lambda: None}.items():
        monkeypatch.setattr(pressure.servers, name, value)
    for name, value in {"warm_up": lambda *_: None, "measure": lambda *_: [], "judge": lambda *_: []}.items():
        monkeypatch.setattr(pressure, name, value)
    assert pressure.main() == 0
    assert {name: value for name, value in started["1"].items() if name in found | {"DSV4_HOST_GB": 0}} == found
    assert "DSV4_SESSIONS" not in started["0"]


def test_sessions_beside_hicache_are_refused():
    with pytest.raises(SystemExit):
        pressure.parse([*WORDS, "--sessions", "--", "--enable-hierarchical-cache"])


def test_a_rate_while_requests_wait_needs_more_conversations_than_clients(capsys):
    with pytest.raises(SystemExit):
        pressure.parse(["--model-path", "m", "--conversations", "24"])
    assert "--conversations 24: more than --concurrency" in capsys.readouterr().err
