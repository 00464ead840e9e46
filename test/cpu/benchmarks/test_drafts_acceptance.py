"""What the benchmark of drafts says of steps whose acceptance is known."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.drafts import acceptance, summary
from benchmarks.drafts.summary import Step
from sglang_dsv4.livetest.drafting import ARMS, BOTH, NO_RETRACT, ROWS, WITHOUT, ZEROED

Chance = Callable[[str, int, bool], float]  # that a draft is right: word, tokens since, whether it is the first step


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough to see what is made to be seen."""
    monkeypatch.setattr(summary, "DRAWS", 1000)


def chance(word: str, since: int, first: bool) -> float:
    if word in (WITHOUT, ZEROED):
        return 0.2 + 0.75 * min(1, since / 127) ** 2
    return 0.0 if word == ROWS and first else 0.95


def steps_of(chance: Chance, resumes: int = 200) -> list[Step]:
    draw, found = random.Random(1), []
    for word in ARMS:
        for number in range(resumes):
            since, seconds = 0, 0.0
            while since < 256:
                seconds += 0.01
                right = chance(word, since, since == 0)
                accepted = 1 + next((drafts for drafts in range(3) if draw.random() >= right), 3)
                found.append(Step(word, f"r{number}", 1, 40, since, accepted, seconds))
                since += accepted
    return found


def missed(steps: list[Step], words: Sequence[str] = ARMS) -> list[str]:
    return [bound["name"] for bound in summary.judge(steps, words) if not bound["ok"]]


def test_what_comes_back_whole_is_like_no_retract() -> None:
    steps = steps_of(chance)
    assert not missed(steps)
    means = {(row["arm"], row["first"], row["last"]): row for row in summary.acceptance(steps)}
    first = {word: means[word, 1, 8]["mean"] for word in ARMS}
    assert first[WITHOUT] < first[ROWS] < first[BOTH] and first[ZEROED] < first[ROWS]
    row = means[NO_RETRACT, 1, 127]
    assert row["low"] < row["mean"] < row["high"] and row["resumes"] == 200


def test_a_bound_is_missed_by_a_row_that_is_lost_and_by_a_control_that_is_not() -> None:
    one_row_short = steps_of(lambda word, since, first: chance(WITHOUT if word == BOTH else word, since, first))
    assert any(BOTH in name for name in missed(one_row_short))
    late = steps_of(lambda word, since, first: 0.7 if word == BOTH and 32 <= since < 64 else chance(word, since, first))
    assert missed(late) == [f"{BOTH}, tokens 33 to 64: tokens a step above no retract, high end"]
    harmless = missed(steps_of(lambda *_: 0.9))
    assert [name.split(",")[0] for name in harmless][:3] == [WITHOUT, ZEROED, ROWS]


def test_a_plain_server_has_no_state_to_lose() -> None:
    steps = [step for step in steps_of(chance) if step.word != ROWS]
    assert not missed(steps, [word for word in ARMS if word != ROWS])


def test_the_time_to_a_token_is_that_of_the_step_that_brings_it() -> None:
    steps = [Step(BOTH, "r", 1, 40, since, 4, since / 100) for since in range(0, 256, 4)]
    short = [Step(BOTH, "s", 1, 40, 0, 64, 0.5)]
    near, far = summary.reached([*steps, *short])
    assert [(row["to_token"], row["resumes"], row["of"]) for row in (near, far)] == [(64, 2, 2), (128, 1, 2)]
    assert (near["p50_ms"], near["steps"]) == (550, 8.5) and (round(far["p50_ms"]), far["steps"]) == (1240, 32)


def test_a_run_is_summed_up_again_from_its_steps(tmp_path: Path) -> None:
    """Also one that was cut off, in the middle of a line."""
    file = tmp_path / "steps.jsonl"
    file.write_text("\n".join(json.dumps(step) for step in steps_of(chance)) + '\n["no re')
    assert acceptance.main(["--steps", str(file), "--out", str(tmp_path), "--name", "again"]) == 0
    result = json.loads((tmp_path / "again.json").read_text())
    assert {row["arm"] for row in result["rows"]} == set(ARMS)
    assert (tmp_path / "again.png").is_file()


def test_over_the_fake_transfer_only_requests_with_a_window_of_their_own_count() -> None:
    arguments = acceptance.parse(["--model-path", "M", "--fake", "--", "--mem-fraction-static", "0.9"])
    assert (arguments.score, arguments.least_before, arguments.server) == (0, 160, ["--mem-fraction-static", "0.9"])


