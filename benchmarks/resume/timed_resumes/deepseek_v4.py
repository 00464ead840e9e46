"""Times resumes inside the scheduler's process; one JSON line each, with the wall clock that the client has too.

admitted: when the queue began the pass that admitted the request. load_ms: CopyService.load alone, from an idle device
to the last byte written. Synchronizing for that makes the resume later, never earlier.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_dsv4.engine.prealloc_queue import PreallocQueue
from sglang_dsv4.models.deepseek_v4 import EntryClass
from sglang_dsv4.pools.copy_service import CopyService

__all__ = ["EntryClass"]

_passes = {"began": 0.0}


def _noting_the_pass(resume: Callable[..., Any]) -> Callable[..., Any]:
    """Every pass over the retracted requests begins with it."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        _passes["began"] = time.time()
        return resume(*args, **kwargs)

    return noted


def _timed(load: Callable[..., None], out: Path) -> Callable[..., None]:
    def timed(host: CopyService, copy: Any, *args: Any, **kwargs: Any) -> None:
        began = _passes["began"]
        torch.cuda.synchronize()
        started = time.perf_counter()
        load(host, copy, *args, **kwargs)
        torch.cuda.synchronize()
        line = {"admitted": began, "tokens": copy.tokens, "bytes": copy.nbytes,
                "load_ms": (time.perf_counter() - started) * 1e3}  # fmt: skip
        with out.open("a") as file:
            print(json.dumps(line), file=file)

    return timed


if "TIMED_RESUMES_FILE" in os.environ:
    PreallocQueue.resume_retracted_reqs = _noting_the_pass(PreallocQueue.resume_retracted_reqs)  # type: ignore[method-assign]
    CopyService.load = _timed(CopyService.load, Path(os.environ["TIMED_RESUMES_FILE"]))  # type: ignore[method-assign]
