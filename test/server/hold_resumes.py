"""Holds retracted requests back as long as a word in a file says so; the file is read at every step.

go      they resume as the engine admits them
hold    none resumes: each waits with its copy, as it does when the cache is full for a long time
"""

from pathlib import Path
from typing import Any

from sglang_dsv4.livetest.in_server import around, environment

GO, HOLD = "go", "hold"


def new_switch(folder: Path) -> tuple[Path, dict[str, str]]:
    """A file in ``folder`` that says go, and the environment of a server that reads it."""
    file = folder.resolve() / "hold_resumes.txt"
    return file, environment("hold_resumes:install", file, GO, Path(__file__).resolve().parent)


def install(file: Path) -> None:
    """Wraps the resumes of decode and of plain servers: while it holds, none comes back; a plain pass ends there."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

    def holds() -> bool:
        return file.read_text().strip() == HOLD

    def resume_unless_held(resume: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
        return [] if queue.retracted_queue and holds() else resume(queue, *args, **kwargs)

    def add_unless_held(add: Any, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        return AddReqResult.OTHER if req.is_retracted and holds() else add(adder, req, *args, **kwargs)

    around(DecodePreallocQueue, "resume_retracted_reqs", resume_unless_held)
    around(PrefillAdder, "add_one_req", add_unless_held)
