"""Compares eager decode steps whose metadata this package prepares with the engine's own, in turn in one server.

    python3 -m benchmarks.steps --model-path MODEL

Two starts of one server differ by several percent, more than a step's metadata costs. So the server is compared with
itself: it takes this package's hooks of an eager step out and puts them back every few steps. A group of four blocks
(with, without, without, with, or the other way round, as a seeded coin falls) gives one ratio: the median step without
the hooks by the median step with them; above 1, the package is faster. (A sum would be that of the few steps that the
machine holds up.) The interval is that of the median group (bootstrap: groups are drawn within their start). No request
is ever retracted.

Each round is one start of a decode server with the fake transfer, DSV4_PREP=auto and no decode graphs, all up at once,
suspended but for the one that is measured. The result is written anew after each batch of each start.

Arguments after -- go to the server. Exit status 1 on a request without a whole answer, or
where a step may be more than 2 % slower.
"""

import argparse
import itertools
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import CHECKOUT
from benchmarks.client import add_requests
from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.in_server import around, environment, note, read
from sglang_dsv4.livetest.load import Load, Run
from sglang_dsv4.livetest.retract_stats import read_log

MARGIN = 0.98  # of the engine's speed: less than this, and a step is slower
BLOCKS = 4  # of a group
DRAWS, CONFIDENCE = 4000, 0.99  # of each interval
RESOLUTION = 0.05  # widest interval that could have shown a slower package
SETTLING = 4  # first steps of a block, which are not looked at: the one before still runs on the device
SPARE = 1  # groups that a ramp, or a request that joins late, may cost
PORTS_APART = 50
STEPS, SEED = "BENCHMARK_STEPS", "BENCHMARK_SEED"  # of a block; of the coin

# ---------------------------------------------------------------------- in the server


class Place:
    """Switches a hooked method of the engine: with the hook, and as the engine made it."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name, self.hooked = owner, name, getattr(owner, name)
        self.bare = getattr(self.hooked, "__wrapped__", None)
        if self.bare is None:
            raise RuntimeError(f"{owner.__name__}.{name} is not hooked: DSV4_PREP is not auto, or the hook moved")

    def put(self, hooked: bool) -> None:
        setattr(self.owner, self.name, self.hooked if hooked else self.bare)


class Toggling:
    """Counts the steps of a server in blocks, and switches its hooks between them."""

    def __init__(self, places: Sequence[Any], steps: int, seed: int, notes: Path, clock: Callable[[], int]) -> None:
        self.places, self.steps, self.notes, self.clock = places, steps, notes, clock
        self._coin = random.Random(seed)
        self._group = -1
        self._batch_key: tuple[Any, ...] | None = None
        self._left: list[bool] = []  # of this group, the blocks after the one that runs
        self._hooked, self._times, self._prepared = True, list[int](), 0

    def step(self, batch_key: tuple[Any, ...] | None, prepared: int) -> None:
        """Counts a forward about to be launched: a decode step, or something else (None).

        batch_key: the number of its requests, and what tells them from others; a group in which it changes is begun
        anew. prepared: steps that this package has prepared so far.
        """
        now = self.clock()
        if batch_key is None or batch_key != self._batch_key:
            self._batch_key, self._left = batch_key, []
            self._next(now, prepared)
            return
        self._times.append(now)
        if len(self._times) > self.steps:
            spans = [end - begin for begin, end in itertools.pairwise(self._times)]
            note(self.notes, group=self._group, hooked=self._hooked, batch=batch_key[0],
                 prepared=prepared - self._prepared, ns=spans[SETTLING:])  # fmt: skip
            self._next(now, prepared)

    def _next(self, now: int, prepared: int) -> None:
        """Begins the next block, with the step that is about to run."""
        if not self._left:
            self._group += 1
            first = self._coin.random() < 0.5
            self._left = [first, not first, not first, first]
        self._hooked = self._left.pop(0)
        for place in self.places:
            place.put(self._hooked)
        self._times, self._prepared = [now], prepared


def places() -> list[Place]:
    """Returns the hooked methods that make the metadata of an eager decode step."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend  # noqa: PLC0415
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner  # noqa: PLC0415

    return [Place(EagerRunner, "load_batch"), Place(DeepseekV4AttnBackend, "init_forward_metadata")]


