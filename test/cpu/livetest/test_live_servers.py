"""Servers that a run starts: on a port of their own, stopped whatever happens, no one else's."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from fake_http import Decode, running

from sglang_dsv4.livetest import score, servers


def test_a_server_is_not_mistaken_for_one_that_is_there_already(tmp_path, monkeypatch):
    with running(Decode) as url:
        monkeypatch.setitem(servers.PORTS, "decode", int(url.rsplit(":", 1)[1]))
        with pytest.raises(servers.ServerDied, match="SERVERS_PORT"):
            servers.launch("decode", "model", [], {}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_served_with_the_tokenizer_and_the_weights_that_it_has(tmp_path):
    for name, word in (("tokenizer.json", "--skip-tokenizer-init"), ("model.safetensors", "--load-format")):
        assert word in servers.defaults_for(str(tmp_path))
        (tmp_path / name).touch()
        assert word not in servers.defaults_for(str(tmp_path))


@pytest.mark.parametrize(("given", "ranks"), [
    ([], 1), (["--tp", "2"], 2), (["--tp-size=4", "--dp", "2"], 4), (["--x", "--tp-size", "8"], 8),
    (["--tp", "2", "--pp-size", "3"], 6), (["--tp", "8", "--dp-size", "4", "--enable-dp-attention"], 2),
])  # fmt: skip
def test_a_server_has_the_ranks_it_is_told(given, ranks):
    assert servers.ranks(given) == ranks


def test_servers_drain_at_once_and_are_killed_in_the_end(tmp_path):
    programs = (
        "sleep(9)",
        "signal(SIGTERM, lambda *_: (sleep(0.5), sys.exit(7))); sleep(9)",
        "signal(SIGTERM, 1); sleep(9)",
    )
    found = []
    for number, program in enumerate(programs):
        first, then = program.split("; ") if "; " in program else ("", program)
        words = f"import sys; from signal import *; from time import sleep; {first}\nprint('up', flush=True); {then}"
        process = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout.readline() == b"up\n"
        found.append(servers.Server(f"role {number}", 0, process, tmp_path / "log"))
    began = time.monotonic()
    assert servers.stop_all(found, patience=1.5) == {"role 0": -15, "role 1": 7, "role 2": None}
    assert time.monotonic() - began < 3
    assert not any(server.alive for server in found)
    assert found[1].stop() == 7


def test_a_run_that_is_told_to_end_ends_its_servers():
    words = """
import subprocess, sys, time
from sglang_dsv4.livetest import score, servers
servers.end_when_told()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
server = servers.Server("decode", 0, child, None)
server.suspend()
try:
    print(child.pid, flush=True)
    time.sleep(60)
finally:
    servers.stop_all([server], patience=0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as told:  # fmt: skip
        pid = int(told.stdout.readline())
        told.terminate()
        told.wait(10)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_control_ends_when_the_server_beside_it_cannot_begin(monkeypatch, tmp_path):
    begun, ended = [], []

    def launch(*_, apart):
        if begun:
            raise servers.ServerDied("port 30031 has a server already")
        begun.append(apart)
        return apart

    monkeypatch.setattr(servers, "launch", launch)
    monkeypatch.setattr(servers, "stop_all", ended.extend)
    given = SimpleNamespace(
        beside=True, recompute=True, interval=3, server=[], model_path="m", name="stress", logs=tmp_path
    )
    with pytest.raises(servers.ServerDied), score.PlainServers(given):
        pass
    assert begun == ended == [score.APART]
