"""Holds retracted requests back as long as a word in a file says so; the file is read at every step.

go      they resume as the engine admits them
hold    none resumes: each waits with its copy, as it does when the cache is full for a long time
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_dsv4.livetest import servers

VARIABLE = "HOLD_RESUMES_FILE"
GO, HOLD = "go", "hold"


def new_switch(folder: Path) -> tuple[Path, dict[str, str]]:
    """A file in ``folder`` that says go, and the environment of a server that reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.resolve() / "hold_resumes.txt"
    file.write_text(GO)
    return file, servers.model_package("hold_resumes", Path(__file__).parents[1]) | {VARIABLE: str(file)}


def install() -> None:
    """Wraps the resumes of decode servers and of plain ones, hooks included, in this process."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

    file = Path(os.environ[VARIABLE])
    DecodePreallocQueue.resume_retracted_reqs = holding(DecodePreallocQueue.resume_retracted_reqs, file)
    PrefillAdder.add_one_req = holding_back(PrefillAdder.add_one_req, file, AddReqResult.OTHER)


def holding(resume: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """``DecodePreallocQueue.resume_retracted_reqs`` behind the switch."""

    @functools.wraps(resume)
    def resume_unless_held(queue: Any, *args: Any, **kwargs: Any) -> Any:
        if queue.retracted_queue and file.read_text().strip() == HOLD:
            return []
        return resume(queue, *args, **kwargs)

    return resume_unless_held


def holding_back(add_one_req: Callable[..., Any], file: Path, refused: Any) -> Callable[..., Any]:
    """``PrefillAdder.add_one_req`` behind the switch: a retracted request ends the pass with ``refused``."""

    @functools.wraps(add_one_req)
    def add_unless_held(adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        if req.is_retracted and file.read_text().strip() == HOLD:
            return refused
        return add_one_req(adder, req, *args, **kwargs)

    return add_unless_held
