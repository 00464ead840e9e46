"""How large the arena is and how it is cut. Deterministic, so that ranks agree after one minimum."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from sglang_dsv4.cache.families import Group
from sglang_dsv4.cache.groups import KVCacheGroupSpec
from sglang_dsv4.cache.packed import PackedBlock
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.settings import Settings

COPIES_SHARE = 4  # window and request blocks take at most 1/4 of the arena unless DSV4_HOST_COPIES says more
RAM_SHARE = 2  # at most 1/2 of the free RAM, unless DSV4_HOST_GB says more


@dataclass(frozen=True)
class Demand:
    """What the device side could ever need: full pages of the pool, request slots."""

    pages: int
    request_slots: int


def free_ram() -> int:
    """Bytes of RAM that can be taken: the machine's, or the control group's where that is less."""
    available = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists():
        text = limit.read_text().strip()
        if text != "max":
            available = min(available, int(text) - int(used.read_text()))
    return available


def block_counts(
    specs: dict[Group, KVCacheGroupSpec], demand: Demand, settings: Settings, ram: int, ranks: int = 1
) -> dict[Group, int]:
    """Blocks of each group for this rank.

    ram: ``free_ram()``; ranks: ranks that share it. Raises HostMemoryExhausted when not even one request of one
    block fits.
    """
    stride = {group: PackedBlock.of(spec).block_stride for group, spec in specs.items()}
    per_copy = sum(stride[g] * specs[g].blocks_for(1) for g in (Group.WINDOW, Group.REQUEST))
    per_page = stride[Group.BLOCK] * specs[Group.BLOCK].blocks_for(1)
    wanted_copies = settings.host_copies or demand.request_slots
    budget = _budget(settings, demand.pages * per_page + wanted_copies * per_copy, ram, ranks)
    copies = wanted_copies
    if settings.host_copies is None and per_copy:
        copies = min(wanted_copies, max(1, budget // COPIES_SHARE // per_copy))
    blocks = (budget - copies * per_copy) // per_page if per_page else 0
    if settings.host_gb is None and settings.host_copies is None and per_copy:
        # What the tokens cannot use goes to more copies.
        blocks = min(blocks, demand.pages)
        copies = min(wanted_copies, (budget - blocks * per_page) // per_copy)
    if copies < 1 or (per_page and blocks < 1) or copies * per_copy > budget:
        setting = "DSV4_HOST_GB" if settings.host_copies is None else "DSV4_HOST_GB or lower DSV4_HOST_COPIES"
        raise HostMemoryExhausted(
            f"{budget / 2**30:.3f} GiB of host memory hold not one request "
            f"({copies} copies of {per_copy} bytes, {per_page} bytes a page of tokens): raise {setting}"
        )
    return {
        Group.BLOCK: blocks,
        Group.WINDOW: copies * specs[Group.WINDOW].blocks_for(1),
        Group.REQUEST: copies * specs[Group.REQUEST].blocks_for(1),
    }


def _budget(settings: Settings, wanted: int, ram: int, ranks: int) -> int:
    if settings.host_gb is not None:
        return int(settings.host_gb * 2**30)
    return min(wanted, ram // RAM_SHARE // ranks)