def test_arms_without_the_one_they_are_compared_with_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """At the end of the run there would be nothing to judge its answers by."""
    with pytest.raises(SystemExit):
        acceptance.parse(["--model-path", "M", "--arms", BOTH, WITHOUT])
    assert f"--arms without '{NO_RETRACT}'" in capsys.readouterr().err


def test_servers_of_dspark_have_its_config_and_no_state_to_lose() -> None:
    arguments = acceptance.parse(
        ["--model-path", "M", "--dspark", "--requests", "3", "--", "--mem-fraction-static", "0.9"]
    )
    word, config, *rest = arguments.server
    assert word == "--json-model-override-args" and json.loads(config)["dspark_block_size"] == 7
    assert rest == ["--mem-fraction-static", "0.9"]
    assert acceptance.words_of(arguments) == (NO_RETRACT, WITHOUT, BOTH, ZEROED)
    assert (arguments.requests, arguments.interval) == (3, 12), "what is given wins"
    usual = acceptance.parse(["--model-path", "M"])
    assert "--json-model-override-args" not in usual.server and (usual.requests, usual.interval) == (160, 3)
    assert acceptance.parse(["--model-path", "M", "--dsp"]).requests == 128, "an abbreviation is as good"


ONE = ("--rounds", "1", "--score", "0")


def test_a_retract_that_was_computed_again_says_nothing_of_a_copy() -> None:
    arguments = acceptance.parse(["--model-path", "M", "--arms", NO_RETRACT, BOTH, "--at-least", "2", *ONE])
    did = {"lost": 0, "refused": 0, "trouble": []}
    rows = [{"run": NO_RETRACT, "engine_retracts": 0, "loads": 0, **did}]
    for loads, missed in ((3, []), (2, [f"retracts without a load, {BOTH}"])):
        given = [*rows, {"run": BOTH, "engine_retracts": 3, "loads": loads, **did}]
        assert [bound["name"] for bound in acceptance.judge(given, arguments) if not bound["ok"]] == missed


def test_a_run_for_the_time_misses_an_arm_that_never_came_so_far(tmp_path: Path) -> None:
    far, near = ([Step(word, "r", 1, 200, since, 4, since / 100) for since in range(0, until, 4)]
                 for word, until in ((NO_RETRACT, 160), (WITHOUT, 64)))  # fmt: skip
    file = tmp_path / "steps.jsonl"
    for steps, missed in ((far + near, True), (far + [step._replace(word=WITHOUT) for step in far], False)):
        file.write_text("\n".join(map(json.dumps, steps)))
        words = ["--steps", str(file), "--fake", "--arms", NO_RETRACT, WITHOUT, "--out", str(tmp_path), "--name", "t"]
        acceptance.main(words)
        bounds = json.loads((tmp_path / "t.json").read_text())["bounds"]
        assert [bound["ok"] for bound in bounds if "came to token 128" in bound["name"]] == [not missed]


DID: dict[str, object] = {"lost": 0, "refused": 0, "trouble": [], "loads": 3}
TURNS = [{"run": NO_RETRACT, "engine_retracts": 0, **DID}, {"run": BOTH, "engine_retracts": 3, **DID}]
SCORES = [
    {"run": name, "answers": 4, "mean": -1.0, "unlikely": 0.0} for name in ("score of control", f"score of {BOTH}")
]
CUT_OFF = {
    "nothing": ([*TURNS, *SCORES], set()),
    "before its last turn": (TURNS[:1], {"turns left out", f"retracts, {BOTH}", "words whose answers were not scored"}),
    "before its scores": (TURNS, {"words whose answers were not scored"}),
    "between its scores": ([*TURNS, SCORES[0]], {"words whose answers were not scored"}),
    "within a score": (
        [*TURNS, SCORES[0], {**SCORES[1], "answers": 3}], {f"answers scored, {BOTH}"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("cut", CUT_OFF)
def test_what_a_run_that_was_cut_off_left_out_is_missed(cut: str) -> None:
    """And what its servers did until then is judged, whatever is not there."""
    arguments = acceptance.parse(
        ["--model-path", "M", "--arms", NO_RETRACT, BOTH, "--at-least", "2", "--rounds", "1", "--score", "4"]
    )
    rows, missed = CUT_OFF[cut]
    for lost in (0, 1):
        bounds = acceptance.judge([{**rows[0], "lost": lost}, *rows[1:]], arguments)
        expected = missed | ({f"lost or refused, {NO_RETRACT}"} if lost else set())
        assert {bound["name"] for bound in bounds if not bound["ok"]} == expected
