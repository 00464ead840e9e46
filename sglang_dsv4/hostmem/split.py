"""Splits each save evenly over the ranks that share an arena, without communication.

    7 new units behind 2 saved before, 3 ranks:   saved saved | 0: 2 units | 1: 2 units | 2: 3 units |

Each rank has a range of the copy's units, pages and tail alike: neighbours still go in one copy.
"""

from __future__ import annotations


def split(ranks: int, count: int, saved: int = 0) -> tuple[range, ...]:
    """Returns each rank's share of the ``count`` units of a copy behind those ``saved`` before, as their indices."""
    edges = [saved + count * rank // ranks for rank in range(ranks + 1)]
    return tuple(map(range, edges, edges[1:]))
