"""A server of answers made up here, the questions to ask it, and the script run on them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import run_gsm8k

SCRIPTS = Path(run_gsm8k.__file__).parent
SMOKE = SCRIPTS / "data" / "gsm8k_smoke.jsonl"


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

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.script: ModuleType = run_gsm8k
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
