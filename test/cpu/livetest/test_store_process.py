"""The store processes below a server are found by their command line, and killed again and again."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from sglang_dsv4.cli import stress
from sglang_dsv4.livetest.store_process import WORKER, Killer, store_processes

SERVER = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))
# A scheduler: a child of a server, which starts its store process again.
SCHEDULER = f"import subprocess, sys\nwhile True: subprocess.call([sys.executable, '-c', 'input()', '{WORKER}'])"


@pytest.fixture
def scheduler():
    words = [sys.executable, "-c", SCHEDULER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as process:
        yield process
        os.killpg(process.pid, 9)


def found(more: int = -1) -> int:
    """Returns a store process other than ``more``, as soon as there is one."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if pids := [process.pid for process in store_processes(os.getpid()) if process.pid != more]:
            return pids[0]
        time.sleep(0.01)
    raise AssertionError("no store process")


@pytest.mark.usefixtures("scheduler")
def test_store_processes_are_killed_until_it_is_left():
    first = found()
    with Killer(SERVER, 0.02) as killer:
        second = found(first)
        found(second)
    assert killer.kills >= 2
    kills, last = killer.kills, found()
    time.sleep(0.1)
    assert (killer.kills, found()) == (kills, last), "none is killed behind it"


@pytest.mark.usefixtures("scheduler")
def test_none_is_killed_unless_it_is_asked():
    first = found()
    with Killer(SERVER, None) as killer:
        time.sleep(0.1)
    assert (killer.kills, found()) == (0, first)


def test_a_server_that_is_gone_has_none():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert store_processes(process.pid) == []


@pytest.mark.parametrize(
    ("store", "words", "fine"),
    [("/s", ["--plain"], True), ("off", ["--plain"], False), (None, ["--plain"], False), ("/s", [], False)],
)
def test_a_store_is_killed_where_there_is_one(monkeypatch, capsys, store, words, fine):
    monkeypatch.delenv("DSV4_STORE", raising=False)
    if store:
        monkeypatch.setenv("DSV4_STORE", store)
    command = ["--model-path", "m", *words, "--kill-store", "5"]
    if fine:
        assert stress.parse(command).kill_store == 5
    else:
        with pytest.raises(SystemExit):
            stress.parse(command)
        assert "DSV4_STORE" in capsys.readouterr().err


def test_a_store_of_an_earlier_run_is_refused(monkeypatch, capsys, tmp_path):
    """Its prompts are the same: first turns would be found, and count as later ones that went on."""
    monkeypatch.setenv("DSV4_STORE", str(tmp_path))
    command = ["--model-path", "m", "--transfer", "nixl", "--turns", "3"]
    assert stress.parse(command).turns == 3
    (tmp_path / "object").touch()
    with pytest.raises(SystemExit):
        stress.parse(command)
    assert f"DSV4_STORE={tmp_path} has objects of an earlier run" in capsys.readouterr().err
    assert stress.parse([*command, "--stock"]).stock, "it has no store"
