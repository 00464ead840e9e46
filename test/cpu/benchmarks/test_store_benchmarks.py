"""The benchmarks of the store run each scene beside played servers, and each bad figure misses its bound."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest
from fake_http import Plain, play_servers, running
from PIL import Image

from benchmarks import scenes, store_costs, store_life, store_servers
from benchmarks.session_costs import ALL, LASTS
from benchmarks.store_costs import WITHOUT
from benchmarks.store_life import DAMAGED, DEVICE, HOST, MENDED, RECOMPUTED, STORE, TIERS
from benchmarks.store_servers import OURS, PEER

CONFIG = Path(__file__).parents[3] / "benchmarks" / "flash_config.json"
WAIT = {RECOMPUTED: 0.08, STORE: 0.02, HOST: 0.0, DEVICE: 0.0}  # seconds of a first token
PAGE = scenes.PAGE
THIRD = 1500  # tokens that only the prompt of a third turn has
TOKENS = ["--tokens", "1024", "--turn", "300", "--answer", "4", "--agents", "3"]
# Writes a gigabyte a second, and is known by its command line.
WORKER = "import time; out = open('/dev/null', 'wb', 0)\nwhile True: out.write(bytes(10**7)); time.sleep(0.005)"


class Served(Plain):
    """A server that knows the pages of what it computed, in memory and in files; two agents' are on the device.

    A file has its own name behind its payload, so that only a whole one is found.
    """

    cumulative = False
    pages: ClassVar[set[str]] = set()
    recent: ClassVar[list[tuple[int, ...]]] = []
    objects: Path | None = None
    dead, gap, off, trusts, lies = False, 0.001, 0.1, False, 0.0  # off: scores of cached tokens
    aborted = threading.Event()
    killed: threading.Event | None = None  # for which all third turns but one wait

    def do_POST(self) -> None:
        if self.path == "/abort_request":
            self.aborted.set()
        if not self.path.startswith("/generate"):
            self.pages.clear()
            self.recent.clear()
            self.begin()
            return
        body = self.body()
        prompt, new = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        if new == LASTS:
            self.decode()
            return
        start = body.get("logprob_start_len", len(prompt) - 1)
        self.had, tier = self.find(prompt[: start + 1], str(body.get("extra_key")))
        self.facts = {"cached_tokens": self.had, "cached_tokens_details": {"host": self.had * (tier in (HOST, STORE))}}
        time.sleep(WAIT[tier])
        if self.killed is not None and len(prompt) > THIRD and next(self.third):
            self.killed.wait(20)
        if self.dead:
            self.connection.close()
            return
        super().do_POST()
        self.compute([*prompt, *self.answer(prompt, new)], str(body.get("extra_key")))

    def decode(self) -> None:
        self.aborted.clear()
        self.begin()
        for end in range(1, LASTS):
            over = self.aborted.wait(self.gap)
            reason = {"type": "abort", "message": "aborted"} if over else None
            self.chunk({"output_ids": [7], "meta_info": {"completion_tokens": end, "finish_reason": reason}})
            if over:
                return

    def ends(self, tokens: list[int], salt: str) -> list[tuple[int, str]]:
        ends = range(PAGE, len(tokens), PAGE)
        return [(end, hashlib.sha256(str((salt, tokens[:end])).encode()).hexdigest()) for end in ends]

    def find(self, tokens: list[int], salt: str) -> tuple[int, str]:
        agent, found, tier = tuple(tokens[:9]), 0, RECOMPUTED
        for end, name in self.ends(tokens, salt):
            if name in self.pages:
                tier = DEVICE if agent in self.recent else HOST
            elif self.stored(name):
                tier = STORE
            else:
                break
            found = end
        self.recent[:] = [*(one for one in self.recent if one != agent), agent][-2:]
        return found, tier

    def stored(self, name: str) -> bool:
        if self.objects is None or not (path := self.objects / name).exists():
            return False
        return self.trusts or path.read_bytes() == (name * 9).encode()

    def compute(self, tokens: list[int], salt: str) -> None:
        for _, name in self.ends(tokens, salt):
            self.pages.add(name)
            if self.objects is not None and not self.dead and not self.stored(name):
                (self.objects / name).write_bytes((name * 9).encode())

    def cached(self, prompt: list[int]) -> int:
        return self.had

    def scores(self, prompt: list[int], answer: list[int]) -> list[float]:
        salted = self.body().get("extra_key")
        return [-2.0 + self.off * bool(self.had) + self.lies * (not salted) for _ in answer]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a scene beside played servers; returns its status, the bounds it misses, its rows and what was started."""
    started = []
    worker = subprocess.Popen([sys.executable, "-c", WORKER, "sglang_dsv4.store.worker"])

    def launch(role, model, words, environment, folder, apart=0):
        assert json.loads((Path(model) / "config.json").read_text())["n_routed_experts"] == 2
        path = environment.get("DSV4_STORE", environment.get("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"))
        objects = None if path in ("off", "mooncake") else Path(path)
        state = {"pages": set(), "recent": [], "objects": objects, "aborted": threading.Event()}
        more = command.peer if environment["DSV4_ENABLED"] == "0" else command.ours
        if folder.name.startswith("store-restart") and folder.name.endswith("-0"):
            state |= {"killed": threading.Event(), "third": itertools.count()}
        handler = type("Up", (Served,), state | (more if path != "off" else {}))
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "plain.log"
        log.write_text(command.log)
        up = contextlib.ExitStack()
        url = up.enter_context(running(handler))
        stack.callback(up.close)

        def kill():
            handler.dead = True
            handler.killed.set()
            up.close()

        pid = worker.pid if path == "off" else os.getpid()  # a process without children, and the worker's parent
        started.append((words, environment))
        return SimpleNamespace(url=url, log=log, stop=int, kill=kill, suspend=int, wake=int,
                               process=SimpleNamespace(pid=pid), awake=contextlib.nullcontext)  # fmt: skip

    def command(module, scene, *words, peer=None, log="", **ours):
        command.peer, command.ours, command.log = peer or {}, ours, log
        folders = ["--config", str(CONFIG), "--experts", "2", "--logs", str(tmp_path), "--out", str(tmp_path)]
        status = module.main(["--scene", scene, *folders, *TOKENS, "--timeout", "20", *words])
        found = json.loads((tmp_path / f"store-{scene}.json").read_text())
        return status, [b["name"] for b in found["bounds"] if not b["ok"]], found["rows"], started

    play_servers(monkeypatch, launch)
    monkeypatch.setattr(store_servers, "warm_up", lambda *_: None)
    monkeypatch.setattr(store_servers, "QUIET", 0.02)
    monkeypatch.setattr(store_life, "LONG", 1024)
    monkeypatch.setattr(store_life, "FIRST_TOKEN", dict.fromkeys(store_life.FIRST_TOKEN, 1000))  # a busy machine's
    monkeypatch.setattr("benchmarks.session_costs.SETTLED", 3)
    command.folder, command.worker = tmp_path, psutil.Process(worker.pid)
    with contextlib.ExitStack() as stack:
        yield command
    worker.kill()
    worker.wait()


