"""Two runs: asked one after the other, or the second read from its result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_server import Run, Server, asked, right, wrong_at


def test_pair(run: Run, serve: Callable[..., Server]) -> None:
    first, second = serve(wrong_at(2)), serve(wrong_at(2, 4, 5, 6, 7, 8, 9))
    assert run(first.url, "--compare-url", second.url) == 0
    assert {asked(body) for _, body in first.asked} == {asked(body) for _, body in second.asked}
    assert len(first.asked) == len(second.asked) == 10
    summary = run.last()
    assert summary["pair"] == {"pairs": 10, "b": 6, "c": 0, "p": 0.03125, "identical": 4}
    assert (summary["run"]["accuracy"], summary["compare"]["accuracy"]) == (0.9, 0.3)
    assert summary["compare"]["interval95"] == [0.1078, 0.6032]
    assert [bound["name"] for bound in summary["bounds"]] == ["run: failed requests", "compare: failed requests"]
    row = run.result()["rows"][2]
    assert (row["index"], row["answer"], row["compare"]["answer"], row["compare"]["ok"]) == (4, "40", "1", False)
    assert "b 6 (only run right), c 0 (only compare right), exact McNemar p 0.03125; 4 of 10 texts identical" in run.out
    assert "compare: accuracy 0.3000 (3/10)" in run.out
    run(second.url, "--compare-url", first.url)
    assert (run.last()["pair"]["b"], run.last()["pair"]["c"]) == (0, 6)


def test_pair_counts_texts_not_numbers(run: Run, serve: Callable[..., Server]) -> None:
    first = serve(right)
    second = serve(lambda question, body: right(question, body) + (" " if question == "q3" else ""))
    assert run(first.url, "--compare-url", second.url) == 0
    assert run.last()["pair"] == {"pairs": 10, "b": 0, "c": 0, "p": 1.0, "identical": 9}


@pytest.mark.parametrize("side", ["first", "second"])
def test_pair_leaves_failures_out(run: Run, serve: Callable[..., Server], side: str) -> None:
    bad = serve(lambda question, body: (500, "") if question in ("q3", "q4") else right(question, body))
    good = serve(wrong_at(4, 5))
    urls = (bad.url, good.url) if side == "first" else (good.url, bad.url)
    assert run(urls[0], "--compare-url", urls[1]) == 1
    pair = run.last()["pair"]
    assert (pair["pairs"], pair["b"] + pair["c"], pair["identical"]) == (8, 1, 7)
    assert pair["b" if side == "first" else "c"] == 1
    assert run(urls[0], "--compare-url", urls[1], "--allow-failures") == 0


def test_baseline(run: Run, serve: Callable[..., Server]) -> None:
    first, second = serve(wrong_at(2)), serve(wrong_at(2, 3))
    assert run(first.url, "--compare-url", second.url, name="before") == 0
    before = run.result("before")["summary"]["run"]
    assert run(second.url, "--baseline", str(run.path("before"))) == 0
    assert run.last()["pair"] == {"pairs": 10, "b": 0, "c": 1, "p": 1.0, "identical": 9}
    assert run.last()["compare"] == before
    assert len(first.asked) == 10
    rows = run.result()["rows"]
    assert (rows[1]["ok"], rows[1]["compare"]["ok"]) == (False, True)
    assert not {"index", "gold", "compare"} & set(rows[1]["compare"])


def test_failures_of_the_baseline_are_not_this_runs(run: Run, serve: Callable[..., Server]) -> None:
    bad = serve(lambda question, body: (500, "") if question == "q3" else right(question, body))
    assert run(bad.url, name="before") == 1
    assert run(serve(right).url, "--baseline", str(run.path("before"))) == 0
    assert run.last()["pair"]["pairs"] == 9


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--questions", "9"), "--questions"),
        (("--shots", "3"), "--shots"),
        (("--max-new-tokens", "8"), "--max-new-tokens"),
    ],
)
def test_baseline_of_another_run(run: Run, serve: Callable[..., Server], words: tuple[str, ...], flag: str) -> None:
    server = serve(right)
    assert run(server.url, name="before") == 0
    assert run(server.url, "--baseline", str(run.path("before")), *words) == 2
    assert "--baseline" in run.err
    assert flag in run.err
    assert len(server.asked) == 10


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"settings": {}, "rows": [{}], "summary": {"run": {"seconds": 1}}}', "\udcff"]
)
def test_bad_baseline(run: Run, serve: Callable[..., Server], tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert run(serve(right).url, "--baseline", str(tmp_path / "odd.json")) == 2
    assert "odd.json: not a result of this script" in run.err


def test_baseline_with_missing_rows(run: Run, serve: Callable[..., Server]) -> None:
    server = serve(right)
    run(server.url, name="before")
    result = run.result("before")
    del result["rows"][-1]
    run.path("before").write_text(json.dumps(result))
    assert run(server.url, "--baseline", str(run.path("before"))) == 2
    assert "9 rows of 10 questions" in run.err


def test_baseline_is_not_replaced(run: Run, serve: Callable[..., Server]) -> None:
    server = serve(right)
    run(server.url, name="before")
    text = run.path("before").read_text()
    assert run(server.url, "--baseline", str(run.path("before")), name="before") == 2
    assert "--name before: the result would replace --baseline" in run.err
    assert run.path("before").read_text() == text
