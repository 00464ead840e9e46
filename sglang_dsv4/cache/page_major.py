"""What a transfer between servers moves is counted in pieces, and each piece costs microseconds to post.

Two ways for the pages of a request's history to lie, in figures: each layer apart, as the engine keeps them, or the
layers of a family together (``pools.page_major`` makes it so).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dsv4.cache.families import Geometry, families
from sglang_dsv4.cache.family import Group

COVERED = (0, 4, 128)  # ratios; the others share few buffers among many layers, and have few pieces a page already
MAP_BYTES = 8  # a full slot, of the map to window slots


def page_stride(ratios: Sequence[int]) -> int:
    """What page-major page ids are multiples of: the layers of the largest family. 1 without compressed layers."""
    return max((ratios.count(ratio) for ratio in set(ratios) - {0}), default=1)


def is_covered(ratios: Sequence[int]) -> bool:
    """Whether layers of these ratios can be page-major."""
    return set(ratios) <= set(COVERED)


@dataclass(frozen=True)
class PieceFigures:
    """Pieces of a page of all layers, and what it costs to have few.

    regions: of history that are registered with a transfer backend; as many pieces has a page. piece_bytes: of each,
    in the order of the families. extra_bytes: a token, of the longer map and of rows that nobody uses.
    """

    layout: str
    regions: int
    piece_bytes: tuple[int, ...]
    extra_bytes: float

    def pieces(self, tokens: int, page_size: int = 256) -> int:
        """Pieces of a request of ``tokens`` tokens whose pages lie scattered."""
        return self.regions * -(-tokens // page_size)


def piece_figures(geometry: Geometry) -> tuple[PieceFigures, ...]:
    """Stock; and page-major, where it is covered."""
    history = [family for family in families(geometry) if family.group is Group.PAGED]
    apart = tuple(family.page_bytes for family in history for _ in family.layers)
    stock = PieceFigures("stock", len(apart), apart, 0.0)
    if not is_covered(geometry.ratios) or geometry.elsewhere or not history:
        return (stock,)
    stride = page_stride(geometry.ratios)
    together = tuple(stride * family.page_bytes for family in history)
    unused = (sum(together) - sum(apart)) / geometry.page_size
    return stock, PieceFigures("page-major", len(together), together, unused + MAP_BYTES * (stride - 1))