# ---------------------------------------------------------------------- lives


def test_a_killed_server_goes_on_beside_its_peer(run, monkeypatch):
    dropped = []
    monkeypatch.setattr(store_servers.os, "posix_fadvise", lambda *told: dropped.append(told[-1]))
    status, missed, rows, started = run(store_life, "restart", "--", "--mem-fraction-static", "0.5")
    assert (status, missed) == (0, [])
    assert [row["run"] for row in rows] == [OURS, PEER] and len(started) == 4, "two lives of both"
    for row in rows:
        assert row["cached"] == row["read_found"] == 1 and row["bytes_a_session"] > 5 * 500
        assert row["cut_off"] == 2
        assert row["asked"] == row["whole"] == 3 * 3 + store_life.COLD, "what the kill cut off is not counted"
        assert row["by_cold"] > 0 and len(row["roundings"]) == 3
    (ours, environment), (peer, stock) = started[:2]
    assert started[2:] == started[:2] and ours[-2:] == peer[-2:] == ["--mem-fraction-static", "0.5"]
    assert environment["DSV4_SESSIONS"] == "auto" and stock["DSV4_ENABLED"] == "0" and "DSV4_STORE" not in stock
    assert peer[: len(ours) - 2] == ours[:-2] and "--hicache-storage-backend" in peer
    assert len(dropped) > 30 and {*dropped} == {os.POSIX_FADV_DONTNEED}
    assert not list((run.folder / "store-restart" / "objects").iterdir()), "the objects are removed"


