"""Counts the pieces of a transfer between servers in both page orders; each piece costs microseconds to post.

Stock: each layer apart, as in the engine. Page-major: the layers of a family together (see ``pools.page_major``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Group

COVERED = (0, 4, 128)  # ratios; the others share few buffers among many layers, and have few pieces a page already
MAP_BYTES = 8  # a full slot, of the map to window slots


def page_stride(ratios: Sequence[int]) -> int:
    """Returns the divisor of page-major page ids: the layers of the largest family. 1 without compressed layers."""
    return max((ratios.count(ratio) for ratio in set(ratios) - {0}), default=1)


def is_covered(ratios: Sequence[int]) -> bool:
    """Returns whether layers of these ratios can be page-major."""
    return set(ratios) <= set(COVERED)


@dataclass(frozen=True)
class PieceFigures:
    """Holds the pieces of a page of all layers, and the memory cost of having few.

    regions: of history, registered with a transfer backend; a page has as many pieces. piece_bytes: of each, in the
    order of the families. extra_bytes: a token, of the longer map and of unused rows.
    """

    layout: str
    regions: int
    piece_bytes: tuple[int, ...]
    extra_bytes: float

    def pieces(self, tokens: int, page_size: int = 256) -> int:
        """Counts the pieces of a request of ``tokens`` tokens on scattered pages."""
        return self.regions * -(-tokens // page_size)


def piece_figures(geometry: Geometry) -> tuple[PieceFigures, ...]:
    """Computes the figures of stock and, where it is covered, of page-major."""
    history = [family for family in families(geometry) if family.group is Group.PAGED]
    apart = tuple(family.page_bytes for family in history for _ in family.layers)
    stock = PieceFigures("stock", len(apart), apart, 0.0)
    if not is_covered(geometry.ratios) or geometry.elsewhere or not history:
        return (stock,)
    stride = page_stride(geometry.ratios)
    together = tuple(stride * family.page_bytes for family in history)
    unused = (sum(together) - sum(apart)) / geometry.page_size
    return stock, PieceFigures("page-major", len(together), together, unused + MAP_BYTES * (stride - 1))
