"""Computes the size of an arena from settings, demand and free RAM.

Too large, the OOM killer ends a server; too small, copies are lost. Sizes are deterministic, so that ranks agree after
one minimum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from sglang_dsv4.cache.units import Units
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.hostmem.nodes import Nodes, free_on
from sglang_dsv4.settings import Settings

TAILS_SHARE = 4  # of a HiSparse server's DSV4_HOST_GB 1/4 is for tails; the rows that it keeps lie elsewhere
RAM_SHARE = 2  # at most 1/2 of the free RAM, unless DSV4_HOST_GB says more


@dataclass(frozen=True)
class PoolSize:
    """Bounds the demand of a device pool: its full pages and request slots."""

    pages: int
    request_slots: int


@dataclass(frozen=True)
class ArenaSize:
    """Says how many ``units`` an arena has."""

    units: Units
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of all units, and of what lies behind them."""
        return self.count * self.units.cost

    def required(self, budget: int | None = None) -> ArenaSize:
        """Returns itself; raises HostMemoryExhausted where a request of one page may not fit. budget: bytes for it."""
        if self.count < self.units.least:
            raise HostMemoryExhausted(
                f"{(self.nbytes if budget is None else budget) / 2**30:.3f} GiB of host memory hold not one request "
                f"({self.units.least} units of {self.units.cost} bytes): raise DSV4_HOST_GB"
            )
        return self

    def agreed(self, sizes: Iterable[ArenaSize]) -> ArenaSize:
        """Returns the size for ranks of all ``sizes``: they run out of units together, and number them alike.

        Stages of a pipeline have units of other bytes, and tails of others: as long as the longest they are on each.
        """
        found = list(sizes)
        tails = map(max, zip(*(size.units.tails for size in found), strict=True))
        return ArenaSize(replace(self.units, tails=tuple(tails)), min(size.count for size in found))


# Names in a control group, by version of the interface: limit, use, and in memory.stat the page cache that lies idle.
# Beyond ``high`` a group is slowed down until it gives pages back, which pinned ones are not.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2, _V2_HIGH = (("memory." + limit, "memory.current", "inactive_file") for limit in ("max", "high"))


def free_ram(bound: Nodes | None = None) -> int:
    """Measures the bytes of RAM that can be taken: the machine's, or of a control group or nodes where that is less.

    bound: the nodes to which memory is bound, on each rank that takes it.
    """
    limits = [free_on(bound), *(_left(place, *names) for place, names in _control_groups())]
    return max(0, min([psutil.virtual_memory().available, *(left for left in limits if left is not None)]))


def total_ram() -> int:
    """Returns the bytes of RAM that the machine has."""
    return int(psutil.virtual_memory().total)


def _left(place: Path, limit: str, used: str, idle: str) -> int | None:
    """Reads the bytes that a control group may still take; None: no limit. Idle page cache counts as free."""
    if not (place / limit).exists() or not (place / used).exists():
        return None
    text = (place / limit).read_text().strip()
    if text == "max":
        return None
    stat = place / "memory.stat"
    counted = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    return int(text) - int((place / used).read_text()) + int(counted.get(idle, 0))


def _control_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yields this process's control groups and those above them, with the names in them.

    In a container they lie at the root; a batch job or a service has a path of its own, and any may have a limit.
    """
    own = Path("/proc/self/cgroup")
    for line in own.read_text().splitlines() if own.exists() else ():
        number, controllers, path = line.split(":", 2)
        root, names = Path("/sys/fs/cgroup"), _V2
        if number != "0":
            if "memory" not in controllers.split(","):
                continue
            root, names = root / "memory", _V1
        group = root if ".." in path else root / path.lstrip("/")  # above the root of this process
        for place in (group, *group.parents):
            yield place, names
            if names is _V2:
                yield place, _V2_HIGH
            if place == root:
                break


def arena_size(units: Units, demand: PoolSize, settings: Settings, ram: int, arenas: int = 1) -> ArenaSize:
    """Chooses how many units an arena has; with auto as many as the device pool can fill.

    ram: bytes that can be taken; arenas: that share it. Raises HostMemoryExhausted when a request of one page may not
    fit, and when DSV4_HOST_GB for each of the arenas is more than ``ram``.
    """
    wanted = demand.pages + demand.request_slots * units.longest_tail
    budget = _budget(settings, wanted * units.cost, ram, arenas)
    return ArenaSize(units, budget // units.cost).required(budget)


def kept_pages(settings: Settings, pool_pages: int, kept_bytes: int, unit_bytes: int, room: int, ranks: int = 1) -> int:
    """Chooses how many pages of detached rows HiSparse holds beside the arena.

    Of DSV4_HOST_GB they share with the units of pages the part that is not for tails. room: bytes of RAM that a rank
    can take. ranks: that share DSV4_HOST_GB, and hold rows of their own. With auto as many as the pool has pages, at
    most half of the room.
    """
    if settings.host_gb is None:
        return min(pool_pages, room // RAM_SHARE // (kept_bytes + unit_bytes))
    tokens = int(settings.host_gb * 2**30) * (TAILS_SHARE - 1) // TAILS_SHARE
    return min(pool_pages, tokens // (kept_bytes * ranks + unit_bytes))


def too_much(host_gb: float, ram: int, arenas: int) -> str | None:
    """Returns why DSV4_HOST_GB=``host_gb`` does not fit into ``ram`` free bytes; None: it does."""
    if host_gb * arenas * 2**30 <= ram:
        return None
    each = ":" if arenas == 1 else f" for each of {arenas} arenas is {host_gb * arenas:.12g} GiB, and"
    return (
        f"DSV4_HOST_GB={host_gb:.12g}{each} {ram / 2**30:.2f} GiB of RAM can be taken; lower it to less than "
        f"{ram / arenas / 2**30:.2f}, or set auto"
    )


def _budget(settings: Settings, wanted: int, ram: int, arenas: int) -> int:
    if settings.host_gb is None:
        return min(wanted, ram // RAM_SHARE // arenas)
    trouble = too_much(settings.host_gb, ram, arenas)
    if trouble is not None:
        raise HostMemoryExhausted(trouble)
    return int(settings.host_gb * 2**30)
