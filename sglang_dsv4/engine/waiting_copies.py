"""A copy that waits holds nothing of the device: it stops no flush, no weight update and no release of memory.

The engine counts every retracted request as work in progress. So what waits with a copy is set aside while the engine
asks itself whether it is idle, and is back in its place afterwards. A flush leaves the copy good. Other weights make it
stale, and its request is computed again (see ``prealloc_queue``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_dsv4.engine.aborting import without
from sglang_dsv4.engine.saving import copy_of


@contextmanager
def set_aside(scheduler: Any) -> Iterator[None]:
    """Within this, the retracted queue of ``scheduler`` (None: there is none) has no request with a copy."""
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    aside = [req for req in queue.retracted_queue if copy_of(req) is not None] if queue is not None else []
    if not aside:
        yield
        return
    queue.retracted_queue = without(queue.retracted_queue, aside)
    try:
        yield
    finally:
        queue.retracted_queue = [*aside, *queue.retracted_queue]


def flush_cache(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND Scheduler.flush_cache, which weight updates call too."""
    with set_aside(scheduler):
        return original(scheduler, *args, **kwargs)
