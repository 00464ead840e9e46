"""Requests: what is sent, what comes back, what fails, how many at once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from types import ModuleType

import pytest
from fake_server import Run, Server, right, wrong_at


def test_native(run: Run, serve: Callable[..., Server]) -> None:
    server = serve(wrong_at(5, 11))
    assert run(server.url + "/", "--max-new-tokens", "64") == 0
    assert len(server.asked) == 10
    path, body = min(server.asked, key=lambda request: request[1]["text"])
    assert path == "/generate"
    assert body == {
        "text": "Question: q0\nAnswer: It is 0.\n#### 0\n\nQuestion: q1\nAnswer: It is 10.\n#### 10\n\n"
        "Question: q10\nAnswer:",
        "sampling_params": {"temperature": 0, "max_new_tokens": 64, "stop": ["Question:"]},
    }
    result, summary = run.result(), run.last()
    assert summary["bench"] == result["bench"] == "run"
    assert summary["run"] == result["summary"]["run"]
    assert 0 < summary["run"]["latency_median_s"] <= summary["run"]["seconds"] < 60
    assert summary["run"] | {"latency_median_s": 0, "seconds": 0} == {
        "asked": 10, "answered": 10, "failed": 0, "right": 8, "unparsable": 0, "cut": 0, "prefill_errors": 0,
        "accuracy": 0.8, "interval95": [0.4902, 0.9433], "completion_tokens": 70, "latency_median_s": 0, "seconds": 0,
    }  # fmt: skip
    assert result["bounds"] == summary["bounds"] == [
        {"name": "run: failed requests", "bound": "<= 0", "value": 0, "ok": True}
    ]  # fmt: skip
    assert [row["index"] for row in result["rows"]] == list(range(2, 12))
    assert [row["index"] for row in result["rows"] if not row["ok"]] == [5, 11]
    row = result["rows"][3]
    assert (row["gold"], row["answer"], row["completion_tokens"]) == ("50", "1", 7)
    assert 0 < row["latency_s"] < 60
    assert "text" not in row
    assert result["settings"]["servers"] == [{"url": server.url, "model_path": "tiny", "version": "9"}]
    assert {"machine", "versions", "command", "date"} <= set(result)
    assert "accuracy 0.8000 (8/10), 95% interval 0.4902 to 0.9433" in run.out
    assert "pair" not in summary
    assert run.out.count('{"bench"') == 1
    assert run.err == f"{server.url}: 10/10\n"  # not a terminal


def test_openai(run: Run, serve: Callable[..., Server]) -> None:
    server = serve(right)
    assert run(server.url, "--api", "openai", "--model", "flash", "--questions", "3", "--keep-text") == 0
    assert {path for path, _ in server.asked} == {"/v1/completions"}
    _, body = server.asked[0]
    assert body.pop("prompt").endswith("\nAnswer:")
    assert body == {"model": "flash", "temperature": 0, "max_tokens": 512, "stop": ["Question:"]}
    rows = run.result()["rows"]
    assert [row["text"] for row in rows] == [f" so #### {n}.\n" for n in (20, 30, 40)]
    assert [row["completion_tokens"] for row in rows] == [5, 5, 5]
    assert run.last()["run"]["cut"] == 3


def test_unparsable_is_wrong(run: Run, serve: Callable[..., Server]) -> None:
    server = serve(lambda question, body: " dunno" if question == "q4" else right(question, body))
    assert run(server.url) == 0
    summary = run.last()["run"]
    assert (summary["right"], summary["answered"], summary["unparsable"], summary["failed"]) == (9, 10, 1, 0)
    row = run.result()["rows"][2]
    assert (row["answer"], row["ok"]) == (None, False)


def test_a_next_question_is_not_read(run: Run, serve: Callable[..., Server]) -> None:
    server = serve(lambda question, body: right(question, body) + "\nQuestion: 3 more, 99?")
    assert run(server.url) == 0
    assert run.last()["run"]["accuracy"] == 1


BAD_REPLIES = {
    "status": ((503, "no room"), "HTTP 503: no room"),
    "aborted": (
        (200, json.dumps({"text": "1", "meta_info": {"finish_reason": {"type": "abort", "message": "gone away"}}})),
        "gone away",
    ),
    "no json": ((200, "<html>"), "JSONDecodeError"),
    "no text": ((200, '{"error": "odd"}'), "holds no text"),
    "text is null": ((200, '{"text": null}'), "holds no text"),
    "a list": ((200, "[]"), "holds no text"),
    "no reply": ((0, ""), ""),
}


@pytest.mark.parametrize("case", BAD_REPLIES)
def test_failed_request(run: Run, serve: Callable[..., Server], case: str) -> None:
    bad, reason = BAD_REPLIES[case]
    server = serve(lambda question, body: bad if question in ("q3", "q7") else right(question, body))
    assert run(server.url) == 1
    summary = run.last()["run"]
    assert (summary["asked"], summary["answered"], summary["failed"]) == (10, 8, 2)
    assert (summary["right"], summary["accuracy"], summary["unparsable"]) == (8, 1, 0)
    assert run.last()["bounds"][0]["ok"] is False
    row = run.result()["rows"][1]
    assert (row["ok"], row["answer"], row["index"]) == (None, None, 3)
    assert reason in row["error"]
    assert "run: first failure, question 3: " in run.out
    assert run(server.url, "--allow-failures") == 0


def test_nothing_answered(run: Run, serve: Callable[..., Server]) -> None:
    server = serve(lambda *_: (500, "down"))
    assert run(server.url, "--allow-failures") == 1
    summary = run.last()["run"]
    assert (summary["accuracy"], summary["interval95"], summary["failed"]) == (None, None, 10)
    assert "run: no answer, 10 failed" in run.out


def test_timeout(run: Run, serve: Callable[..., Server]) -> None:
    released = threading.Event()
    server = serve(lambda question, body: right(question, body) if question != "q2" or released.wait(20) else "")
    try:
        assert run(server.url, "--timeout", "1") == 1
    finally:
        released.set()
    assert "timed out" in run.result()["rows"][0]["error"]
    assert run.last()["run"]["failed"] == 1


def test_proxy_of_the_environment_is_not_used(
    run: Run,
    serve: Callable[..., Server],
    afresh: Callable[[], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    server = serve(right)
    run.script = afresh()
    assert run(server.url) == 0


@pytest.mark.parametrize("most", [1, 3])
def test_concurrency(run: Run, serve: Callable[..., Server], most: int) -> None:
    together = threading.Barrier(most)

    def reply(question: str, body: dict) -> str:
        together.wait(20)  # broken where fewer than `most` are asked at once
        time.sleep(0.03)
        return right(question, body)

    server = serve(reply)
    assert run(server.url, "--questions", "9", "--concurrency", str(most)) == 0
    assert server.peak == most
    assert [row["ok"] for row in run.result()["rows"]] == [True] * 9  # in the order of the questions
