"""The command line: what is refused before anything is asked, progress, the script as a process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from fake_server import SCRIPTS, SMOKE, Run, Server, right


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
    run: Run,
    serve: Callable[..., Server],
    afresh: Callable[[], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    run.script = afresh()
    plain = sys.modules["gsm8k.progress"]
    assert plain.Progress is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
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
        words = [sys.executable, str(SCRIPTS / "run_gsm8k.py"), "--url", url, "--out", str(tmp_path), "--name", "smoke"]
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
