"""The teacher-forced score: likely tokens pass, a lost family's do not, and a check that cannot fail is noticed."""

import pytest
from fake_http import Plain, running

from sglang_dsv4.livetest import score
from sglang_dsv4.livetest.load import Answer, Load

PROMPTS = [[11, 12, 13], [40] * 7, [5]]
LOAD = Load(PROMPTS, [8, 8, 8])
GOOD = [Answer("whole", [sum(prompt) % 97 + i for i in range(8)]) for prompt in PROMPTS]
BETWEEN = [Answer("whole", [answer.tokens[0] + 1, *answer.tokens[1:]]) for answer in GOOD]


@pytest.fixture(scope="module")
def plain():
    with running(Plain) as url:
        yield url


def test_the_answer_alone_is_scored_each_token_behind_all_before_it(plain):
    assert score.read(plain, PROMPTS[0], GOOD[0].tokens, 5)[0] == [-1.0] * 8
    assert score.read(plain, PROMPTS[0], BETWEEN[0].tokens, 5)[0] == [-15.0, *[-1.0] * 7]


def test_the_vocabularys_last_token_is_named_0_by_the_engine(monkeypatch):
    listed = [[None, 7, None], [-1.5, 0, None], [-2.0, 9, None]]
    monkeypatch.setattr(score.servers, "post", lambda *_: {"meta_info": {"input_token_logprobs": listed}})
    assert score.read("url", [5, 7], [2047, 9], 5) == ([-1.5, -2.0], 0)
    for answer in ([2047, 8], [9, 2047, 9]):
        with pytest.raises(ValueError, match=r"does not score|longer|shorter"):
            score.read("url", [5, 7], answer, 5)


def test_a_row_says_mean_lowest_and_share(plain):
    row = score.summary("x", score.score_each(plain, LOAD, BETWEEN, 5))
    assert row == {"run": "score of x", "answers": 3, "tokens": 24, "mean": -2.75, "lowest": -15.0, "unlikely": 0.125}
    some = [Answer("too_few"), *GOOD[1:]]
    assert sum(map(bool, score.score_each(plain, LOAD, some, 5))) == 2, "an answer that is not whole has no score"


def test_a_fall_is_measured_request_by_request():
    """Requests differ in what is likely; a family that matters little is seen all the same."""
    whole = [[[-1.0, -2.0], [-5.0], [-3.0], []], [[-1.2, -1.8], [-5.2], [-3.2], [-1.0]]]
    found = score.fall([[-1.7, -1.7], [-5.2], [-3.2], [-9.0]], whole)
    assert found["fall"] == pytest.approx((-0.2 - 0.1 - 0.1) / 3) and 0 < found["fall_error"] < 0.05
    assert score.fall([[]], [[[-1.0]]]) == {"fall": 0.0, "fall_error": 0.0}, "which misses the bound"


def rows(
    retracts: float = -1.44, unlikely: float = 0.01, zeroed: float = -6.0, answers: int = 100, fall: float = -0.1,
) -> list[dict]:  # fmt: skip
    values = {
        "control": (-1.40, 0.01, 100), "retracts": (retracts, unlikely, answers), "retracts again": (-1.45, 0.01, 100),
        "swa_kv zeroed": (zeroed, 0.5, 100), "c2_state zeroed": (-1.5, 0.01, 100),
    }  # fmt: skip
    return [
        {"run": f"score of {name}", "mean": mean, "unlikely": share, "answers": count, "fall": fall, "fall_error": 0.03}
        for name, (mean, share, count) in values.items()
    ]


@pytest.mark.parametrize(("change", "missed"), [
    ({}, []),
    ({"retracts": -1.85, "unlikely": 0.029}, []),  # rounding by batch is smaller than that
    ({"retracts": -1.95}, ["mean log probability of a token, after retracts"]),
    ({"unlikely": 0.04}, ["share of tokens below -4, after retracts"]),
    ({"answers": 99}, ["answers scored, after retracts"]),
    ({"zeroed": -1.7}, ["mean log probability of a token, swa_kv zeroed"]),
    ({"fall": -0.08}, ["fall and 3 standard errors, c2_state zeroed"]),
])  # fmt: skip
def test_each_fault_misses_its_bound(change, missed):
    assert [bound["name"] for bound in score.judge(rows(**change), 100) if not bound["ok"]] == missed


def test_answers_may_be_asked_to_lie_nearer_than_damaged_ones_must_fall():
    found = score.judge(rows(retracts=-1.46, zeroed=-1.7), 100, within=0.05)
    assert [bound["bound"] for bound in found if not bound["ok"]] == [">= -1.4500", "<= -1.9000"]


@pytest.mark.parametrize(("fall", "answers", "missed"), [(-0.08, 100, []), (-0.1, 100, ["fall"]), (0, 99, ["answers"])])
def test_answers_of_hisparse_are_as_likely_with_retracts_as_without(fall, answers, missed):
    quiet = {"run": f"score of {score.UNDISTURBED}", "mean": -1.6, "unlikely": 0.03, "answers": answers}
    bounds = score.judge([quiet, *rows(fall=fall, zeroed=-6.0)][:-1], 100)
    assert [bound["name"].split()[0] for bound in bounds if not bound["ok"]] == missed
