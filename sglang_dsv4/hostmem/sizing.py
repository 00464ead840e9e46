"""Computes the size of an arena from settings, demand and free RAM.

Too large, the OOM killer ends a server; too small, copies are lost. Sizes are deterministic, so that ranks agree after
one minimum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from sglang_dsv4.cache.family import Group
from sglang_dsv4.cache.groups import KVCacheGroupSpec
from sglang_dsv4.cache.packed import PackedBlock
from sglang_dsv4.errors import HostMemoryExhausted
from sglang_dsv4.settings import Settings

COPIES_SHARE = 4  # window and request blocks take at most 1/4 of the arena unless DSV4_HOST_COPIES says more
SESSION_WINDOWS_SHARE = 8  # with sessions on, 1/8 of the memory for tokens is for windows, one a point
RAM_SHARE = 2  # at most 1/2 of the free RAM, unless DSV4_HOST_GB says more


@dataclass(frozen=True)
class PoolSize:
    """Bounds the demand of a device pool: its full pages and request slots."""

    pages: int
    request_slots: int


# Names in a control group, by version of the interface: limit, use, and in memory.stat the page cache that lies idle.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def free_ram() -> int:
    """Measures the bytes of RAM that can be taken: the machine's, or a control group's where that is less."""
    groups = (_left(place, *names) for place, names in _control_groups())
    return max(0, min([psutil.virtual_memory().available, *(left for left in groups if left is not None)]))


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
            if place == root:
                break


def block_counts(
    specs: dict[Group, KVCacheGroupSpec], demand: PoolSize, settings: Settings, ram: int, arenas: int = 1
) -> dict[Group, int]:
    """Chooses how many blocks of each group an arena has.

    ram: bytes that can be taken; arenas: that share it. settings.sessions is 0.0 on a server that keeps none. Raises
    HostMemoryExhausted when not even one request of one block fits, and when DSV4_HOST_GB for each of the arenas is
    more than ``ram``.
    """
    stride = {group: PackedBlock.of(spec).block_stride for group, spec in specs.items()}
    per_copy = sum(stride[g] * specs[g].blocks_for(1) for g in (Group.WINDOW, Group.REQUEST))
    per_page = stride[Group.PAGED] * specs[Group.PAGED].blocks_for(1)
    wanted_copies = settings.host_copies or demand.request_slots
    budget = _budget(settings, demand.pages * per_page + wanted_copies * per_copy, ram, arenas)
    copies = wanted_copies
    if settings.host_copies is None and per_copy:
        copies = min(wanted_copies, max(1, budget // COPIES_SHARE // per_copy))
    blocks = (budget - copies * per_copy) // per_page if per_page else 0
    if settings.host_gb is None and settings.host_copies is None and per_copy:
        # Memory that tokens cannot use goes to more copies.
        blocks = min(blocks, demand.pages)
        copies = min(wanted_copies, (budget - blocks * per_page) // per_copy)
    if copies < 1 or (per_page and blocks < 1) or copies * per_copy > budget:
        setting = "DSV4_HOST_GB" if settings.host_copies is None else "DSV4_HOST_GB or lower DSV4_HOST_COPIES"
        raise HostMemoryExhausted(
            f"{budget / 2**30:.3f} GiB of host memory hold not one request "
            f"({copies} copies of {per_copy} bytes, {per_page} bytes a page of tokens): raise {setting}"
        )
    blocks, for_points = _windows_for_points(blocks, per_page, stride[Group.WINDOW], settings.sessions)
    return {
        Group.PAGED: blocks,
        Group.WINDOW: copies * specs[Group.WINDOW].blocks_for(1) + for_points,
        Group.REQUEST: copies * specs[Group.REQUEST].blocks_for(1),
    }


def _windows_for_points(blocks: int, per_page: int, per_window: int, sessions: float | None) -> tuple[int, int]:
    """Returns the paged blocks that are left of ``blocks``, and the window blocks made of the others.

    A point of a session takes a window block and no request block. per_page, per_window: bytes of one. sessions: as in
    Settings; where it bounds their memory, it bounds the windows too.
    """
    if not per_page:
        return blocks, 0
    of_sessions = blocks if sessions is None else min(blocks, int(sessions * 2**30) // per_page)
    windows = of_sessions // SESSION_WINDOWS_SHARE * per_page // per_window
    return blocks - -(-windows * per_window // per_page), windows


def kept_pages(
    settings: Settings, pool_pages: int, kept_bytes: int, block_bytes: int, room: int, ranks: int = 1
) -> int:
    """Chooses how many pages of detached rows HiSparse holds beside the arena.

    Of DSV4_HOST_GB they share with paged blocks the part that is not for window and request blocks. room: bytes of RAM
    that a rank can take. ranks: that share DSV4_HOST_GB, and hold rows of their own. With auto as many as the pool has
    pages, at most half of the room.
    """
    if settings.host_gb is None:
        return min(pool_pages, room // RAM_SHARE // (kept_bytes + block_bytes))
    tokens = int(settings.host_gb * 2**30) * (COPIES_SHARE - 1) // COPIES_SHARE
    return min(pool_pages, tokens // (kept_bytes * ranks + block_bytes))


def arena_bytes(specs: dict[Group, KVCacheGroupSpec], counts: dict[Group, int]) -> int:
    """Counts the bytes of an arena of ``counts`` blocks."""
    return sum(count * PackedBlock.of(specs[group]).block_stride for group, count in counts.items())


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
