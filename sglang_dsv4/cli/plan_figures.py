"""Computes the cost of a geometry: bytes by family and group, host memory, retract times.

Sizes come from ``cache`` (layout, groups, units); here they are only multiplied and added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Address, Family, Group
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.cache.units import Units
from sglang_dsv4.hostmem.sizing import TAILS_SHARE
from sglang_dsv4.hostmem.split import split

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
    """Holds the figures of one group. payload_bytes: of a page of tokens where it grows, else at most of a request."""

    name: str
    grows: bool
    payload_bytes: int


@dataclass(frozen=True)
class UnitFigures:
    """Holds the figures of host memory, in equal units. nbytes: of a unit; a page of tokens takes one.

    most_tail: units of the live rows of a request at most. point_tail: at the end of a page, where a session goes on.
    """

    nbytes: int
    most_tail: int
    point_tail: int


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
    """Holds the figures of sessions of ``tokens`` tokens. Bytes of host units.

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
        lengths = (1,) if spec.grows else range(2 * geometry.page_size)
        figures.append(GroupFigures(group.value, spec.grows, max(map(spec.nbytes, lengths))))
    return figures


def unit_figures(geometry: Geometry, row_bytes: int = 0) -> UnitFigures:
    """Returns the units of host memory. row_bytes: of a token's choices."""
    units = Units.of(geometry, row_bytes)
    return UnitFigures(units.cost, units.longest_tail, units.tail(geometry.page_size))


def length_figures(
    geometry: Geometry, tokens: int, requests: int, link_gbs: float, ranks: int = 1, row_bytes: int = 0
) -> LengthFigures:  # fmt: skip
    """Returns the cost of ``requests`` retracted requests of ``tokens`` (2 or more) tokens each.

    link_gbs: 1e9 bytes a second, one way. ranks: of a machine that hold the same cache and share an arena; with
    HiSparse each keeps rows of its own. row_bytes: of a token's choices, which lie on the host and cross no link.
    """
    saved, units = tokens - 1, Units.of(geometry, row_bytes)
    moved = {group: spec.nbytes(saved) for group, spec in init_groups(geometry).items()}
    host_bytes = max(requests * units.count(saved), units.least) * units.cost
    kept = ranks * _kept_page(geometry)
    pages = requests * units.pages(saved) if kept else 0
    both = _for_both(host_bytes, pages, kept, units.nbytes) if kept else host_bytes
    link = link_gbs * 1e6
    return LengthFigures(
        tokens, sum(moved.values()), requests, host_bytes, {"DSV4_HOST_GB": _gigabytes(both)},
        sum(moved.values()) / link, _largest_share(ranks, units, saved, moved) / link, pages * kept,
    )  # fmt: skip


def session_figures(
    geometry: Geometry, tokens: int, sessions: int, requests: int, row_bytes: int = 0
) -> SessionFigures:  # fmt: skip
    """Returns the cost of ``sessions`` sessions of ``tokens`` (a page or more) tokens each.

    A point lies at the end of a page. It takes the units of all pages below, which points share, and those of its tail.
    row_bytes: of a token's choices.
    """
    units = Units.of(geometry, row_bytes)
    pages, tail = tokens // geometry.page_size, units.tail(geometry.page_size)
    one = pages + POINTS * tail
    host_bytes = max(sessions * one + requests * units.count(tokens - 1), units.least) * units.cost
    return SessionFigures(
        tokens, (pages + tail) * units.cost, tail * units.cost,
        TURN, (TURN // geometry.page_size + tail) * units.cost,
        sessions, POINTS, GIB / (one * units.cost), requests,
        {"DSV4_HOST_GB": _gigabytes(host_bytes)},
    )  # fmt: skip


def _largest_share(ranks: int, units: Units, saved: int, moved: dict[Group, int]) -> float:
    """Returns bytes of a save that the busiest of ``ranks`` moves. moved: bytes of all, by group."""
    pages, tail = units.pages(saved), moved[Group.WINDOW] + moved[Group.REQUEST]

    def before(index: int) -> float:
        """Returns the bytes of the units before number ``index``."""
        in_tail = max(0, index - pages) * units.nbytes
        return min(index, pages) * moved[Group.PAGED] / max(1, pages) + min(in_tail, tail)

    return max(before(share.stop) - before(share.start) for share in split(ranks, units.count(saved)))


def _kept_page(geometry: Geometry) -> int:
    """Returns bytes of the rows of a page of tokens that are kept elsewhere."""
    whole = families(replace(geometry, elsewhere=()))
    return sum(f.page_bytes * len(f.layers) for f in whole if f.name in geometry.elsewhere)


def _for_both(arena: int, pages: int, page: int, unit: int) -> int:
    """Returns a DSV4_HOST_GB, in bytes, of which ``kept_pages`` gives ``pages`` and leaves ``arena``.

    It may be a page above the least: ``kept_pages`` rounds down. page: bytes of its rows on all ranks; unit: bytes of
    its unit in the arena.
    """
    tokens = (TAILS_SHARE - 1) / TAILS_SHARE  # at most, of it
    return math.ceil(max(pages * (page + unit) / tokens, arena / (1 - tokens * page / (page + unit))))


def _gigabytes(nbytes: int) -> str:
    """Returns GiB with two places, rounded up so that the setting is never a unit short."""
    hundredths = -(-nbytes * 100 // GIB)
    return f"{hundredths // 100}.{hundredths % 100:02}"
