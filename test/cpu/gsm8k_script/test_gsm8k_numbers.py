"""Numbers in answers, and what is counted of them."""

from __future__ import annotations

import time
from fractions import Fraction
from math import comb

import pytest
from gsm8k.questions import gold_number, last_number
from gsm8k.score import mcnemar, wilson


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("#### 42", "42"),
        ("it is 7, no, 42.", "42"),
        ("42.0", "42"),
        ("42.00.", "42"),
        ("42.50", "42.5"),
        ("042", "42"),
        ("0", "0"),
        ("000.0", "0"),
        ("-0.0", "0"),
        (".50", "0.5"),
        ("100", "100"),
        ("1,234", "1234"),
        ("1,234.", "1234"),
        ("12,345,678.90 in all", "12345678.9"),
        ("$1,234.50.", "1234.5"),
        ("**$42**", "42"),
        ("\\boxed{42}", "42"),
        ("42%", "42"),
        ("42$", "42"),
        ("-5", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\u22125", "-5"),
        ("= -1,000.0", "-1000"),
        ("(-5)", "-5"),
        ("10-5", "5"),
        ("$10-$5", "5"),
        ("(3)-5", "5"),
        ("10%-15%", "15"),
        ("pages 10\u201315", "15"),
        ("----42", "42"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("21,234", "21234"),
        ("12, 345", "345"),
        ("<<6*7=42>>42 apples", "42"),
        ("42\r\n\n", "42"),
        ("9" * 5000, "9" * 5000),
        ("-" * 5000 + "1", "1"),
        ("\u0664\u0662", None),
        ("", None),
        ("no number", None),
        ("$-.,", None),
        ("\ud800 42", "42"),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


def test_last_number_of_long_texts_is_quick() -> None:
    started = time.perf_counter()
    for text in ("1," * 100_000, "1" * 200_000, "111," * 50_000, "-" * 200_000, "$-" * 100_000, "." * 200_000):
        last_number(text)
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("a 3\n#### 1,234", "1234"),
        ("#### $5.00", "5"),
        ("#### -9", "-9"),
        ("#### 1 #### 2", "2"),
        ("no mark 5", None),
        ("####", None),
        ("#### none", None),
        ("5 ####", None),
        ("#### 3/4", None),
    ],
)
def test_gold_number(answer: str, gold: str | None) -> None:
    assert gold_number(answer) == gold


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (5, 5, 1.0),
        (1, 2, 1.0),
        (0, 6, 0.03125),
        (6, 0, 0.03125),
        (1, 5, 0.21875),
        (2, 10, 0.03857421875),
        (10, 0, 0.001953125),
        (6, 14, 0.11531829833984375),
        (25, 15, 0.15386),
    ],
)
def test_mcnemar(b: int, c: int, p: float) -> None:
    assert mcnemar(b, c) == pytest.approx(p, rel=1e-4)


def test_mcnemar_is_exact_and_bounded() -> None:
    for b in range(12):
        for c in range(12):
            n, least = b + c, min(b, c)
            both = sum(comb(n, i) for i in range(n + 1) if min(i, n - i) <= least)
            assert mcnemar(b, c) == float(Fraction(both, 2**n))
    assert 0 <= mcnemar(0, 3000) < 1e-300
    assert mcnemar(1500, 1500) == 1.0


@pytest.mark.parametrize(
    ("right", "count", "interval"),
    [
        (0, 10, (0.0, 0.27753)),
        (10, 10, (0.72247, 1.0)),
        (50, 100, (0.40383, 0.59617)),
        (81, 263, (0.25527, 0.36619)),
        (1, 1, (0.20655, 1.0)),
    ],
)
def test_wilson(right: int, count: int, interval: tuple[float, float]) -> None:
    assert wilson(right, count) == pytest.approx(interval, abs=2e-5)


def test_wilson_stays_a_share() -> None:
    for count in range(1, 400):
        assert wilson(0, count)[0] >= 0
        assert wilson(count, count)[1] <= 1


def test_wilson_of_nothing() -> None:
    assert wilson(0, 0) is None