CACHED, FOUND, FIRST = (
    "tokens cached, by those written", "prompts scored that it has cached, share",
    "first token of a later turn, median, by a new prompt's",
)  # fmt: skip
FAR = "scores from computed ones, beyond the device's and 3 standard errors"


@pytest.mark.parametrize(("ours", "missed"), [
    ({"stored": lambda *_: False}, [CACHED]), ({"lies": 0.5}, [FAR]),
    ({"log": "[t] leak detected\n"}, ["trouble in a log"]),
])  # fmt: skip
def test_a_bad_second_life_misses_its_bound(run, ours, missed):
    assert run(store_life, "restart", "--without-peer", **ours)[1] == missed


def test_a_fault_of_the_peer_is_told_and_not_judged(run):
    def fails(*_):
        raise ValueError("no score")

    status, missed, rows, _ = run(store_life, "restart", peer={"stored": lambda *_: False, "scores": fails})
    assert (status, missed) == (0, []) and rows[1]["cached"] == rows[1]["read"] == 0


def test_a_second_server_takes_over(run):
    status, missed, rows, started = run(store_life, "takeover", "--devices", "0", "1")
    assert (status, missed) == (0, []) and rows[0]["cached"] == 1 and "cut_off" not in rows[0]
    assert [variables["CUDA_VISIBLE_DEVICES"] for _, variables in started] == ["0", "1"]
    assert started[0][1]["DSV4_STORE"] == started[1][1]["DSV4_STORE"]


def test_a_second_server_takes_over_by_mooncake(run, monkeypatch):
    """The programs are played: what they are told, and that their children end. The servers' memory is one folder."""
    told = run.folder / "told"
    program = run.folder / "program"
    program.write_text(f'#!/bin/sh\nsleep 60 & echo $! "$@" >> {told}\nwait\n')
    program.chmod(0o755)
    monkeypatch.setattr(store_servers.shutil, "which", lambda *_, **__: str(program))
    shared = run.folder / "memory"
    shared.mkdir()
    monkeypatch.setattr(Served, "stored", lambda self, name: (shared / name).exists())
    monkeypatch.setattr(
        Served, "compute", lambda self, *said: [(shared / name).touch() for _, name in self.ends(*said)]
    )
    status, missed, rows, started = run(store_life, "takeover", "--backend", "mooncake")
    assert (status, missed) == (0, []) and rows[0]["cached"] == 1
    config = json.loads(started[0][1]["DSV4_STORE_CONFIG"])
    master, client = sorted(told.read_text().splitlines(), key=lambda line: "--rpc_port=" not in line)
    assert f"--master_server_address={config['master_server_address']}" in client
    assert config["master_server_address"].endswith(master.split("--rpc_port=")[1].split()[0])
    for line in (master, client):
        with contextlib.suppress(psutil.NoSuchProcess):  # nobody reaps it here, perhaps
            gone = psutil.Process(int(line.split()[0]))
            while gone.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)


