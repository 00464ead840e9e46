"""The resume benchmark: which token counts as the first after an admission, its ratios and its bounds."""

from __future__ import annotations

import math

import pytest

from benchmarks.resume import run as bench

# A prompt of 100 tokens; the copy of 104 was made with 5 tokens generated, the sixth came 30 ms after the admission.
RESUME = {"tokens": 104, "admitted": 1000.0, "load_ms": 2.0, "bytes": 10}
ARRIVED = {1: 999.0, 5: 1000.005, 6: 1000.030, 7: 1000.040}


def test_a_token_from_before_the_retract_that_arrives_late_does_not_count() -> None:
    assert bench.after_admission(RESUME, 100, ARRIVED) == pytest.approx(30.0, abs=0.01)


def test_a_resume_that_no_token_followed_is_not_taken_for_a_fast_one() -> None:
    assert math.isnan(bench.after_admission(RESUME, 100, {5: 1000.005}))


def test_ratios_are_of_the_median_recompute_and_judged_at_64k() -> None:
    row = {"tokens": 65536, "resumes": 4, "load_ms": 10.0, "to_token_ms": 50.0}
    (joined,) = bench.join([row], {65536: [2900.0, 9000.0, 3100.0]})
    assert joined["recompute_ms"] == 3100.0
    assert joined["load_faster"] == pytest.approx(310.0)
    assert joined["to_token_faster"] == pytest.approx(62.0)
    assert all(entry["ok"] for entry in bench.judge([joined]))
    slow = bench.judge([joined | {"load_faster": 299.0, "to_token_faster": 49.0, "resumes": 2}])
    assert not any(entry["ok"] for entry in slow)
    assert len(bench.judge([joined | {"tokens": 4096}])) == 1


def test_the_longest_request_and_the_one_that_stays_fit_the_servers() -> None:
    arguments = bench.parse(["--config", "c.json", "--experts", "4", "--tokens", "4096", "65536"])
    given = bench.room(arguments)
    context = int(given[given.index("--context-length") + 1])
    assert context >= 65536 + arguments.new_tokens
    assert int(given[given.index("--max-total-tokens") + 1]) >= context + (1 << 14) + bench.KEEPER
