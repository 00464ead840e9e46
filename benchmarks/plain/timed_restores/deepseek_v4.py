"""A restore and the recompute of one request under the same retracts: every other save is refused, as without room.

One JSON line for each request that comes back: its name, when the pass began that admitted it (the client has the same
clock), how many tokens it had been answered with, and how many the pass prefills of it: none, or one, where it was
restored.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.plain.timed_restores import VARIABLE
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.livetest.patched_model import patched


def install() -> None:
    """Wrap the pool's save and the scheduler's prefill pass, hooks included, in this process."""
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415

    from sglang_dsv4.pools.token_to_kv import TokenToKVPool  # noqa: PLC0415 - extends the engine's pool

    TokenToKVPool.get_cpu_copy = every_other(TokenToKVPool.get_cpu_copy)  # type: ignore[method-assign]
    Scheduler.get_new_batch_prefill = noting(Scheduler.get_new_batch_prefill, Path(os.environ[VARIABLE]))


def every_other(save: Callable[..., Any]) -> Callable[..., Any]:
    """``save`` at the first call, the third, and so on; the others have no room."""
    number = itertools.count()

    @functools.wraps(save)
    def saved(*args: Any, **kwargs: Any) -> Any:
        if next(number) % 2:
            raise HostMemoryExhausted("this one is left to the engine, to be timed beside a restore")
        return save(*args, **kwargs)

    return saved


def noting(get_new_batch: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """``Scheduler.get_new_batch_prefill``, which notes the requests that it takes back."""

    @functools.wraps(get_new_batch)
    def noted(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        waiting = {req.rid for req in scheduler.waiting_queue if req.is_retracted}
        began = time.time()
        plan = get_new_batch(scheduler, *args, **kwargs)
        batch = plan.batch_to_run
        if waiting:
            taken = [(req, 0) for req in plan.running_batch.reqs]
            taken += [] if batch is None else zip(batch.reqs, batch.extend_lens, strict=True)
            for req, extend in taken:
                if req.rid in waiting:
                    line = {"rid": req.rid, "admitted": began, "had": len(req.output_ids), "extend": int(extend)}
                    with file.open("a") as out:
                        print(json.dumps(line), file=out)
        return plan

    return noted


EntryClass = [patched(install)]
