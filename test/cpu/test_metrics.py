"""Counters count every save, load and release, and reach the engine's Prometheus endpoint."""

import dataclasses
import json
import logging
import os
import sys
from types import SimpleNamespace

import pytest
from fresh_process import run_fresh
from pool_fixture import make_world
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from sglang_dsv4 import metrics
from sglang_dsv4.engine import memory
from sglang_dsv4.sessions.hints import TYPES
from sglang_dsv4.testing.standalone import PoolSpec, make_pool


def by_name(registry, **labels):
    """{series name: value} of this package's series with exactly ``labels``."""
    samples = [sample for family in registry.collect() for sample in family.samples if sample.labels == labels]
    names = [sample.name for sample in samples]
    assert len(set(names)) == len(names)
    return {s.name: s.value for s in samples if s.name.startswith("sglang_dsv4_") and not s.name.endswith("_created")}


def test_a_pool_tells_of_every_save_load_and_release():
    world = make_world(verify=True)
    counters, memory = world.pool.host.counters, world.pool.host.memory
    first, second = world.start(1, 300), world.start(2, 700)

    def told():
        return counters.copies, counters.held_bytes, counters.high_water_bytes

    copies = [world.save(first)]
    one = copies[0].nbytes
    assert told() == (1, one, one)
    copies.append(world.save(second))
    other = copies[1].nbytes
    most = one + other
    assert told() == (2, most, most) and memory.held_bytes == most
    world.leave(first)
    world.resume(copies[0], 3)
    assert told() == (1, other, most)
    copies[1].release()  # as an abort does: past the pool
    copies[1].release()
    assert (counters.saves, counters.loads, counters.verified) == (2, 1, 1)
    assert (counters.saved_bytes, counters.loaded_bytes) == (one + other, one)
    assert counters.save_seconds > 0 < counters.load_seconds
    assert told() == (0, 0, most)


@pytest.fixture(autouse=True)
def _small_arena(monkeypatch):
    monkeypatch.setenv("DSV4_HOST_GB", "0.25")


def test_without_the_client_there_is_one_warning_and_the_server_starts(monkeypatch, caplog):
    from sglang.srt.runtime_context import get_context

    metrics._warn_without_client.cache_clear()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    collector = SimpleNamespace(labels={"tp_rank": 0})
    with caplog.at_level(logging.WARNING, metrics.__name__):
        for _ in range(2):
            pool, args = make_pool(PoolSpec()), get_context().server_args
            scheduler = SimpleNamespace(server_args=args, enable_overlap=False, metrics_collector=collector)
            memory.reserve_host_memory(pool, scheduler)
            assert pool.host.counters.series == {}
    metrics._warn_without_client.cache_clear()
    assert len(caplog.records) == 1


def test_the_first_event_of_each_kind_is_seen():
    """A rate() of a series that appears with its first event is 0: an alert on a fault would never fire."""
    registry = CollectorRegistry()
    kinds = metrics.Counters, metrics.SessionCounters, metrics.StoreCounters, metrics.PrepCounts
    for kind in kinds:
        kind().export({"tp_rank": "0"}, registry)
    found = {
        (sample.name, *(value for label, value in sample.labels.items() if label != "tp_rank")): sample.value
        for family in registry.collect() for sample in family.samples if not sample.name.endswith("_created")
    }  # fmt: skip
    assert set(found.values()) == {0}
    for reason in metrics.FALLBACKS:
        assert ("sglang_dsv4_fallbacks_total", reason) in found
    for kind in TYPES:
        assert ("sglang_dsv4_session_hints_total", kind, "taken") in found
        assert ("sglang_dsv4_session_hints_total", kind, "bad") in found
    names = {name for name, *_ in found}
    series = [each.metadata["series"] for kind in kinds for each in dataclasses.fields(kind) if each.metadata]
    assert names == {f"sglang_dsv4_{name}" for name in series}, "a labelled series without a child shows nothing"


