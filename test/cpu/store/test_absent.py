"""A server that did not ask for a store has nothing of one: no import, hook, process, thread, memory or series."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fresh_process import run_fresh

PROGRAM = """
import json, os, sys, threading
from pathlib import Path
from types import SimpleNamespace
from sglang_dsv4.testing.standalone import boot, install_hooks

def of_a_store():
    return [name for name in sys.modules if name.startswith("sglang_dsv4.store") or name.endswith(".store_start")]

boot()
install_hooks()
at_install = of_a_store()
if "DSV4_STORE" in os.environ:  # its process has to do without torchvision
    from sglang_dsv4.engine import store_start
    store_start.COMMAND = (sys.executable, "-W", "ignore", "-m", "sglang_dsv4.testing.store_worker")
from prometheus_client import CollectorRegistry, multiprocess
from sglang_dsv4.engine.plain.serving import plain_of
from sglang_dsv4.engine.state import server
from sglang_dsv4.testing.world import PlainWorld

class World(PlainWorld):
    def build_scheduler(self, memory):
        scheduler = super().build_scheduler(memory)
        scheduler.metrics_collector = SimpleNamespace(labels={"tp_rank": "0"})  # as with --enable-metrics
        return scheduler

world = World(pages=40, swa_pages=16, ratios=(0, 4, 128))
first = world.submit(range(1500), max_new=20)
world.run()
world.evict(1 << 20, 1 << 20)
second = world.submit([*first.origin_input_ids, *first.output_ids, 7, 8, 9], max_new=3)
while not second.finished():  # it may wait for a store that has just come up
    world.step()
plain, registry = plain_of(world.allocator), CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(json.dumps({
    "from the host": second.cached_tokens,
    "imports at install": at_install,
    "imports": of_a_store(),
    "hooks": [hook.ours for hook in server.installation.hooks if ".points:" in hook.ours or ".store:" in hook.ours],
    "processes": [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()],
    "threads": [one.name for one in threading.enumerate() if one is not threading.main_thread()],
    "memory": [link for fd in Path("/proc/self/fd").iterdir() if "memfd" in (link := os.path.realpath(fd))],
    "series": [one.name for one in registry.collect() if "dsv4_store" in one.name],
    "parts": [part for part in ("a tier", "a store of its sessions") if plain.tier or plain.sessions.has_store],
    "series of sessions": [one.name for one in registry.collect() if "dsv4_session" in one.name],
}))
if plain.tier is not None:
    plain.tier.close(5.0)
"""


def server(folder: Path, **store: str) -> dict[str, Any]:
    """Plays two turns in a process of its own, and returns what was there."""
    environ = {**os.environ, "DSV4_SESSIONS": "auto", "DSV4_HOST_GB": "0.05", **store}
    environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    done = run_fresh(["-c", PROGRAM], environ, seconds=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("from the host") == 1280 and found.pop("series of sessions"), "sessions are kept"
    return found


def test_a_server_without_a_store_has_nothing_of_one(tmp_path: Path) -> None:
    there = server(tmp_path)
    assert not any(there.values()), there


def test_one_that_asks_for_it_has_all_of_that(tmp_path: Path) -> None:
    """Else the test above would look for the wrong things."""
    there = server(tmp_path, DSV4_STORE=str(tmp_path / "objects"), DSV4_STORE_MODEL="m")
    assert {what for what, found in there.items() if not found} == {"imports at install", "threads"}, there
