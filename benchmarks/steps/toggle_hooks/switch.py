"""In one running server, the hooks of a decode step taken out and put back every few steps, and each step's time.

Out means out: the engine's own functions are back in its classes, as the hook registry found them. What a request
passes only when it comes, goes or is retracted keeps its hooks. The graphs are switched, too.

Steps are counted in blocks, blocks in groups of four: with, without, without, with, or the other way round, as a
seeded coin falls. So a machine that gets slower, and steps that get longer with their requests, cost both sides alike.
A group in which the batch changed is begun anew.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.steps.toggle_hooks.graphs import Graphs
from sglang_dsv4.engine.hooks import hooks_for
from sglang_dsv4.engine.landed import runs
from sglang_dsv4.engine.releases import engine_version
from sglang_dsv4.engine.signatures import engines_class, overrides
from sglang_dsv4.settings import read_settings

FILE, STEPS = "TOGGLE_FILE", "TOGGLE_STEPS"  # where the blocks are written; how many steps each has
SEED = "TOGGLE_SEED"  # of the coin
EARLY = "TOGGLE_EARLY"  # set: only the early start of a step's metadata is switched
EAGER = "TOGGLE_EAGER"  # set: the server captures no decode graphs
SETTLING = 4  # first steps of a block, which are not looked at: the one before still runs on the device
# Every hooked method that a decode step calls while no request waits, with and without a graph.
OF_A_STEP = (
    "DecodePreallocQueue.resume_retracted_reqs",
    "EagerRunner.load_batch",
    "DeepseekV4AttnBackend.init_forward_metadata",
    "Scheduler.get_new_batch_prefill",  # of a plain server
)
# Without it this package makes the same metadata in line.
EARLY_START = ("EagerRunner.load_batch",)
OF_A_GRAPH = (
    "DeepseekV4AttnBackend.make_forward_metadata_from_raw_decode",
    "DeepseekV4AttnBackend.make_forward_metadata_from_raw_verify",
    "DeepseekV4AttnBackend.init_forward_metadata_draft_extend",  # called before one, in every iteration
)


class Place:
    """A hooked method: its class, its name, ours, what is there with it (``hooked``) and what without it (``bare``)."""

    def __init__(self, owner: type, name: str, ours: Any) -> None:
        self.owner, self.name, self.ours = owner, name, ours
        self.hooked = getattr(owner, name)
        # Wrapped by the registry, or overridden by our subclass.
        self.bare = getattr(self.hooked, "__wrapped__", None) or getattr(engines_class(owner), name)
        if not runs(self.hooked, ours) or runs(self.bare, ours):
            raise RuntimeError(f"{owner.__name__}.{name} does not have this package's hook as its last one")

    def put(self, hooked: bool) -> None:
        """With the hook, or without."""
        setattr(self.owner, self.name, self.hooked if hooked else self.bare)

    @property
    def is_in(self) -> bool:
        """Whether a call would run the hook now."""
        return runs(getattr(self.owner, self.name), self.ours)


def places(names: tuple[str, ...] = OF_A_STEP) -> dict[str, Place]:
    """The hooks of ``names`` that this server has, by class and method."""
    version = engine_version()
    found = {}
    for hook in hooks_for(read_settings(), version):
        path, last = hook.target.rsplit(".", 1)
        ours = hook.resolve()
        for step in names:
            owner, method = step.split(".")
            if last == owner:
                found[step] = Place(ours, method, dict(overrides(ours))[method])
            elif path.endswith(f".{owner}") and last == method:
                module = importlib.import_module(path.rsplit(".", 1)[0])
                found[step] = Place(getattr(module, owner), method, ours)
    return found


class Toggling:
    """Where the server is in its blocks."""

    def __init__(self, places: list[Any], steps: int, out: Path, seed: int, clock: Callable[[], int]) -> None:
        self.places, self.steps, self.out, self.clock = places, steps, out, clock
        self.hooked = True
        self._coin = random.Random(seed)
        self._group = -1
        self._batch_key: tuple[Any, ...] | None = None
        self._left: list[bool] = []  # of this group, the blocks after the one that runs
        self._times: list[int] = []
        self._prepared = 0

    def step(self, batch_key: tuple[Any, ...] | None, prepared: int) -> None:
        """A forward is about to be launched: a decode step, or something else (None).

        batch_key: the number of its requests, and what tells them from others.
        prepared: how many steps this package's metadata builder has prepared so far, of the kind that is switched.
        """
        now = self.clock()
        if batch_key is None or batch_key != self._batch_key:
            self._batch_key, self._left = batch_key, []
            self._next(now, prepared)
            return
        self._times.append(now)
        if len(self._times) > self.steps:
            self._write(prepared)
            self._next(now, prepared)

    def _next(self, now: int, prepared: int) -> None:
        """Begin the next block, with the step that is about to run."""
        if not self._left:
            self._group += 1
            first = self._coin.random() < 0.5
            self._left = [first, not first, not first, first]
        self.hooked = self._left.pop(0)
        for place in self.places:
            place.put(self.hooked)
        self._times, self._prepared = [now], prepared

    def _write(self, prepared: int) -> None:
        """In the first step of the next block, which is not looked at."""
        spans = [end - begin for begin, end in zip(self._times, self._times[1:], strict=False)]
        as_meant = all(place.is_in == self.hooked for place in self.places)
        line = {"group": self._group, "hooked": self.hooked, "as_meant": as_meant, "batch": self._batch_key[0],
                "prepared": prepared - self._prepared, "ns": spans[SETTLING:]}  # fmt: skip
        with self.out.open("a") as file:
            print(json.dumps(line), file=file)


def counting(run_batch: Callable[..., Any], toggling: Toggling, early: bool) -> Callable[..., Any]:
    """``Scheduler.run_batch``, which counts decode steps. early: and of those prepared the early ones alone."""
    from sglang_dsv4.engine.prep_attach import prep_of  # noqa: PLC0415 - imports the engine, which the driver need not

    @functools.wraps(run_batch)
    def counted(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        reqs = batch.reqs
        batch_key = (len(reqs), reqs[0].rid, reqs[-1].rid) if batch.forward_mode.is_decode() else None
        prep = prep_of(scheduler.tp_worker.model_runner.attn_backend)
        toggling.step(batch_key, 0 if prep is None else prep.counts.overlapped + prep.counts.inline * (not early))
        return run_batch(scheduler, batch, *args, **kwargs)

    return counted


def install() -> None:
    """Put the switch into this process. KeyError: its variables are not set. RuntimeError: a hook is not ours."""
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend  # noqa: PLC0415

    steps, seed = (int(os.environ[name]) for name in (STEPS, SEED))
    early = EARLY in os.environ
    every: list[Any] = list(places(EARLY_START if early else OF_A_STEP).values())
    methods = [] if EAGER in os.environ else list(places(OF_A_GRAPH).values())
    if methods:
        graphs = Graphs(methods)
        FullCudaGraphBackend.capture_one = graphs.capture(FullCudaGraphBackend.capture_one)
        every += [*methods, graphs]
    toggling = Toggling(every, steps, Path(os.environ[FILE]), seed, time.perf_counter_ns)
    Scheduler.run_batch = counting(Scheduler.run_batch, toggling, early)
