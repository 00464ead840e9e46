"""One word in a file, read at every step, says whether retracted requests come back.

go            they resume as the engine admits them
hold          none resumes: each waits with its copy, as it does when the cache is full for a long time
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "HOLD_RESUMES_FILE"
GO, HOLD = "go", "hold"


def install() -> None:
    """Wrap the queue's resume, hooks included, in this process."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue  # noqa: PLC0415

    resume = DecodePreallocQueue.resume_retracted_reqs
    DecodePreallocQueue.resume_retracted_reqs = holding(resume, Path(os.environ[VARIABLE]))


def holding(resume: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """``DecodePreallocQueue.resume_retracted_reqs`` behind the switch."""

    @functools.wraps(resume)
    def resume_unless_held(queue: Any, *args: Any, **kwargs: Any) -> Any:
        if queue.retracted_queue and file.read_text().strip() == HOLD:
            return []
        return resume(queue, *args, **kwargs)

    return resume_unless_held
