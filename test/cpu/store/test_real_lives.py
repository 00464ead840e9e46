"""A server whose store's process is really killed again and again loses nothing, and reads no wrong byte."""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import pytest

from sglang_dsv4.engine import store_start
from sglang_dsv4.engine.state import server
from sglang_dsv4.store.client import Limits, State, StoreClient
from sglang_dsv4.testing import demo_sessions

VOCABULARY = 50_000
COMMAND = (sys.executable, "-m", "sglang_dsv4.testing.store_worker")


def start(monkeypatch, folder):
    monkeypatch.setenv("DSV4_STORE", str(folder))
    monkeypatch.setenv("DSV4_STORE_MODEL", "m")
    monkeypatch.setattr(store_start, "COMMAND", COMMAND)
    monkeypatch.setattr(
        store_start, "StoreClient",
        lambda *a, **k: StoreClient(*a, **k | {"least_free": 0}, limits=Limits(back_off=(0.0, 0.0))),
    )  # fmt: skip
    world = demo_sessions.server("0.05", pages=64, swa_pages=24, ratios=(0, 4, 128))
    sessions, plain = demo_sessions.parts_of(world)
    return world, sessions, plain


def wait_for(plain, done):
    deadline = time.monotonic() + 60
    while not done() and time.monotonic() < deadline:
        plain.tier.end_pass()
        time.sleep(0.005)


def test_the_process_of_an_early_start_is_taken_and_one_that_no_store_takes_is_ended(monkeypatch, tmp_path):
    """The model starts it; see test_models."""
    monkeypatch.setattr(store_start, "COMMAND", COMMAND)
    store_start.start_early()
    early, process = server.early_store, server.early_store._process
    store_start.start_early()
    assert server.early_store is early, "one of them"
    _, _, plain = start(monkeypatch, tmp_path / "objects")
    client = plain.tier._client
    assert client.state is State.UP and client._process is process and server.early_store is None
    plain.tier.close(5.0)
    store_start.start_early()
    early = server.early_store
    monkeypatch.setattr(store_start, "config_of", lambda settings: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        start(monkeypatch, tmp_path / "objects")
    assert early._process is None and server.early_store is None


def test_a_store_process_that_is_killed_at_random(monkeypatch, tmp_path):
    rng = random.Random(1)
    world, sessions, plain = start(monkeypatch, tmp_path / "objects")
    client, due = plain.tier._client, {2: "a write is open", 5: "an ask, or its load"}

    def step(number):
        if number in due and client.state is State.UP and plain.tier._open:
            os.kill(client._process._child.pid, signal.SIGKILL)
            del due[number]
        if world.step() is None:
            time.sleep(0.001)  # it waits for the store

    said = []
    for number in range(8):
        more = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1100, 2000) if number < 4 else 300)]
        wait_for(plain, lambda: client.state is State.UP)
        req = world.submit([*(said[number - 4] if number >= 4 else []), *more], max_new=20)
        while not req.finished():
            step(number)
        for _ in range(3):  # what it left is written
            step(number)
        said.append([*req.origin_input_ids, *req.output_ids])
        wait_for(plain, lambda: not plain.tier._open)
        sessions.clear("flush")  # the host has lost it, and the store may have it
        world.evict(demo_sessions.ALL, demo_sessions.ALL)
    wait_for(plain, lambda: not plain.tier._open)
    assert not due and not plain.tier.units() and client.counts["died"] == 2
    assert sessions.counters.hits["store"] >= 2
    sessions.check_integrity()
    world.check_integrity()
    plain.host.memory.check_integrity()
    assert plain.tier.counters.units["put", "ok"] and not plain.tier.counters.units["get", "wrong"]
    plain.tier.close(5.0)
    assert client.state is State.OFF
