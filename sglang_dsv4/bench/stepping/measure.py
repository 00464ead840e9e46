"""What the benchmark of decode metadata measures: launches, times on the forward stream, times of the plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sglang_dsv4.bench.stepping import trace
from sglang_dsv4.bench.stepping.peers import entries, plan_by_token, plan_on_device
from sglang_dsv4.bench.stepping.steps import Forward, Steady, clocked, host_time
from sglang_dsv4.engine.eager_builder import Batch, Engine
from sglang_dsv4.prep.builder import MetadataBuilder
from sglang_dsv4.prep.metadata import StepMetadata
from sglang_dsv4.prep.plan import head_size, plan

TRACED = 4  # equal runs that a count is taken from
WAYS = ("none", "engine", "in_line", "behind", "beside")  # what a loop of steps has between its forwards, see ``loop``


def _builder(engine: Engine) -> MetadataBuilder:
    return MetadataBuilder(engine.layout, torch.device(engine.sizes.device))


def counts(engine: Engine, batch: Batch) -> list[dict[str, Any]]:
    """Launches and uploads of one step: the engine's with and without the planners, ours with both kinds of lengths.

    Figures of one step, as means over a few. static_bytes: uploaded beyond the step's own slab.
    """
    queries, requests = engine.sizes.queries, len(batch.lengths)
    builder, tables = _builder(engine), engine.tables
    slab = 4 * head_size(requests, requests * queries)
    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "engine, all": (lambda: engine.build(batch, planners=True), 0),
        "engine, replaced": (lambda: engine.build(batch), 0),
        "ours, host lengths": (lambda: engine.install(builder.build(batch.step(queries), tables), batch), slab),
        "ours, device lengths": (lambda: engine.install(builder.build(batch.step(queries, False), tables), batch), 0),
    }
    rows = []
    for way, (run, step_bytes) in ways.items():
        for _ in range(TRACED):  # kernels are compiled, every slab and frame is there
            run()
        torch.cuda.synchronize()
        work, _ = trace.record(functools.partial(_repeat, run, TRACED))
        found = trace.count(work, TRACED)
        static = found["upload_bytes"] - step_bytes
        rows.append({"builder": way, "batch": requests, "queries": queries, **found, "static_bytes": static})
    return rows


def _repeat(run: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        run()


def loop(engine: Engine, batch: Batch, forward: Forward, way: str) -> Steady:
    """Steps with no metadata, the engine's, or ours: in line, or from the prep stream, its kernel behind the previous
    forward or free beside it. Where drafts are verified, the device alone has the lengths.
    """
    queries = engine.sizes.queries
    if way == "none":
        return Steady(forward, lambda: None, lambda: None)
    if way == "engine":
        return Steady(forward, lambda: None, lambda: engine.build(batch))
    if way == "in_line":
        return Steady(forward, lambda: None, _in_line(engine, batch))
    builder, tables, step = _builder(engine), engine.tables, batch.step(queries, host_lengths=queries == 1)
    made: list[StepMetadata] = []

    def prepare() -> None:
        made[:] = [builder.start(step, tables, after)]

    def attach() -> None:
        builder.finish()
        engine.install(made[0], batch)

    steady = Steady(forward, prepare, attach)
    after = steady.forward_stream if way == "behind" else steady.schedule
    return steady


def _in_line(engine: Engine, batch: Batch) -> Callable[[], None]:
    """Ours on the current stream, from the lengths that the device has: where nothing was started beforehand."""
    builder, tables, step = _builder(engine), engine.tables, batch.step(engine.sizes.queries, host_lengths=False)

    def run() -> None:
        engine.install(builder.build(step, tables), batch)

    return run


def times(engine: Engine, batch: Batch, forward: Forward, repeats: int) -> dict[str, Any]:
    """One row of the table, in microseconds. idle, busy: alone and in line on one stream, see ``clocked``."""
    queries = engine.sizes.queries
    builder, tables, step = _builder(engine), engine.tables, batch.step(queries)

    def beside() -> None:
        made = builder.start(step, tables, torch.cuda.current_stream())
        builder.finish()
        engine.install(made, batch)

    row: dict[str, Any] = {"batch": len(batch.lengths), "queries": queries}
    for name, run in (("engine", lambda: engine.build(batch)), ("ours", _in_line(engine, batch))):
        idle, busy = clocked(run, repeats, busy=False), clocked(run, repeats, busy=True)
        row |= {f"{name}_idle_us": idle.stream_us, f"{name}_busy_us": busy.stream_us, f"{name}_host_us": idle.host_us}
    row["ours_beside_host_us"] = clocked(beside, repeats, busy=False).host_us
    for way in WAYS:
        found = loop(engine, batch, forward, way).run(repeats)
        row |= {f"{way}_{key}": value for key, value in found.items()}
    return row


def plan_times(engine: Engine, batch: Batch, repeats: int) -> dict[str, Any]:
    """The plan on the CPU and its peers, which are checked to make the same."""
    queries, lengths, layout = engine.sizes.queries, batch.lengths, engine.layout
    requests, verify = len(lengths), queries > 1
    ours, by_token = (np.zeros(head_size(requests, requests * queries), np.int32) for _ in range(2))

    def on_host() -> None:
        plan(layout, lengths, queries, verify, ours)

    def in_a_loop() -> None:
        plan_by_token(layout, lengths, queries, verify, by_token)

    def on_device() -> torch.Tensor:
        return plan_on_device(layout, batch.device_lengths, queries, verify)

    on_host()
    in_a_loop()
    wanted = entries(ours, requests, queries)
    for name, found in (("token by token", by_token), ("on the device", on_device().cpu().numpy())):
        if not np.array_equal(entries(found, requests, queries), wanted):
            raise AssertionError(f"the plan made {name} is another one, so that its time means nothing")
    work, _ = trace.record(on_device)
    device = clocked(on_device, repeats, busy=False)
    ours_us, loop_us = host_time(on_host, repeats), host_time(in_a_loop, repeats)
    return {
        "batch": requests, "queries": queries, "plan_us": ours_us,
        "by_token_us": loop_us, "by_token_ratio": loop_us / ours_us,
        "device_operations": trace.count(work, 1)["kernels"], "device_us": device.stream_us,
        "device_ratio": device.stream_us / ours_us,
    }  # fmt: skip
