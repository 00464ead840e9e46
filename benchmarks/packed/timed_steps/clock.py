"""What a forward takes on its stream. One JSON line: ``number`` of the forward, its requests, new tokens, milliseconds.

From one event before everything that a batch puts there to one behind it: where the GPU waits for the host, that
counts, too. ``host_ms`` is what the scheduler's thread took to launch it: where both are the same, the host was timed,
or waited for the card in there.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.packed.timed_transfers.switch import Transfers
from benchmarks.stall.timed_retracts.switch import Around, around

FILE = "TIMED_STEPS_FILE"
BEHIND = 4  # forwards after which one is surely over: nobody waits for the clock


class Steps:
    """The forwards of one server."""

    def __init__(self, out: Path, event: Callable[[], Any]) -> None:
        self.out, self.event = out, event
        self.number = 0
        self._running: deque[tuple[Any, Any, dict[str, Any]]] = deque()

    def run_batch(self, original: Around, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Around Scheduler.run_batch."""
        begin, end = self.event(), self.event()
        decode = batch.forward_mode.is_decode()
        note = {"number": self.number, "requests": len(batch.reqs), "decode": decode,
                "tokens": len(batch.reqs) if decode else batch.extend_num_tokens}  # fmt: skip
        begin.record(scheduler.forward_stream)
        started = time.perf_counter()
        result = original(scheduler, batch, *args, **kwargs)
        note["host_ms"] = (time.perf_counter() - started) * 1e3
        end.record(scheduler.forward_stream)
        self.number += 1
        self._running.append((begin, end, note))
        if len(self._running) > BEHIND:
            self._write(*self._running.popleft())
        return result

    def _write(self, begin: Any, end: Any, note: dict[str, Any]) -> None:
        end.synchronize()
        with self.out.open("a") as out:
            out.write(json.dumps(note | {"ms": begin.elapsed_time(end)}) + "\n")


def install() -> None:
    """Into this process."""
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415
    from sglang.srt.managers.scheduler_components.invariant_checker import (  # noqa: PLC0415
        SchedulerInvariantChecker,
    )

    file = Path(os.environ[FILE])
    transfers = Transfers(file)
    around(Scheduler, "run_batch", Steps(file, lambda: torch.cuda.Event(enable_timing=True)).run_batch)
    around(Scheduler, "handle_generate_request", transfers.handle_generate_request)
    # Held pages belong to no request, which an idle server would call a leak.
    around(SchedulerInvariantChecker, "_check_full_pool", lambda *_, **__: (False, ""))
