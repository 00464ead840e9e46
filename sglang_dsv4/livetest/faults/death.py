"""A scheduler that dies while a client reads its answer.

Real: the engine's run_scheduler_process with its handling of an exception, its watchdog over the process, and the
way it ends the server; the pool and the copies in the scheduler. Stand-ins: the scheduler's loop, which sends numbers
for tokens, and the HTTP front, which speaks HTTP/1.1 with chunks as the engine's does.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import torch

from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.faults.engine import Decoding
from sglang_dsv4.livetest.faults.scene import Drill, Scene, without_frames
from sglang_dsv4.settings import Settings
from sglang_dsv4.testing.demo_scheduler import damage

FORK = multiprocessing.get_context("fork")  # the children inherit the imported engine
TOKENS_BEFORE = 3
PATIENCE = 20.0


class _Scheduler:
    """In the place of the engine's: copies alive, one token after the other; ``fails``: then a bad resume."""

    def __init__(self, decoding: Decoding, tokens: Any, fails: bool) -> None:
        self._decoding, self._tokens, self._fails = decoding, tokens, fails
        self.metrics_reporter = SimpleNamespace(_shutdown_fpm=lambda: None)
        self.async_d2h_worker, self.gracefully_exit = None, False

    def get_init_info(self) -> dict[str, Any]:
        return {"status": "ready"}

    def run_event_loop(self) -> None:
        for number in range(1, 1 << 20):
            self._tokens.send(number)
            if self._fails and number == TOKENS_BEFORE:
                time.sleep(0.3)  # what was sent reaches its client
                damage(self._decoding.copy_of(0), page=-1)
                self._decoding.resume(self._decoding.jobs[0])
            time.sleep(0.02)


def _schedule(ready: Any, tokens: Any, fails: bool) -> None:
    """The scheduler's process: the engine's own function around the stand-in."""
    from sglang.srt.managers import scheduler as engine  # noqa: PLC0415
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415

    decoding = Decoding(Settings(host_gb=0.05, verify=True), 300, 200)
    for job in decoding.jobs:
        decoding.retract(job)
    arguments = get_context().server_args
    with contextlib.ExitStack() as stack:
        for name, value in (
            ("Scheduler", lambda *_, **__: _Scheduler(decoding, tokens, fails)),
            ("configure_scheduler_process", lambda *_, **__: None),  # names, affinities and logs of the process
            ("publish", lambda *_, **__: None),  # the drill has published its arguments
        ):
            stack.enter_context(mock.patch.object(engine, name, value))
        if hasattr(engine, "resolve_spawn_dp_rank"):
            stack.enter_context(mock.patch.object(engine, "SpawnRanks", lambda **_: None))
            stack.enter_context(mock.patch.object(engine, "spawn_world_rank", lambda *_, **__: 0))
            engine.run_scheduler_process(arguments, None, 0, 0, 0, None, ready)
        else:
            engine.run_scheduler_process(arguments, None, 0, 0, 0, 0, 0, 0, None, ready)


class _Front(BaseHTTPRequestHandler):
    """POST /generate: what the scheduler sends, as server-sent events in chunks."""

    protocol_version = "HTTP/1.1"
    tokens: Any = None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not body.get("stream"):
            time.sleep(PATIENCE)  # the answer comes when it is complete, and it never is
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(EOFError):  # the scheduler is gone: as in the engine, nothing more comes
            while True:
                event = b"data: " + json.dumps({"token": self.tokens.recv(), "finish_reason": None}).encode() + b"\n\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        time.sleep(PATIENCE)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _serve(told: Any, fails: bool, log: str) -> None:
    """The server's first process: front, watchdog, and the scheduler as its child."""
    from sglang.srt.utils import kill_process_tree  # noqa: PLC0415
    from sglang.srt.utils.watchdog import SubprocessWatchdog  # noqa: PLC0415

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.__stderr__, force=True)
    torch.set_num_threads(1)
    _Front.tokens, tokens = FORK.Pipe(duplex=False)
    here, ready = FORK.Pipe(duplex=False)
    scheduler = FORK.Process(target=_schedule, args=(ready, tokens, fails))
    scheduler.start()
    tokens.close()
    here.recv()
    signal.signal(signal.SIGQUIT, lambda *_: kill_process_tree(os.getpid()))
    SubprocessWatchdog([scheduler], ["scheduler_0"], interval=0.1).start()
    front = ThreadingHTTPServer(("127.0.0.1", 0), _Front)
    told.send((front.server_port, scheduler.pid))
    front.serve_forever(poll_interval=0.05)


