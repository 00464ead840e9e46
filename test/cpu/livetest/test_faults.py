"""Each drill shows what it must, and says so when its guard does nothing."""

import json
import re
from unittest import mock

import pytest

from sglang_dsv4 import metrics
from sglang_dsv4.bench import transfer
from sglang_dsv4.cli import drill
from sglang_dsv4.cli.main import main
from sglang_dsv4.command_line import to_its_end
from sglang_dsv4.engine.hooks.check import Installation
from sglang_dsv4.engine.plain import sessions
from sglang_dsv4.livetest import faults
from sglang_dsv4.sessions.store import SessionStore
from sglang_dsv4.transfer import verify


def test_every_fault_looks_as_it_must(capsys):
    assert main(["drill", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    memory = found["drills"]["memory"]
    assert re.search(r"[Rr]aise (\w+)", memory["seen"])[1] == re.search(r"[Rr]aise (\w+)", memory["todo"])[1]
    assert found["ok"] and tuple(found["drills"]) == drill.NAMES == (*faults.SCENES, "store")
    assert all(scene["expects"] for scene in found["drills"].values())


@pytest.mark.parametrize("environ", [{"DSV4_VERIFI": "1"}, {"DSV4_ENABLED": "0"}])
def test_bad_settings_are_one_line(capsys, monkeypatch, environ):
    (name, text), *_ = environ.items()
    monkeypatch.setenv(name, text)
    assert main(["drill", "memory"]) == to_its_end("bench", lambda: transfer.main(["--device", "cpu"])) == 2
    drilled, timed = capsys.readouterr().err.splitlines()
    assert drilled.startswith("sglang-dsv4 drill: ") and timed.startswith("bench: ")
    assert all(name in said for said in (drilled, timed))


SABOTAGE = [
    ("memory", lambda: mock.patch.object(metrics, "logger", mock.MagicMock()), "no text like"),
    ("hooks", lambda: mock.patch.object(Installation, "missing", lambda self: []), "no text like"),
    ("damage", lambda: mock.patch.object(verify, "check_host", lambda *_: None), "no text like"),
    ("sessions", lambda: mock.patch.object(verify, "check_host", lambda *_: None), "no text like"),
    ("sessions", lambda: mock.patch.object(sessions, "namespace", lambda req: None), "another tenant's"),
    ("sessions", lambda: mock.patch.object(SessionStore, "clear", lambda *_: None), "a flush leaves no session"),
]


@pytest.mark.parametrize(("name", "broken", "missed"), SABOTAGE, ids=[f"{row[0]}: {row[2]}" for row in SABOTAGE])
def test_a_guard_that_does_nothing_is_noticed(capsys, name, broken, missed):
    with broken():
        assert main(["drill", name]) == 1
    said = capsys.readouterr().out
    assert f"MISSED {missed}" in said.replace("not true: ", "") and "0 of 1 faults" in said
