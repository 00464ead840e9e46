"""Splits each save evenly over the ranks that share an arena, without communication.

    ranks of a copy of 8 pages:   | 0: request block, 2 pages | 1: window block, 2 pages | 2: 2 pages | 3: 2 pages |

Paged blocks go in contiguous ranges, so that neighbours still go in one copy. Window and request block are whole; a
rank that has one gets fewer pages.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from sglang_dsv4.cache.family import Group


class Share(NamedTuple):
    """Names one rank's part of a copy: its paged blocks ``first`` to ``last`` - 1, and the blocks of ``groups``."""

    first: int
    last: int
    groups: tuple[Group, ...]

    def has(self, group: Group, block: int) -> bool:
        """Returns whether this rank saves block number ``block`` of the copy's ``group``."""
        return self.first <= block < self.last if group is Group.PAGED else group in self.groups


def split(ranks: int, pages: int, nbytes: dict[Group, int], saved: int = 0) -> tuple[Share, ...]:
    """Returns each rank's share in a copy of ``pages`` paged blocks behind those ``saved`` before.

    nbytes: of a block, by group; 0 for a group of which it has none.
    """
    if ranks == 1:
        return (Share(saved, saved + pages, (Group.REQUEST, Group.WINDOW)),)
    owner = {Group.REQUEST: 0, Group.WINDOW: 1}
    owned = [tuple(group for group, rank in owner.items() if rank == number) for number in range(ranks)]
    wanted = _fill([sum(nbytes[group] for group in groups) for groups in owned], pages * nbytes[Group.PAGED])
    whole = sum(wanted)  # 0 where pages have no bytes
    ends = [saved + (round(pages * end / whole) if whole else 0) for end in accumulate(wanted)]
    return tuple(Share(first, last, groups) for first, last, groups in zip([saved, *ends], ends, owned, strict=False))


def _fill(load: list[int], nbytes: int) -> list[float]:
    """Spreads ``nbytes`` over the ranks so that all end alike, as far as their present ``load`` allows."""
    ascending = sorted(load)
    level = 0.0
    for count in range(len(load), 0, -1):
        level = (sum(ascending[:count]) + nbytes) / count
        if level >= ascending[count - 1]:
            break
    return [max(0.0, level - have) for have in load]