SERVER = """
import json, sys
from sglang_dsv4.testing.standalone import boot, install_hooks
boot(); install_hooks()
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector
from sglang.srt.runtime_context import get_context
from types import SimpleNamespace
from pool_fixture import World
from sglang_dsv4.engine import memory
from sglang_dsv4.engine.metadata import eager
from sglang_dsv4.engine.retract import save
from sglang_dsv4.engine.state import server
from sglang_dsv4.metrics import PrepCounts
from sglang_dsv4.testing.standalone import PoolSpec, make_allocator, make_pool
from sglang_dsv4.errors import HostMemoryExhausted

rank = int(sys.argv[1])
spec = PoolSpec(pages=20, swa_pages=20)
pool = make_pool(spec)
args = get_context().server_args
labels = {"model_name": "m", "engine_type": "decode", "tp_rank": rank, "pp_rank": 0, "moe_ep_rank": 0}
collector = SchedulerMetricsCollector(labels=labels, server_args=args)
collector._log_gauge(collector.num_running_reqs, 9)
scheduler = SimpleNamespace(server_args=args, enable_overlap=False, metrics_collector=collector)
memory.reserve_host_memory(pool, scheduler)
world = World(pool, make_allocator(spec, pool))

def fail(*_, **__):
    raise HostMemoryExhausted("full")

held = world.save(world.start(1, 300))
request = world.start(2, 700)
moved = world.save(request)
world.leave(request)
world.resume(moved, 3)
pool.get_cpu_copy = fail
for _ in range(rank + 1):
    assert save.save(pool, SimpleNamespace(rid="r", input_embeds=None), None, 1) is None
backends = [PrepCounts() for _ in range(3)]  # of two-batch overlap: one for all, and one for each half
server.unheard[:] = backends[:2]
eager.run_event_loop(scheduler)
server.unheard[:] = backends[2:]
eager.run_event_loop(scheduler)
for counts in backends:
    for _ in range(10):
        counts.add("steps", 1, "overlapped")
    counts.leave("ragged verification")
backends[0].add("steps", 1, "inline")
counters = pool.host.counters
counters.add("spared_tokens", 400)
print(json.dumps({
    "saves_total": counters.saves, "loads_total": counters.loads, "saved_bytes_total": counters.saved_bytes,
    "loaded_bytes_total": counters.loaded_bytes, "save_seconds_total": counters.save_seconds,
    "load_seconds_total": counters.load_seconds, "verified_total": counters.verified, "copies": 1,
    "prefill_tokens_saved_total": counters.spared_tokens,
    "host_held_bytes": held.nbytes, "host_high_water_bytes": held.nbytes + moved.nbytes,
    "host_bytes": pool.host.memory.arena.nbytes,
    "host_sharers": 1, "hisparse_kept_bytes": 0,
}))
"""


def test_another_process_collects_what_two_ranks_wrote(tmp_path):
    """The engine's arrangement: schedulers write to PROMETHEUS_MULTIPROC_DIR, the HTTP server collects from there."""
    path = os.pathsep.join(sys.path)
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": path, "DSV4_VERIFY": "1"}
    wrote = []
    for rank in range(2):
        done = run_fresh(["-c", SERVER, str(rank)], environ)
        assert done.returncode == 0, done.stderr
        wrote.append(json.loads(done.stdout.splitlines()[-1]))
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    for rank, expected in enumerate(wrote):
        assert (expected["saves_total"], expected["loads_total"], expected["verified_total"]) == (2, 1, 1)
        found = by_name(registry, tp_rank=str(rank), pp_rank="0")
        assert found == pytest.approx({f"sglang_dsv4_{name}": value for name, value in expected.items()})
        reason = by_name(registry, tp_rank=str(rank), pp_rank="0", reason="HostMemoryExhausted")
        assert reason == {"sglang_dsv4_fallbacks_total": rank + 1}
        for labels, series_of_it in (
            ({"where": "overlapped"}, {"sglang_dsv4_prep_steps_total": 30}),
            ({"where": "inline"}, {"sglang_dsv4_prep_steps_total": 1}),
            ({"reason": "ragged verification"}, {"sglang_dsv4_prep_left_total": 3}),
        ):
            assert by_name(registry, tp_rank=str(rank), pp_rank="0", **labels) == series_of_it
    engine = [s for family in registry.collect() for s in family.samples if s.name == "sglang:num_running_reqs"]
    assert sorted((s.labels["tp_rank"], s.value) for s in engine) == [("0", 9.0), ("1", 9.0)]
