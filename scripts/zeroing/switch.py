"""One word in a file, read at every retract and every load, says what this server does to its own requests.

    off           nothing: a request that runs alone is not retracted, as in the engine
    none          it is retracted at the engine's forced interval, and loaded as it was saved
    <family>      the same, and that family's bytes of the copy are zero before they are loaded

The bytes are zeroed in host memory after the copy's own checks and before the transfer, so verify mode still compares
the device with what was loaded.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_dsv4.transfer.mover import Mover

from sglang_dsv4.hostmem.memory import HostCopy

logger = logging.getLogger(__name__)
VARIABLE = "ZERO_FAMILY_FILE"
OFF, NONE = "off", "none"


def chosen() -> str:
    """The word in the file."""
    return Path(os.environ[VARIABLE]).read_text().strip()


def install() -> None:
    """Wrap the mover's load and the engine's choice of what to retract, in this process."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch  # noqa: PLC0415

    Mover.load = zeroing(Mover.load)  # type: ignore[method-assign]
    ScheduleBatch.retract_decode = retracting_the_last(ScheduleBatch.retract_decode)


def zero(copy: HostCopy, name: str) -> int:
    """Zero the bytes of family ``name`` in ``copy``, every layer, row and plane; how many. ValueError: no such one."""
    for group, region in copy.memory.regions.items():
        for family in region.spec.families:
            if family.name == name:
                views = [
                    region.packed.view(copy.memory.region_tensor(group), block, family, layer, plane)
                    for block in copy.blocks[group].tolist()
                    for layer in range(len(family.layers))
                    for plane in range(len(family.planes))
                ]
                return sum(view.zero_().numel() for view in views)
    raise ValueError(f"no cache family {name!r} in {VARIABLE}")


def zeroing(load: Callable[..., None]) -> Callable[..., None]:
    """``Mover.load`` behind the switch."""

    @functools.wraps(load)
    def zeroing_load(mover: Mover, copy: HostCopy, request: Any) -> None:
        family = chosen()
        if family not in (OFF, NONE):
            logger.info("zeroed %d bytes of %s", zero(copy, family), family)
        load(mover, copy, request)

    return zeroing_load


def retracting_the_last(retract: Callable[..., Any]) -> Callable[..., Any]:
    """``ScheduleBatch.retract_decode``, which keeps at least one request, without that exception.

    So a request can be retracted while nothing else runs, and its steps stay the same from run to run. Once for each
    token: the engine's forced interval counts steps, and none is made while the request is away.
    """
    done: list[tuple[str, int]] = []

    @functools.wraps(retract)
    def retract_decode(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if len(batch.reqs) != 1 or chosen() == OFF:
            return retract(batch, *args, **kwargs)
        (req,) = batch.reqs
        now = (req.rid, len(req.output_ids))
        if done == [now]:
            return retract(batch, *args, **kwargs)
        done[:] = [now]
        batch.release_req(0, 0, *args, **kwargs)
        batch.filter_batch(keep_indices=[])
        return [req], 1.0, []

    return retract_decode
