"""``sglang-dsv4 stress`` from its command line to its result, over fake servers: started ones, and some that run."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path

import pytest
from stress_servers import SCORE, Running, finds, judged, missed_by

from sglang_dsv4.cli import stress
from sglang_dsv4.command_line import to_its_end
from sglang_dsv4.livetest import load, runs, score
from sglang_dsv4.metrics import SessionCounters

README = (Path(__file__).parents[3] / "benchmarks" / "README.md").read_text()


def test_a_server_that_runs_is_told_by_its_metrics(run, decode):
    status, found = run("--attach", decode, "--at-least", "6")
    row = found["rows"][0]
    assert status == 0, found["bounds"]
    assert (row["whole"], row["saves"], row["loads"], row["verified"]) == (6, 6, 6, 6)
    assert (row["saved_bytes"], row["save_ms_mean"], row["load_ms_mean"]) == pytest.approx((6000, 2, 4))
    assert (row["held_high_gib"], row["arena_gib"], row["ranks"], row["ranks_apart"]) == (0.5, 1.0, 2, 0)
    assert row["fallbacks"] == {}, "what happened before is not counted"
    Running.verifies = False
    assert missed_by(run("--attach", decode)[1]) == ["loads not compared with their copy"]
    assert run("--attach", decode, "--verify", "0")[0] == 0


def test_a_server_that_runs_is_told_by_its_log(run, decode, tmp_path, monkeypatch):
    Running.dark = True
    log = tmp_path / "decode.log"
    line = "[t] {} {} tokens, 1.9 MB in 1.50 ms; copies alive {}, 0.30 of 1.00 GiB held\n"
    log.write_text(line.format("saved", 900, 1))

    class Writing(runs.RetractStats):
        def read(self):
            with log.open("a") as out:
                out.write(line.format("saved", 300, 2) + line.format("loaded", 300, 1))
            return super().read()

    monkeypatch.setattr(runs, "RetractStats", Writing)
    status, found = run("--attach", decode, "--log", str(log))
    row = found["rows"][0]
    assert (row["saves"], row["loads"], row["longest_saved"]) == (1, 1, 300), "of the run's own lines alone"
    assert status == 1 and missed_by(found) == ["copies alive at the end", "loads not compared with their copy"]


def test_a_server_that_tells_nothing_and_a_port_without_one_are_refused(run, decode, capsys):
    Running.dark = True
    status = partial(to_its_end, "stress")
    assert status(lambda: run("--attach", decode)[0]) == 2
    assert "--enable-metrics" in capsys.readouterr().err and Running.served == 0
    assert status(lambda: run("--attach", "http://127.0.0.1:9")[0]) == 2
    said = capsys.readouterr().err
    assert "http://127.0.0.1:9" in said and "Connection refused" in said and "port" in said
    assert "package" not in said and "metrics" not in said


def test_tokens_are_scored_and_zeroed_families_are_seen(run, launched):
    Running.held_by_rank = (0, 0)
    started = ("--model-path", "m", "--transfer", "nixl", "--interval", "3")
    status, found = run(*started, "--score", "4", "--zero", "c4_kv", "c4_state")
    assert status == 0, missed_by(found)
    scores = {row["run"].removeprefix("score of "): row for row in found["rows"][1:]}
    tokens = scores["control"]["tokens"]
    assert {name: (row["mean"], row["tokens_unlike_control"]) for name, row in scores.items()} == {
        "control": (-1, 0), "retracts": (-1, 0), "retracts again": (-1, 0),
        "c4_kv zeroed": (-15, tokens), "c4_state zeroed": (-15, tokens),
    }  # fmt: skip
    assert found["rows"][0]["verified"] == 6, "the requests sent again are not part of the run"
    assert len(set(Running.rooms)) == len(Running.rooms) == 18, "a room that was used is never used again"
    environment, control = launched["decode"].environment, launched["control"].environment
    assert environment["SGLANG_TEST_RETRACT_INTERVAL"] == "3" and environment["DSV4_VERIFY"] == "1"
    assert control["DSV4_ENABLED"] == "0" and "SGLANG_TEST_RETRACT" not in control
    assert {name: server.stops for name, server in launched.items()} == {"prefill": 1, "decode": 1, "control": 1}


def test_a_plain_server_is_warmed_up_and_its_control_stands_beside_it(run, launched):
    Running.held_by_rank = (0, 0)
    status, found = run("--model-path", "m", "--plain", "--interval", "3", "--score", "4", "--at-least", "17")
    assert status == 0, missed_by(found)
    assert launched.keys() == {"plain", "control"} and set(Running.rooms) == {None}
    environment = launched["plain"].environment
    assert environment["SGLANG_RADIX_FORCE_MISS"] == environment["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] == "1"
    assert [server.stops for server in launched.values()] == [1, 1]


ROWS = {
    name: shlex.split(command)
    for name, command in re.findall(
        r"^\| ([\w-]+) \| `((?:DSV4_\w+=\S+ )*sglang-dsv4 stress [^`]+)`", README, re.MULTILINE
    )
}
MADE = "eager steps, or ranks' graphs, whose metadata is made here"
FELL_BACK = "retracts without a copy because of HostMemoryExhausted"
KILLED = "store processes killed"
# A played server prepares nothing, has room, and no store process.
MISSED = {"graph-stress": [MADE], "small-arena-stress": [FELL_BACK], "store-stress": [KILLED]}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_benchmarks_runs_to_its_end(run, launched, monkeypatch, name):
    """With fewer and shorter requests; a server that loses a token misses a bound."""
    Running.held_by_rank = (0, 0)
    words = ROWS[name]
    monkeypatch.setattr(Running, "facts", finds())
    Running.sessions = SessionCounters() if {"--turns", "--keep-tree"} & set(words) else None
    end = words.index("--")
    first = words.index("stress") + 1
    for setting in words[: first - 2]:
        monkeypatch.setenv(*setting.split("=", 1))
    few = ["--requests", "6", "--prompt", "3", "9", "--new-tokens", "4", "8", "--at-least", "6"]
    few += ["--score", "4"] if "--score" in words else []
    command = [*words[first:end], *few, "--name", "stress", *words[end:]]
    status, found = run(*command)
    assert missed_by(found) == MISSED.get(name, []) and status == int(name in MISSED)
    least = {bound["name"]: bound["bound"] for bound in found["bounds"]}.get(SCORE)
    within = float(words[words.index("--within") + 1]) if "--within" in words else score.MEAN_SLACK
    assert least == (f">= {-1 - within:.4f}" if "control" in launched else None)
    tested = launched["plain" if "--plain" in words else "decode"]
    assert tested.given[-len(words[end + 1 :]) :] == words[end + 1 :]
    monkeypatch.setattr(Running, "bad", dict.fromkeys((0, 1), "short"))
    assert missed_by(run(*command)[1])[0].startswith("whole answers")


CHOICES = ["--model-path", "tools/tiny_checkpoint/v4", "--choices", "--score", "4"]
WAYS = {"pair": ["--transfer", "nixl"], "plain": ["--plain", "--at-least", "17"]}
BY_TOKEN = "positions that chose otherwise by token id"
FOREIGN, ZEROED = "share of foreign positions, after retracts", "share of foreign positions, choices zeroed"


@pytest.mark.parametrize("way", WAYS)
def test_choices_are_compared_where_they_are_recorded(run, launched, way):
    """A decode server has none of a prompt. The choices of zeroed copies are seen, and their tokens are as likely."""
    Running.held_by_rank = (0, 0)
    status, found = run(*CHOICES, *WAYS[way])
    assert status == 0, missed_by(found)
    rows = {row["run"].removeprefix("score of "): row for row in found["rows"][1:]}
    prompts = [answer.prompt for answer in found_answers(run)]
    control, zeroed = rows["control"], rows["choices zeroed"]
    assert control["choices_compared"] == zeroed["choices_compared"] == 4 and control["foreign"] == 0
    assert control["positions"] == control["tokens"] - 4 + sum(prompts) * (way == "plain")
    assert zeroed["foreign"] == zeroed["by_token_differ"] / zeroed["positions"] > 0.05 and zeroed["mean"] == -1
    assert all("--enable-return-routed-experts" in server.given for server in launched.values())


def found_answers(run) -> list[load.Answer]:
    """The first scored requests of the command's load."""
    words = ["--model-path", "m", "--requests", "6", "--prompt", "3", "9", "--new-tokens", "4", "8"]
    return [load.Answer("whole", prompt=len(prompt)) for prompt in load.Load.of(stress.parse(words)).prompts[:4]]


