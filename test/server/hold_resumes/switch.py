"""Holds retracted requests back as long as a word in a file says so; the file is read at every step.

go      they resume as the engine admits them
hold    none resumes: each waits with its copy, as it does when the cache is full for a long time
"""

from __future__ import annotations

import functools
import os
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
    """Wraps the resumes of decode servers and of plain ones, hooks included, in this process.

    While it holds, a decode server resumes none, and a retracted request ends a plain server's pass.
    """
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

    file = Path(os.environ[VARIABLE])
    resume, add_one_req = DecodePreallocQueue.resume_retracted_reqs, PrefillAdder.add_one_req

    def holds() -> bool:
        return file.read_text().strip() == HOLD

    @functools.wraps(resume)
    def resume_unless_held(queue: Any, *args: Any, **kwargs: Any) -> Any:
        return [] if queue.retracted_queue and holds() else resume(queue, *args, **kwargs)

    @functools.wraps(add_one_req)
    def add_unless_held(adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        return AddReqResult.OTHER if req.is_retracted and holds() else add_one_req(adder, req, *args, **kwargs)

    DecodePreallocQueue.resume_retracted_reqs, PrefillAdder.add_one_req = resume_unless_held, add_unless_held
