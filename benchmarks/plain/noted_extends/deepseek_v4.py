"""The package's own model, beside a scheduler that notes the one-token extends of its mixed batches."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.plain.noted_extends import VARIABLE
from sglang_dsv4.livetest.patched_model import patched


def install() -> None:
    """Wrap the scheduler's step in this process."""
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415

    Scheduler.run_batch = noting(Scheduler.run_batch, Path(os.environ[VARIABLE]))


def noting(run_batch: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """``Scheduler.run_batch``, which writes one JSON line a mixed batch: the prefixes of its extends of one token."""

    @functools.wraps(run_batch)
    def noted(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_mixed():
            extends = zip(batch.prefix_lens, batch.extend_lens, strict=True)
            with file.open("a") as out:
                print(json.dumps([int(prefix) for prefix, length in extends if length == 1]), file=out)
        return run_batch(scheduler, batch, *args, **kwargs)

    return noted


EntryClass = [patched(install)]