def _stream(url: str, scheduler: int | None) -> str:
    """How a streamed answer ends; ``scheduler`` is killed after a few tokens."""
    tokens, finish = 0, None
    try:
        for chunk in servers.stream(url, {}, PATIENCE):
            tokens, finish = tokens + 1, chunk["finish_reason"]
            if scheduler is not None and tokens == TOKENS_BEFORE:
                os.kill(scheduler, signal.SIGKILL)
    except (OSError, http.client.HTTPException) as error:
        return f"{tokens} tokens, then {_named(error)}"
    return f"{tokens} tokens, then the stream ends; the last finish_reason is {finish}"


def _ask(url: str) -> str:
    """How an answer ends that comes whole."""
    try:
        return str(servers.post(url, "/generate", {"stream": False}, PATIENCE))
    except (OSError, http.client.HTTPException) as error:
        return _named(error)


def _named(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    return f"{type(reason).__name__}: {reason}"


def _gone(pid: int) -> bool:
    """Whether the process has ended, or does so soon."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def _play() -> Iterator[Scene]:
    for fails, what in (
        (False, "kill -9 of the scheduler (what the kernel does when memory runs out), two copies alive"),
        (True, "an exception in the scheduler: DSV4_VERIFY=1 found a changed byte"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "server.log"
            yield _one(fails, what, log)


def _one(fails: bool, what: str, log: Path) -> Scene:
    told, tell = FORK.Pipe(duplex=False)
    server = FORK.Process(target=_serve, args=(tell, fails, str(log)))
    server.start()
    try:
        if not told.poll(PATIENCE):
            raise TimeoutError(f"the drill's server is not up:\n{log.read_text()}")
        port, scheduler = told.recv()
        url = f"http://127.0.0.1:{port}"
        with ThreadPoolExecutor(1) as another:
            whole = another.submit(_ask, url)
            streamed = _stream(url, None if fails else scheduler)
        server.join(PATIENCE)
        later = _ask(url)
    finally:
        server.kill()  # it is over already, unless the drill failed
        server.join()
    lines = without_frames(log.read_text()).splitlines()
    lines += [f"client, streaming: {streamed}", f"client, not streaming: {whole.result()}", f"asking again: {later}"]
    expected = r"ERROR Scheduler hit an exception[\s\S]*VerifyMismatch: host copy changed since the save: family c4_kv"
    if not fails:
        expected = r"ERROR Subprocess scheduler_0 \(pid=\d+\) crashed with exit code -9"
    return Scene(
        what, "server log, then the clients", "\n".join(lines),
        (expected, r"client, streaming: \d+ tokens, then .*(finish_reason is None|Error|IncompleteRead)",
         r"client, not streaming: (RemoteDisconnected|ConnectionResetError|BrokenPipeError)",
         r"asking again: ConnectionRefusedError"),
        {
            "the server ended": server.exitcode not in (None, 0),
            "its scheduler ended, and its memory with it": _gone(scheduler),
        },
    )  # fmt: skip


DRILL = Drill(
    "death",
    "The scheduler dies while clients read their answers",
    "Nothing survives it: the kernel takes the arena back; clients see answers without a finish_reason, or closed "
    "connections, and must ask again. Let a supervisor restart the server, and read the last ERROR of its log.",
    _play,
)