@pytest.mark.parametrize(("change", "missed"), [
    (lambda rows: rows[1:] + rows[-1:], [BY_TOKEN, FOREIGN, "share of experts swapped, after retracts"]),
    (lambda rows: [*rows[:-1], [9] * len(rows[0])], [BY_TOKEN, FOREIGN]),
    (lambda rows: rows[1:], ["whole answers without a row", "choices compared, answers after retracts", ZEROED]),
    (lambda rows: [], ["whole answers without a row", "choices compared, answers after retracts", ZEROED]),
], ids=["shifted", "last row foreign", "one lost", "none"])  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("launched")
def test_a_server_that_returns_wrong_choices_misses_its_bounds(run, monkeypatch, way, change, missed):
    Running.held_by_rank = (0, 0)
    monkeypatch.setattr(Running, "change", staticmethod(change))
    found = missed_by(run(*CHOICES, *WAYS[way])[1])
    assert all(any(name.startswith(part) for name in found) for part in missed), found


@pytest.mark.parametrize(("change", "missed"), [
    ({}, []), ({"fallbacks": {"StaleWeights": 3}}, []), ({"whole": 8}, ["whole answers, of 9"]),
    ({"whole": 8, "refused": 1}, ["whole answers, of 9"]), ({"alive": False}, ["server alive at the end"]),
    ({"trouble": ["VerifyMismatch"]}, ["trouble in the log"]),
    ({"saves": 9}, ["retracts with a copy", "saves without a load"]), ({"loads": 9}, ["saves without a load"]),
    ({"copies_alive_at_end": 1}, ["copies alive at the end"]),
    ({"ranks_apart": 1}, ["ranks that decided otherwise than the first"]),
    ({"ranks": 1}, ["ranks that said what they decided"]), ({"verified": 9}, ["loads not compared with their copy"]),
    ({"held_bytes_at_end": 1}, ["host memory held at the end, bytes"]),
    ({"held_bytes_at_end": None}, ["metrics of this package"]),
    # on a plain server every retract has a load or a reason
    ({"engine_retracts": 10}, []), ({"engine_retracts": 9}, ["retracts"]),
    ({"engine_retracts": 11}, ["retracts with neither a load nor a reason"]),
    ({"engine_retracts": 14, "fallbacks": {"YoungRequest": 4}}, []),
    ({"engine_retracts": 21, "fallbacks": {"YoungRequest": 11}}, ["retracts answered by a load, share"]),
])  # fmt: skip
def test_each_fault_misses_its_bound(change, missed):
    assert judged(change, plain="engine_retracts" in change) == missed


@pytest.mark.parametrize(("refused", "failed", "fine"), [(2, 0, True), (3, 0, False), (1, 1, False), (0, 1, False)])
def test_requests_may_be_refused_but_not_fail(refused, failed, fine):
    change = {"whole": 9 - refused - failed, "refused": refused}
    assert judged(change, may_refuse=2) == ([] if fine else ["whole answers, of 9"])
