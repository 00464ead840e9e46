"""scripts/run_gsm8k.py against servers made here."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import comb
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.cpu

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "run_gsm8k.py"
SMOKE = SCRIPT.parent / "data" / "gsm8k_smoke.jsonl"


def load(name: str = "gsm8k_script") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPT)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield load()


class Server:
    """Answers with ``reply(question, body)``: text, or (status, body to send). Keeps what it was asked."""

    def __init__(self, reply: Callable[[str, dict], Any]) -> None:
        self.reply = reply
        self.asked: list[tuple[str, dict]] = []
        self.lock = threading.Lock()
        self.now = self.peak = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                json_ = self.headers["Content-Type"] == "application/json"
                self.send(*(server.answer(self.path, body) if json_ else (415, "not JSON")))

            def do_GET(self) -> None:
                facts = {"model_path": "tiny", "version": "9", "api_key": "secret"}
                self.send(*((200, json.dumps(facts)) if self.path == "/server_info" else (404, "")))

            def send(self, status: int, text: str) -> None:
                if status == 0:  # no reply at all
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        class Http(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

        self.http = Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, path: str, body: dict) -> tuple[int, str]:
        with self.lock:
            self.asked.append((path, body))
            self.now += 1
            self.peak = max(self.peak, self.now)
        try:
            found = self.reply(asked(body), body)
        finally:
            with self.lock:
                self.now -= 1
        if isinstance(found, tuple):
            return found
        if path == "/generate":
            meta = {"finish_reason": {"type": "stop"}, "completion_tokens": 7}
            return 200, json.dumps({"text": found, "meta_info": meta})
        if path == "/v1/completions":
            choice = {"text": found, "finish_reason": "length"}
            return 200, json.dumps({"choices": [choice], "usage": {"completion_tokens": 5}})
        return 404, "no such path"


def asked(body: dict) -> str:
    """The question at the end of the prompt."""
    text = body.get("text", body.get("prompt"))
    return text.rpartition("Question: ")[2].removesuffix("\nAnswer:")


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str, dict], Any]], Server]]:
    servers = []

    def start(reply: Callable[[str, dict], Any]) -> Server:
        servers.append(Server(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def lines(path: Path, count: int, first: int = 0) -> Path:
    """Questions "q0", "q1"...; the gold of qN is 10 N."""
    entries = [{"question": f"q{i}", "answer": f"It is {10 * i}.\n#### {10 * i}"} for i in range(first, first + count)]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def right(question: str, _: dict) -> str:
    return f" so #### {10 * int(question[1:])}.\n"


def wrong_at(*numbers: int) -> Callable[[str, dict], str]:
    return lambda question, body: " 1" if int(question[1:]) in numbers else right(question, body)


class Run:
    """Calls main with a data file of 12 lines, 2 shots."""

    def __init__(self, script: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.script, self.folder, self.capsys = script, folder, capsys
        self.data = lines(folder / "data.jsonl", 12)
        self.err = self.out = ""

    def __call__(self, url: str, *words: str, name: str = "run") -> int:
        words = ("--url", url, "--data", str(self.data), "--shots", "2", *words)
        status = self.script.main([*words, "--out", str(self.folder / "out"), "--name", name])
        self.out, self.err = self.capsys.readouterr()
        return status

    def result(self, name: str = "run") -> dict:
        return json.loads(self.path(name).read_text())

    def path(self, name: str = "run") -> Path:
        return self.folder / "out" / f"{name}.json"

    def last(self) -> dict:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def run(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(script, tmp_path, capsys)


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
def test_last_number(script: ModuleType, text: str, number: str | None) -> None:
    assert script.last_number(text) == number


def test_last_number_of_long_texts_is_quick(script: ModuleType) -> None:
    started = time.perf_counter()
    for text in ("1," * 100_000, "1" * 200_000, "111," * 50_000, "-" * 200_000, "$-" * 100_000, "." * 200_000):
        script.last_number(text)
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
def test_gold_number(script: ModuleType, answer: str, gold: str | None) -> None:
    assert script.gold_number(answer) == gold


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
def test_mcnemar(script: ModuleType, b: int, c: int, p: float) -> None:
    assert script.mcnemar(b, c) == pytest.approx(p, rel=1e-4)


def test_mcnemar_is_exact_and_bounded(script: ModuleType) -> None:
    for b in range(12):
        for c in range(12):
            n, least = b + c, min(b, c)
            both = sum(comb(n, i) for i in range(n + 1) if min(i, n - i) <= least)
            assert script.mcnemar(b, c) == float(Fraction(both, 2**n))
    assert 0 <= script.mcnemar(0, 3000) < 1e-300
    assert script.mcnemar(1500, 1500) == 1.0


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
def test_wilson(script: ModuleType, right: int, count: int, interval: tuple[float, float]) -> None:
    assert script.wilson(right, count) == pytest.approx(interval, abs=2e-5)


def test_wilson_stays_a_share(script: ModuleType) -> None:
    for count in range(1, 400):
        assert script.wilson(0, count)[0] >= 0
        assert script.wilson(count, count)[1] <= 1


def test_wilson_of_nothing(script: ModuleType) -> None:
    assert script.wilson(0, 0) is None


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


def test_train_file_leaves_all_data(run: Run, serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(right)
    assert run(server.url, "--train", str(lines(tmp_path / "train.jsonl", 9, first=50))) == 0
    prompts = [body["text"] for _, body in server.asked]
    assert len(prompts) == 12
    assert all(prompt.startswith("Question: q50\n") and prompt.count("Question: ") == 3 for prompt in prompts)
    assert not any("q52" in prompt for prompt in prompts)


@pytest.mark.parametrize("spelling", ["data.jsonl", "./sub/../data.jsonl"])
def test_train_is_data(run: Run, serve: Callable[..., Server], tmp_path: Path, spelling: str) -> None:
    (tmp_path / "sub").mkdir()
    server = serve(right)
    assert run(server.url, "--train", str(tmp_path / spelling)) == 0
    assert {asked(body) for _, body in server.asked} == {f"q{i}" for i in range(2, 12)}


def test_no_shots(run: Run, serve: Callable[..., Server]) -> None:
    server = serve(right)
    assert run(server.url, "--shots", "0") == 0
    assert sorted(body["text"] for _, body in server.asked)[0] == "Question: q0\nAnswer:"
    assert len(server.asked) == 12


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
    run: Run, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    server = serve(right)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        run.script = load("gsm8k_behind_proxy")
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


def test_disaggregated(run: Run, serve: Callable[..., Server]) -> None:
    prefill, decode, plain = serve(lambda *_: "77"), serve(right), serve(right)
    words = ("--prefill-url", prefill.url, "--bootstrap-host", "10.0.0.1", "--bootstrap-port", "8999")
    assert run(decode.url, *words, "--compare-url", plain.url) == 0
    assert run.last()["run"]["accuracy"] == 1
    rooms = {body["bootstrap_room"] for _, body in decode.asked}
    assert len(rooms) == len(decode.asked) == len(prefill.asked) == 10
    assert all(0 <= room < 2**63 for room in rooms)
    by_room = {body["bootstrap_room"]: (path, body) for path, body in prefill.asked}
    for path, body in decode.asked:
        assert by_room[body["bootstrap_room"]] == (path, body)
        assert (path, body["bootstrap_host"], body["bootstrap_port"]) == ("/generate", "10.0.0.1", 8999)
    assert not any("bootstrap_room" in body for _, body in plain.asked)


def test_disaggregated_are_asked_together(run: Run, serve: Callable[..., Server]) -> None:
    together = threading.Barrier(2)

    def reply(question: str, body: dict) -> str:
        together.wait(20)
        return right(question, body)

    prefill, decode = serve(reply), serve(reply)
    assert run(decode.url, "--prefill-url", prefill.url, "--concurrency", "1") == 0
    assert (prefill.peak, decode.peak) == (1, 1)
    assert decode.asked[0][1]["bootstrap_host"] == "127.0.0.1"
    assert decode.asked[0][1]["bootstrap_port"] == 8998


def test_disaggregated_compare(run: Run, serve: Callable[..., Server]) -> None:
    prefill, decode, plain = serve(right), serve(right), serve(right)
    words = ("--compare-url", decode.url, "--compare-prefill-url", prefill.url, "--compare-bootstrap-port", "1")
    assert run(plain.url, *words) == 0
    assert {body.get("bootstrap_port") for _, body in plain.asked} == {None}
    assert {body["bootstrap_port"] for _, body in decode.asked} == {1}
    assert len(prefill.asked) == 10


def test_prefill_error_is_told(run: Run, serve: Callable[..., Server]) -> None:
    prefill, decode = serve(lambda *_: (500, "prefill broke")), serve(right)
    assert run(decode.url, "--prefill-url", prefill.url) == 0  # the answer of the decode server counts
    assert run.last()["run"]["prefill_errors"] == 10
    assert "run: 10 answered although the prefill server reported an error" in run.out
    broken = serve(lambda *_: (500, "decode broke"))
    assert run(broken.url, "--prefill-url", prefill.url) == 1
    assert re.search("decode broke.*prefill broke", run.result()["rows"][0]["error"])


def closed_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.mark.parametrize("flag", ["--url", "--compare-url", "--prefill-url", "--compare-prefill-url"])
def test_unreachable(run: Run, serve: Callable[..., Server], flag: str) -> None:
    server, gone = serve(right), f"http://127.0.0.1:{closed_port()}"
    words = ("--compare-url", server.url) if flag == "--compare-prefill-url" else ()
    assert run(server.url, *words, flag, gone) == 2
    assert f"error: {flag} {gone}: not reachable" in run.err
    assert not server.asked
    assert not run.path().exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--url", "127.0.0.1:30000"), "--url 127.0.0.1:30000: not http://HOST:PORT"),
        (("--url", "http://"), "--url http://: not"),
        (("--url", "http://a:99999"), "--url http://a:99999: not"),
        (("--compare-url", "ftp://a"), "--compare-url ftp://a: not"),
        (("--prefill-url", "nowhere"), "--prefill-url nowhere: not"),
        (("--model", "flash"), "--model goes with --api openai"),
        (("--bootstrap-host", "a"), "--bootstrap-host goes with --prefill-url"),
        (("--compare-bootstrap-port", "1"), "--compare-bootstrap-port goes with --compare-prefill-url"),
        (("--compare-prefill-url", "http://a"), "--compare-prefill-url goes with --compare-url"),
        (("--api", "openai", "--prefill-url", "http://a"), "--prefill-url goes with --api native"),
        (("--data", "missing.jsonl"), "--data missing.jsonl: cannot be read"),
        (("--train", "missing.jsonl"), "--train missing.jsonl: cannot be read"),
        (("--shots", "12"), "12 lines, --shots 12 needs 13"),
        (("--questions", "11"), "--questions 11: "),
        (("--baseline", "missing.json"), "--baseline missing.json: not a result"),
        (("--name", "a/b"), "--name a/b: not a plain file name"),
        (("--name", "."), "--name .: not a plain file name"),
        (("--name", ""), "--name : not a plain file name"),
    ],
)
def test_refused(run: Run, serve: Callable[..., Server], words: tuple[str, ...], message: str) -> None:
    server = serve(right)
    name = words[1] if words[0] == "--name" else "run"
    assert run(server.url, *words, name=name) == 2
    assert run.err.startswith("error: ")
    assert message in run.err
    assert not server.asked


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "3",
        '"text"',
        "{}",
        '{"question": "a"}',
        '{"question": 3, "answer": "#### 1"}',
        '{"question": "a", "answer": null}',
        '{"question": " ", "answer": "#### 1"}',
        '{"question": "a", "answer": "1"}',
        '{"question": "a", "answer": "#### one"}',
    ],
)
@pytest.mark.parametrize("flag", ["--data", "--train"])
def test_bad_line(run: Run, serve: Callable[..., Server], tmp_path: Path, flag: str, line: str) -> None:
    path = lines(tmp_path / "bad.jsonl", 3, first=50)
    path.write_text(path.read_text() + f"\n{line}\n")  # line 4 is empty
    assert run(serve(right).url, flag, str(path)) == 2
    assert f"{flag} {path}: line 5 " in run.err


def test_not_text(run: Run, serve: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe")
    assert run(serve(right).url, "--data", str(tmp_path / "bad.jsonl")) == 2
    assert "cannot be read" in run.err


def test_short_or_overlapping_train(run: Run, serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(right)
    assert run(server.url, "--train", str(lines(tmp_path / "short.jsonl", 1, first=50))) == 2
    assert "short.jsonl: 1 lines, --shots 2 needs as many" in run.err
    assert run(server.url, "--train", str(lines(tmp_path / "same.jsonl", 2, first=11))) == 2
    assert "question 11 (from 0) is also a shot" in run.err
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert run(server.url, "--data", str(empty), "--train", str(run.data)) == 2
    assert "empty.jsonl: no lines" in run.err


def test_out_is_a_file(run: Run, serve: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    server = serve(right)
    assert run(server.url) == 2
    assert "--out " in run.err
    assert not server.asked


@pytest.mark.parametrize(
    "words",
    [
        ("--shots", "-1"),
        ("--questions", "0"),
        ("--concurrency", "0"),
        ("--max-new-tokens", "many"),
        ("--api", "grpc"),
        ("--compare-url", "http://a", "--baseline", "b.json"),
    ],
)
def test_bad_words(run: Run, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("http://127.0.0.1:1", *words)
    assert stopped.value.code == 2
    assert words[-2] in capsys.readouterr().err


def test_progress_without_rich(
    run: Run, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    plain = load("gsm8k_without_rich")
    assert plain.Progress is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run.script = plain
    server = serve(right)
    assert run(server.url) == 0
    assert run.err.splitlines() == [f"{server.url}: 10/10"]
    monkeypatch.setattr(plain, "PLAIN_EVERY", 0.0)
    assert run(server.url) == 0
    assert run.err.splitlines() == [f"{server.url}: {i}/10" for i in range(1, 11)]


def test_progress_with_rich(run: Run, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert run(serve(right).url) == 0
    assert "10/10" in run.err
    assert "\x1b[" in run.err  # drawn, not printed line by line
    assert run.last()["run"]["accuracy"] == 1  # stdout has no progress in it


def test_command_line(serve: Callable[..., Server], tmp_path: Path) -> None:
    golds = {entry["question"]: entry["answer"] for entry in map(json.loads, SMOKE.read_text().splitlines())}

    def call(url: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, str(SCRIPT), "--url", url, "--out", str(tmp_path), "--name", "smoke"]
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)

    done = call(serve(lambda question, _: golds[question]).url)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["run"]["asked"], summary["run"]["right"]) == (8, 8)
    result = json.loads((tmp_path / "smoke.json").read_text())
    assert result["command"].startswith("python3 scripts/run_gsm8k.py --url http://127.0.0.1:")
    assert str(tmp_path) not in result["command"]
    assert call(serve(lambda *_: (503, "")).url).returncode == 1
    refused = call("http:/nowhere")
    assert refused.returncode == 2
    assert refused.stderr == "error: --url http:/nowhere: not http://HOST:PORT\n"


def test_smoke_data(script: ModuleType) -> None:
    entries = script.read_lines(SMOKE, "--data")
    assert len(entries) == 16
    assert len({entry["question"] for entry in entries}) == 16
    for entry in entries:
        *steps, last = entry["answer"].split("\n")
        assert re.fullmatch(r"#### -?\d{1,3}(,\d{3})*", last)
        assert "####" not in "".join(steps)
        assert entry["question"].endswith("?")
        assert script.last_number(steps[-1]) == entry["gold"]


def test_smoke_arithmetic(script: ModuleType) -> None:
    checked = 0
    for entry in script.read_lines(SMOKE, "--data"):
        found = re.findall(r"([\d*/+()-]+)=\$?<<([\d*/+()-]+)=(-?\d+)>>(-?[\d,]+)", entry["answer"])
        assert len(found) == entry["answer"].count("<<") >= 2
        for said, sum_, value, shown in found:
            assert said == sum_
            # eval of digits and operators alone
            assert eval(sum_) == int(value) == int(shown.replace(",", "").rstrip("."))
            checked += 1
        assert found[-1][2] == entry["gold"]
    assert checked >= 40
