"""Computes the cost of a geometry: bytes by family and group, host memory, retract times.

Sizes come from ``cache`` (layout, groups, packed blocks, spans) and ``hostmem.sizing`` (the arena); here they are
only multiplied and added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Address, Family, Group
from sglang_dsv4.cache.groups import KVCacheGroupSpec, init_groups
from sglang_dsv4.cache.packed import PackedBlock
from sglang_dsv4.hostmem.sizing import (
    COPIES_SHARE,
    SESSION_WINDOWS_SHARE,
    PoolSize,
    arena_bytes,
    block_counts,
)
from sglang_dsv4.hostmem.split import split
from sglang_dsv4.settings import Settings

UNLIMITED_RAM = 1 << 62
GIB = 1 << 30
POINTS = 2  # of a session: where it ends, and where its last prompt ends
TURN = 2560  # tokens that the next turn of an agent adds, about


@dataclass(frozen=True)
class FamilyFigures:
    """Holds the figures of one family over all its layers. Bytes.

    page_bytes_a_token: with the padding of its pages; 0 unless it grows with the sequence. unit_bytes: one device page
    (``unit``: full page, swa page, request slot).
    """

    name: str
    group: str
    layers: int
    ratio: int
    row_bytes: int
    page_bytes_a_token: float
    unit: str
    unit_bytes: int


@dataclass(frozen=True)
class GroupFigures:
    """Holds the figures of one group's host block. payload_bytes: its families; block_bytes: with padding, as it is
    allocated.
    """

    name: str
    grows: bool
    payload_bytes: int
    block_bytes: int


@dataclass(frozen=True)
class LengthFigures:
    """Holds the figures of retracts of requests of ``tokens`` tokens, of which all but the last are saved.

    moved_bytes: bytes across the link, one way, for one request.
    host_bytes: of all ``requests`` copies at once; settings: the environment that reserves them. move_ms: a load at the
    speed of a link; save_ms: of the largest share of a save, a link to each rank. kept_bytes: rows of all of them that
    HiSparse keeps, on every rank, which are not moved; DSV4_HOST_GB is for both then.
    """

    tokens: int
    moved_bytes: int
    requests: int
    host_bytes: int
    settings: dict[str, str]
    move_ms: float
    save_ms: float
    kept_bytes: int = 0


@dataclass(frozen=True)
class SessionFigures:
    """Holds the figures of sessions of ``tokens`` tokens. Bytes of host blocks.

    first_bytes: of the first save, one point. point_bytes: another point of the same pages. turn_bytes: the save after
    ``turn`` more tokens. a_gib: sessions of ``points`` points that a GiB for tokens holds. settings: the environment
    that has room for ``sessions`` of them, and for ``requests`` retracted requests of as many tokens.
    """

    tokens: int
    first_bytes: int
    point_bytes: int
    turn: int
    turn_bytes: int
    sessions: int
    points: int
    a_gib: float
    requests: int
    settings: dict[str, str]


def family_figures(geometry: Geometry) -> list[FamilyFigures]:
    """Returns all families, in the order of the layout."""
    return [_family(family, geometry.page_size) for family in families(geometry)]


def _family(family: Family, page_size: int) -> FamilyFigures:
    layers = len(family.layers)
    grows = family.address is Address.FULL_PAGE
    return FamilyFigures(
        family.name, family.group.value, layers, family.ratio, family.row_bytes,
        layers * family.page_bytes / page_size if grows else 0.0,
        family.address.value, layers * family.page_bytes,
    )  # fmt: skip


def group_figures(geometry: Geometry) -> list[GroupFigures]:
    """Returns the three groups, in the order of the layout."""
    figures = []
    for group, spec in init_groups(geometry).items():
        packed = PackedBlock.of(spec)
        figures.append(GroupFigures(group.value, spec.max_blocks is None, packed.payload_bytes, packed.block_stride))
    return figures


def length_figures(geometry: Geometry, tokens: int, requests: int, link_gbs: float, ranks: int = 1) -> LengthFigures:
    """Returns the cost of ``requests`` retracted requests of ``tokens`` (2 or more) tokens each.

    link_gbs: 1e9 bytes a second, one way. ranks: of a machine that hold the same cache and share an arena; with
    HiSparse each keeps rows of its own.
    """
    saved = tokens - 1
    specs = init_groups(geometry)
    one = {group: spec.blocks_for(saved) for group, spec in specs.items()}
    all_of_them = block_counts(
        specs, PoolSize(requests * one[Group.PAGED], requests), Settings(sessions=0.0), UNLIMITED_RAM
    )
    host_bytes = arena_bytes(specs, all_of_them)
    moved_by_group = dict.fromkeys(Group, 0)
    for family in families(geometry):
        moved_by_group[family.group] += family.moved_bytes(geometry.page_size, saved)
    moved = sum(moved_by_group.values())
    page, block = ranks * _kept_page(geometry), PackedBlock.of(specs[Group.PAGED]).block_stride
    pages = requests * one[Group.PAGED] if page else 0
    both = _for_both(host_bytes, pages, page, block) if page else host_bytes
    return LengthFigures(
        tokens, moved, requests, host_bytes,
        {"DSV4_HOST_GB": _gigabytes(both), "DSV4_HOST_COPIES": str(requests)},
        moved / (link_gbs * 1e6),
        _largest_share(ranks, one[Group.PAGED], specs, moved_by_group) / (link_gbs * 1e6),
        pages * page,
    )  # fmt: skip


def session_figures(geometry: Geometry, tokens: int, sessions: int, requests: int) -> SessionFigures:
    """Returns the cost of ``sessions`` sessions of ``tokens`` (a page or more) tokens each.

    A point lies at the end of a page. It takes the blocks of all pages below, which points share, and a window block.
    """
    specs = init_groups(geometry)
    page, window, request = (PackedBlock.of(specs[group]).block_stride for group in Group)
    pages = tokens // geometry.page_size
    alone = _blocks_with_windows(sessions * pages, sessions * POINTS, page, window)
    away = requests * specs[Group.PAGED].blocks_for(tokens - 1)
    blocks = _blocks_with_windows(sessions * pages + away, sessions * POINTS, page, window)
    return SessionFigures(
        tokens, pages * page + window, window, TURN, TURN // geometry.page_size * page + window,
        sessions, POINTS, sessions * GIB / (alone * page), requests,
        {
            "DSV4_HOST_GB": _gigabytes(blocks * page + requests * (window + request)),
            "DSV4_HOST_COPIES": str(requests),
            "DSV4_SESSIONS": "auto",
        },
    )  # fmt: skip


def _blocks_with_windows(pages: int, windows: int, page: int, window: int) -> int:
    """Returns the least paged blocks of which ``block_counts`` leaves ``pages`` and makes ``windows`` for sessions.

    page, window: bytes of a block.
    """
    for_pages = -(-pages * SESSION_WINDOWS_SHARE // (SESSION_WINDOWS_SHARE - 1))
    return max(for_pages, -(-windows * window // page) * SESSION_WINDOWS_SHARE)


def _largest_share(ranks: int, pages: int, specs: dict[Group, KVCacheGroupSpec], moved: dict[Group, int]) -> float:
    """Returns bytes of a save that the busiest of ``ranks`` moves. pages: of the request; moved: bytes of all, by
    group.
    """
    a_page = moved[Group.PAGED] / max(1, pages)
    shares = split(ranks, pages, {group: PackedBlock.of(spec).payload_end for group, spec in specs.items()})
    return max((share.last - share.first) * a_page + sum(moved[group] for group in share.groups) for share in shares)


def _kept_page(geometry: Geometry) -> int:
    """Returns bytes of the rows of a page of tokens that are kept elsewhere."""
    whole = families(replace(geometry, elsewhere=()))
    return sum(f.page_bytes * len(f.layers) for f in whole if f.name in geometry.elsewhere)


def _for_both(arena: int, pages: int, page: int, block: int) -> int:
    """Returns the least DSV4_HOST_GB, in bytes, of which ``kept_pages`` gives ``pages`` and leaves ``arena``.

    page: bytes of its rows on all ranks; block: bytes of its block in the arena.
    """
    tokens = (COPIES_SHARE - 1) / COPIES_SHARE  # at most, of it
    return math.ceil(max(pages * (page + block) / tokens, arena / (1 - tokens * page / (page + block))))


def _gigabytes(nbytes: int) -> str:
    """Returns GiB with two places, rounded up so that the setting is never a block short."""
    hundredths = -(-nbytes * 100 // GIB)
    return f"{hundredths // 100}.{hundredths % 100:02}"
