#!/usr/bin/env python3
"""What the hooks add to a decode step in which nothing is retracted: our override above one that does nothing.

    python3 -m benchmarks.steps.hooks [--loops 200000]

The one hook that such a step passes through is a method of our queue. It is timed above a stand-in for the engine's
method; the stand-in alone is the baseline. Needs no GPU and no server.
Exit status 1 when a step costs more than the bound.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from sglang_dsv4.bench import results
from sglang_dsv4.engine.signatures import engines_class
from sglang_dsv4.engine.standalone import boot, install_hooks

BOUND_US = 10.0  # of a step: under 1 % of the fastest one recorded on a live server
ROUNDS = 15


def resume_nothing(queue: Any, rids_to_check: Any = None) -> list[Any]:
    """The engine's own while no request is retracted."""
    return [] if rids_to_check is None else list(rids_to_check)


# Every method of ours that a step calls when graphs make the metadata and no request waits.
EACH_STEP = ("DecodePreallocQueue.resume_retracted_reqs",)


def nanoseconds(call: Callable[[], Any], loops: int) -> float:
    """One call: the median of ROUNDS means."""
    means = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        for _ in range(loops):
            call()
        means.append((time.perf_counter_ns() - began) / loops)
    return statistics.median(means)


def measure(loops: int) -> list[dict[str, Any]]:
    """One row a hook: the stand-in bare, behind the hook, and the difference."""
    from sglang.srt.disaggregation import decode  # noqa: PLC0415

    (name,) = EACH_STEP
    ours = decode.DecodePreallocQueue
    engines = engines_class(ours)
    queue = object.__new__(ours)
    queue.retracted_queue, queue.held_rebootstrap_reqs = [], []
    with mock.patch.object(engines, "resume_retracted_reqs", resume_nothing):
        bare = nanoseconds(functools.partial(resume_nothing, queue), loops)
        hooked = nanoseconds(queue.resume_retracted_reqs, loops)
    return [{"hook": name, "bare_ns": bare, "hooked_ns": hooked, "added_ns": hooked - bare}]


def main() -> int:
    """Exit status 1 when the bound is missed."""
    parser = results.parser(__doc__, "hooks")
    parser.add_argument("--loops", type=int, default=200_000, help="calls in each of the rounds")
    results.add_out(parser)
    arguments = parser.parse_args()
    boot()
    install_hooks()
    rows = measure(arguments.loops)
    for row in rows:
        print(f"{row['hook']:55} bare {row['bare_ns']:6.0f} ns, hooked {row['hooked_ns']:6.0f} ns")
    added = sum(row["added_ns"] for row in rows) / 1e3
    bounds = [results.bound("hooks of a step, us", f"<= {BOUND_US}", added)]
    return results.finish(arguments, rows, bounds)


if __name__ == "__main__":
    sys.exit(main())
