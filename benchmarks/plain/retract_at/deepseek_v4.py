"""The package's own model, whose scheduler uses the engine's test switch for one step, at the token that was named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.plain.retract_at import AT, UNREPAIRED
from sglang_dsv4.cache.family import Address
from sglang_dsv4.engine.plain import tree
from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.livetest.patched_model import patched
from sglang_dsv4.pools.copy_service import CopyService

POISON = 0x40  # each byte: a number in every format of the cache, far from what it should be


def install() -> None:
    """Wrap the scheduler's decode step, the load and the repair of what is published, in this process."""
    from sglang.srt.managers import scheduler  # noqa: PLC0415

    engine = scheduler.Scheduler
    engine.update_running_batch = retracting(engine.update_running_batch, scheduler)
    CopyService.load = poisoning(CopyService.load)  # type: ignore[method-assign]
    tree._repair = unless_told(tree._repair)


def poisoning(load: Callable[..., None]) -> Callable[..., None]:
    """``CopyService.load`` into poisoned pages of window and states.

    The engine often gives a request the pages that it has just given up: they would still hold what is not loaded.
    """

    @functools.wraps(load)
    def poisoned(
        host: CopyService, copy: HostCopy, indices: torch.Tensor, swa_map: torch.Tensor, slot: int, first_page: int = 0
    ) -> None:
        page = host.side.geometry.page_size
        rows = swa_map[indices[first_page * page :].long()]
        pages = torch.unique(rows[rows > 0] // page)
        for family in host.side.families:
            if family.address is Address.SWA_PAGE:
                for buffer in host.side.buffers[family.name]:
                    buffer[pages] = POISON
        load(host, copy, indices, swa_map, slot, first_page)

    return poisoned


def unless_told(repair: Callable[..., None]) -> Callable[..., None]:
    """The repair of what a restored request publishes, but for requests whose name says so."""

    @functools.wraps(repair)
    def repaired(plain: Any, req: Any, *given: Any) -> None:
        if UNREPAIRED not in req.rid:
            repair(plain, req, *given)

    return repaired


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
    _, _, at = req.rid.replace(UNREPAIRED, AT).partition(AT)
    return at.isdigit() and len(req.output_ids) >= int(at) and not req.finished()


EntryClass = [patched(install)]
