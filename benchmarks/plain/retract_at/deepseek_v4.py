"""The package's own model, whose scheduler uses the engine's test switch for one step, at the token that was named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang_dsv4.livetest.patched_model import patched
from sglang_dsv4.livetest.zeroing import switch as zeroing


def install() -> None:
    """Wrap the scheduler's decode step, and the load behind its switch, in this process."""
    from sglang.srt.managers import scheduler  # noqa: PLC0415

    zeroing.install()
    engine = scheduler.Scheduler
    engine.update_running_batch = retracting(engine.update_running_batch, scheduler)


def retracting(update: Callable[..., Any], engine: Any) -> Callable[..., Any]:
    """``Scheduler.update_running_batch``. engine: its module, whose TEST_RETRACT is on for the steps that are named."""
    done: set[str] = set()

    @functools.wraps(update)
    def updated(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        due = {req.rid for req in batch.reqs if is_due(req)} - done if len(batch.reqs) > 1 else set()
        done.update(due)
        before = engine.TEST_RETRACT, engine.TEST_RETRACT_INTERVAL
        if due:
            engine.TEST_RETRACT, engine.TEST_RETRACT_INTERVAL = True, 1
        try:
            return update(scheduler, batch, *args, **kwargs)
        finally:
            engine.TEST_RETRACT, engine.TEST_RETRACT_INTERVAL = before

    return updated


def is_due(req: Any) -> bool:
    """Whether the request has the tokens that its name says."""
    _, _, at = req.rid.partition("@")
    return at.isdigit() and len(req.output_ids) >= int(at) and not req.finished()


EntryClass = [patched(install)]