def test_each_tier_is_told_and_drawn(run):
    _, missed, rows, _ = run(store_life, "tiers")
    assert [name for name in missed if not name.startswith("first token")] == [] and [
        row["run"] for row in rows
    ] == list(TIERS)
    assert [row["found"] for row in rows] == [0, 1, 1, 1]
    with Image.open(run.folder / "store-tiers.png") as picture:
        assert len(picture.getcolors(9999)) > 3
    assert f"turns found, share, {STORE}" in run(store_life, "tiers", stored=lambda *_: False)[1]
    assert f"turns from the host, share, {HOST}" in run(store_life, "tiers", "--agents", "1")[1], "nobody evicts it"


def test_a_damaged_store_is_seen_and_mended(run):
    status, missed, rows, started = run(store_life, "damage", "--agents", "4")
    assert (status, missed) == (0, []) and [row["run"] for row in rows] == [DAMAGED, MENDED]
    assert rows[0]["spoiled"] >= 1 and rows[0]["cached"] < 0.9 <= rows[1]["cached"]
    assert started[0][1]["DSV4_VERIFY"] == "1"
    assert run(store_life, "damage", trusts=True)[1] == [CACHED], "what takes everything was not damaged, or lies"


def test_files_are_damaged_in_each_way(tmp_path):
    whole = {str(n): f"{n} {'payload' * 9}".encode() for n in range(30)}
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content)
    assert store_servers.spoil(tmp_path, 1) == 10
    now = {name: (tmp_path / name).read_bytes() for name in whole}
    bad = [now[name] for name in whole if now[name] != whole[name]]
    assert len(bad) == 10 and sum(len(content) < 40 for content in bad) == 3, "cut"
    assert sum(content in whole.values() for content in bad) == 3, "another's"


def test_writes_that_never_end_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(store_servers, "QUIET", 0.05)
    monkeypatch.setattr(store_servers, "WRITES", 0.2)
    sizes = itertools.count()
    monkeypatch.setattr(store_servers, "bytes_of", lambda _: next(sizes))
    with pytest.raises(store_servers.servers.ServerDied, match="still writes"):
        store_servers.settle(SimpleNamespace(log=tmp_path, url=""), tmp_path)


LIFE = {"run": OURS, "asked": 9, "whole": 9, "trouble": [], "cut_off": 1, "cached": 0.96, "by_cold": 0.14,
        "read_found": 1.0, "roundings": [0.1, 0.12], "distances": [0.11, 0.1]}  # fmt: skip
IN_TIERS = [{"run": tier, "first_token_p50_ms": ms, "found": tier != RECOMPUTED, "on_host": tier in (HOST, STORE)}
            for tier, ms in ((RECOMPUTED, 1000.0), (DEVICE, 90.0), (HOST, 100.0), (STORE, 190.0))]  # fmt: skip
IN_STORE = f"first token, median, {STORE}, by that {RECOMPUTED}"


@pytest.mark.parametrize(("scene", "changed", "missed"), [
    ("restart", {}, []), ("restart", {"by_cold": 0.16}, [FIRST]), ("takeover", {"by_cold": 0.19}, []),
    ("takeover", {"by_cold": 0.21}, [FIRST]), ("restart", {"cached": 0.94}, [CACHED]),
    ("restart", {"cut_off": 0}, ["requests cut off by the kill"]), ("restart", {"read_found": 0.5}, [FOUND]),
    ("restart", {"roundings": [0.1]}, ["prompts scored on the device"]), ("tiers", {}, []),
    ("tiers", {"first_token_p50_ms": 210.0}, [IN_STORE]),
    ("tiers", {"first_token_p50_ms": 90.0}, [f"first token, median, {HOST}, by that {STORE}"]),
])  # fmt: skip
def test_each_bad_life_misses_its_bound(scene, changed, missed):
    whole = {"asked": 9, "whole": 9, "trouble": []}
    rows = [whole | row for row in IN_TIERS] if scene == "tiers" else [LIFE]
    rows = [*rows[:-1], rows[-1] | changed]
    arguments = store_life.parse(["--scene", scene, "--config", str(CONFIG)])
    assert [bound["name"] for bound in store_life.judge(rows, arguments) if not bound["ok"]] == missed


# ---------------------------------------------------------------------- costs

