"""Stands in for the servers of ``sglang-dsv4 stress``."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_http import COPIED, Plain, running
from stress_servers import Prefill, Running, finds

from sglang_dsv4.cli import stress
from sglang_dsv4.livetest import in_server, load, runs, score


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command; returns its exit status and its result."""
    monkeypatch.setattr(runs.time, "sleep", lambda _: None)

    def command(*words: str) -> tuple[int, dict]:
        sizes = ["--requests", "6", "--prompt", "3", "9", "--new-tokens", "4", "8"]
        status = stress.main([*sizes, "--out", str(tmp_path), "--logs", str(tmp_path / "logs"), *words])
        path = tmp_path / "stress.json"
        return status, json.loads(path.read_text()) if path.exists() else {}

    yield command
    Running.served, Running.held_by_rank, Running.dark, Running.verifies = 0, (3, 3), False, True
    Running.word, Running.sessions, Running.keeps = None, None, True
    Running.rooms.clear()
    Running.prompts.clear()
    Running.routed.clear()
    Prefill.served = 0


@pytest.fixture
def decode():
    with running(Running) as url:
        yield url


@pytest.fixture
def launched(monkeypatch, decode):
    """In the place of starting servers: fake ones by role; what each was started with."""
    given: dict[str, SimpleNamespace] = {}
    with running(Prefill) as prefill, running(Plain) as control:
        urls = {"prefill": prefill, "decode": decode, "plain": decode, "control": control}

        def launch(role, model, arguments, environment, folder, transfer="fake", apart=0):
            role = "control" if apart == score.APART else role
            folder.mkdir(parents=True, exist_ok=True)
            log = folder / f"{role}.log"
            ranks = runs.servers.ranks(arguments)
            said = [COPIED.replace("[t]", f"[t TP{rank}]" if ranks > 1 else "[t]") for rank in range(ranks)]
            log.write_text("".join(said) * (6 + len(load.SHAPES) * (role == "plain")))  # one a request
            given[role] = server = SimpleNamespace(
                role=role, url=urls[role], log=log, alive=True, environment=environment, stops=0, given=arguments
            )
            server.stop = lambda: setattr(server, "stops", server.stops + 1)
            Running.keeps &= role != "prefill"
            if in_server.FILE in environment:
                Running.word = Path(environment[in_server.FILE])
            return server

        monkeypatch.setattr(runs.servers, "launch", launch)
        monkeypatch.setattr(runs.servers, "wait_until_up", lambda *_: None)
        monkeypatch.setattr(runs.servers, "stop_all", lambda started: [s.stop() for s in started] and {})
        yield given


@pytest.fixture
def cached(monkeypatch):
    """The tested server finds a part of each prompt in its cache, some of it on the host."""
    monkeypatch.setattr(Running, "facts", finds())