def install(notes: Path) -> None:
    """Puts the switch into this process. RuntimeError: a method is not hooked."""
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415

    from sglang_dsv4.engine.metadata.attach import prep_of  # noqa: PLC0415

    steps, seed = (int(os.environ[name]) for name in (STEPS, SEED))
    toggling = Toggling(places(), steps, seed, notes, time.perf_counter_ns)

    def run_batch(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        reqs = batch.reqs
        batch_key = (len(reqs), reqs[0].rid, reqs[-1].rid) if batch.forward_mode.is_decode() else None
        prep = prep_of(scheduler.tp_worker.model_runner.attn_backend)
        toggling.step(batch_key, 0 if prep is None else prep.counts.steps.total())
        return original(scheduler, batch, *args, **kwargs)

    around(Scheduler, "run_batch", run_batch)


# ---------------------------------------------------------------------- of its notes


@dataclass(frozen=True)
class Block:
    """Holds some steps of one start, with the hooks or without."""

    round: int
    group: int
    batch: int
    hooked: bool
    prepared: int
    ns: tuple[int, ...]


def whole_groups(blocks: Sequence[Block], batch: int) -> dict[int, list[list[Block]]]:
    """Returns the groups of ``batch`` that were not cut off, by round."""
    groups: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for block in blocks:
        if block.batch == batch:
            groups[block.round, block.group].append(block)
    found: dict[int, list[list[Block]]] = defaultdict(list)
    for (round_, _), group in sorted(groups.items()):
        if len(group) == BLOCKS:
            found[round_].append(group)
    return dict(found)


def ratio_of(group: Sequence[Block]) -> float:
    """Returns the median step without the hooks / that with them."""
    without, with_ = (
        statistics.median(ns for block in group if block.hooked is hooked for ns in block.ns)
        for hooked in (False, True)
    )
    return without / with_


def interval(ratios: Sequence[Sequence[float]], seed: int) -> tuple[float, float, float]:
    """Returns (median, low, high) over the groups of every round."""
    draw = np.random.default_rng(seed)
    drawn = np.concatenate([np.array(r)[draw.integers(len(r), size=(DRAWS, len(r)))] for r in ratios], axis=1)
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(np.median(drawn, axis=1), [tail, 100 - tail])
    return float(np.median(np.concatenate(ratios))), float(low), float(high)


def summarise(blocks: Sequence[Block], batches: Sequence[int]) -> list[dict[str, Any]]:
    """Returns one row a batch that has a whole group."""
    rows = []
    for batch in batches:
        rounds = whole_groups(blocks, batch)
        if not rounds:
            continue
        ratios = {round_: [ratio_of(group) for group in groups] for round_, groups in rounds.items()}
        middle, low, high = interval(list(ratios.values()), batch)
        row: dict[str, Any] = {
            "batch": batch, "groups": sum(map(len, ratios.values())), "ratio": middle, "low": low, "high": high,
            "ratio_by_round": {round_: statistics.median(found) for round_, found in ratios.items()},
        }  # fmt: skip
        for name, hooked in (("without", False), ("with", True)):
            same = [b for groups in rounds.values() for group in groups for b in group if b.hooked is hooked]
            row |= {
                f"{name}_ms": statistics.median(span for block in same for span in block.ns) / 1e6,
                f"{name}_prepared": sum(block.prepared for block in same), f"{name}_blocks": len(same),
            }  # fmt: skip
        rows.append(row)
    return rows


def judge(rows: Sequence[dict[str, Any]], lost: int, retracted: int, arguments: argparse.Namespace) -> list[Any]:
    """Returns the bounds: nothing lost, not slower, a narrow interval, the builder at work."""
    bounds = [
        results.bound("requests without a whole answer", "<= 0", lost),
        results.bound("requests retracted", "<= 0", retracted),
    ]
    for batch in arguments.batches:
        starts = sum(len(row["ratio_by_round"]) for row in rows if row["batch"] == batch)
        bounds.append(results.bound(f"batch {batch}: starts measured", f">= {arguments.rounds}", starts))
    for row in rows:
        where = f"batch {row['batch']}"
        share = row["with_prepared"] / (row["with_blocks"] * arguments.steps)
        bounds += [
            results.bound(f"{where}, without / with, low end", f">= {MARGIN}", row["low"]),
            results.bound(f"{where}, width of the interval", f"<= {RESOLUTION}", row["high"] - row["low"]),
            results.bound(f"{where}, without / with", ">= 1.0", row["ratio"]),
            results.bound(f"{where}: steps with the hooks, prepared here", ">= 1.0", share),
            results.bound(f"{where}: steps without them, prepared here", "<= 0", row["without_prepared"]),
        ]
    return bounds


# ---------------------------------------------------------------------- the run


def launch(round_: int, arguments: argparse.Namespace) -> tuple[servers.Server, Path]:
    """Starts a server, not yet up; returns it and the file of its blocks."""
    folder = arguments.logs / f"{arguments.name}-{round_}"
    variables = {
        **environment("benchmarks.steps:install", folder / "blocks.jsonl", folder=CHECKOUT),
        "SGLANG_HOST_IP": "127.0.0.1", STEPS: str(arguments.steps), SEED: str(round_), "DSV4_PREP": "auto",
    }  # fmt: skip
    words, apart = ["--disable-cuda-graph", *arguments.server], PORTS_APART * round_
    return servers.launch("decode", arguments.model_path, words, variables, folder, apart=apart), folder


def blocks_of(round_: int, folder: Path) -> list[Block]:
    return [Block(round_, **(line | {"ns": tuple(line["ns"])})) for line in read(folder / "blocks.jsonl")]


def send(server: servers.Server, label: str, batch: int, room: int, arguments: argparse.Namespace) -> int:
    """Sends ``batch`` requests at once, of as many tokens each; returns how many had no whole answer.

    room: the first one's.
    """
    draw = random.Random(f"{arguments.seed}-{batch}")
    lengths = [draw.randint(*arguments.prompt) for _ in range(batch)]
    prompts = [[draw.randrange(10, arguments.vocabulary) for _ in range(length)] for length in lengths]
    load = Load(prompts, [(arguments.groups + SPARE) * BLOCKS * arguments.steps] * batch)
    client = argparse.Namespace(concurrency=batch, timeout=arguments.timeout)
    run = Run(load, client, server.url, None, room).execute(label)
    if run.gone:
        raise servers.ServerDied(f"the server: {server.log}")
    return sum(answer.outcome != "whole" for answer in run.answers)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Writes the result after each batch of each start; its last bounds. Raises ServerDied."""
    started: list[tuple[servers.Server, Path]] = []
    bounds, lost = list[dict[str, Any]](), 0
    try:
        started += [launch(round_, arguments) for round_ in range(arguments.rounds)]
        servers.wait_until_up([server for server, _ in started], arguments.patience)
        for server, _ in started:
            server.suspend()
        for round_, (server, _) in enumerate(started):
            room = 1
            for batch in arguments.batches:
                with server.awake():
                    lost += send(server, f"start {round_}, batch {batch}", batch, room, arguments)
                room += batch
                done = [blocks_of(number, folder) for number, (_, folder) in enumerate(started)]
                rows = summarise([block for blocks in done for block in blocks], arguments.batches)
                said = [read_log(server.log) for server, _ in started]
                retracted = sum(one["saves"] + sum(one["fallbacks"].values()) for one in said)
                bounds = judge(rows, lost, retracted, arguments)
                results.show(rows)
                results.write(arguments.name, rows, bounds, arguments.out)
    finally:
        servers.stop_all([server for server, _ in started], patience=0)
    return bounds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = results.parser(__doc__, "steps-eager")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 4, 16), help="requests at once")
    parser.add_argument("--rounds", type=int, default=2, help="starts of the server")
    parser.add_argument("--groups", type=int, default=16, help="for each batch in a round")
    parser.add_argument("--steps", type=int, default=20, help="in a block")
    parser.add_argument("--prompt", type=int, nargs=2, default=(300, 2000), help="shortest and longest prompt")
    add_requests(parser)
    arguments = servers.parse(parser, argv)
    if arguments.steps <= SETTLING or min(arguments.rounds, arguments.groups) < 1:
        parser.error(f"--rounds and --groups start at 1, --steps at {SETTLING + 1}")
    return arguments


def main() -> int:
    arguments = parse()
    servers.end_when_told()
    return results.status(measure(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