STEP = "step of those that decode, p99, by that without"
SPEED = (
    "turns a second",
    "median turn",
    "step",
    "latest",
    "written beside",
)  # of played servers on a busy machine: any
FEW = {"idle": ["--turns", "2", "--agents", "2"], "busy": ["--prompts", "2"], "hangs": ["--prompts", "2"]}


@pytest.mark.parametrize("scene", FEW)
def test_the_costs_run_both_servers_by_turns(run, scene):
    words = [*FEW[scene], "--rounds", "2", *(["--window", "0.1"] if scene != "idle" else [])]
    _, missed, rows, started = run(store_costs, scene, *words, "--", "--mem-fraction-static", "0.5")
    assert [name for name in missed if not name.startswith(SPEED)] == []
    assert [row["run"] for row in rows][:4] == [OURS, WITHOUT, WITHOUT, OURS], "each round changes who is first"
    ((ours, with_), (others, without)) = started
    assert ours == others and ours[-2:] == ["--mem-fraction-static", "0.5"] and without["DSV4_STORE"] == "off"
    assert {name for name in with_ if with_[name] != without[name]} == {"DSV4_STORE"}
    parts = [row for row in rows if not row["run"].startswith(ALL)]
    assert len(parts) == 4 and all(row["asked"] == row["whole"] for row in parts)
    if scene != "idle":
        stopped = [row["stopped"] for row in parts if row["run"] == OURS]
        assert stopped == ([1, 1] if scene == "hangs" else [0, 0])
        written = [row["written"] > 0 for row in parts]
        assert written == [scene == "busy" and row["run"] == OURS for row in parts]
        assert all(row["gaps"] > 10 for row in parts)
    assert run.worker.status() != psutil.STATUS_STOPPED, "it goes on behind the measurement"


def test_a_slow_step_and_a_store_that_is_not_there_miss_their_bounds(run, monkeypatch):
    monkeypatch.setattr(store_costs, "COMES_UP", 0)
    monkeypatch.setattr(store_costs, "store_processes", lambda _: [])
    missed = run(store_costs, "hangs", "--prompts", "1", "--rounds", "1", gap=0.05)[1]
    assert {STEP, "store processes that hang, least round"} <= set(missed)


TOLD = {"asked": 9, "whole": 9, "trouble": [], "p99_ms": 10.0, "gb_a_second": 0.9, "stopped": 1, "found": 1.0,
        "first_tokens_ms": [90.0, 100.0], "turn_seconds": [1.0] * 4, "written": 5}  # fmt: skip
RATES = [f"turns a second, by those without, {which}" for which in ("median turn", "all turns")]


@pytest.mark.parametrize(("scene", "changed", "missed"), [
    ("idle", {}, []),
    ("idle", {"turn_seconds": [1.02] * 4}, [*RATES, "median turn, low end of the 99% interval"]),
    ("idle", {"written": 0}, ["bytes written, least round"]),
    ("idle", {"found": 0.8}, ["turns found on the device, share"]), ("busy", {}, []),
    ("busy", {"p99_ms": 10.3}, [STEP]),
    ("busy", {"gb_a_second": 0.4}, ["written beside the steps, GB/s, median round"]),
    ("busy", {"whole": 8}, ["requests without a whole answer"]),
    ("hangs", {"stopped": 0}, ["store processes that hang, least round"]),
    ("hangs", {"first_tokens_ms": [100.0, 170.0]}, ["latest first token, by that without"]),
])  # fmt: skip
def test_each_bad_figure_misses_its_bound(scene, changed, missed):
    rows = [
        {"run": begins + name} | TOLD | (changed if name == OURS else {})
        for begins in ("", "", ALL) for name in (OURS, WITHOUT) if scene != "idle" or not begins
    ]  # fmt: skip
    arguments = store_costs.parse(["--scene", scene, "--config", str(CONFIG)])
    assert [bound["name"] for bound in store_costs.judge(rows, arguments) if not bound["ok"]] == missed
