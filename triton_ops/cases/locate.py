"""Generates requests that lie page by page, and changes that break them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from triton_ops.cases import WIDE

FULL_PAGES, SWA_PAGES = 41, 33  # the dummy page 0 included
PAGE, WINDOW = 256, 127


class Located(NamedTuple):
    """Holds a request on scattered pages. mapping: full slot -> SWA slot, its last entry -1."""

    slots: list[int]
    mapping: list[int]
    start: int
    limits: tuple[int, int]
    page: int = PAGE

    def __str__(self) -> str:
        """Names the case in tables."""
        return f"{len(self.slots)} tokens"

    def with_slots(self, changes: dict[int, int]) -> Located:
        """Changes full slots. changes: full slot by position."""
        slots = list(self.slots)
        for position, slot in changes.items():
            slots[position] = slot
        return self._replace(slots=slots)

    def with_swa(self, changes: dict[int, int]) -> Located:
        """Changes SWA slots. changes: SWA slot by position."""
        mapping = list(self.mapping)
        for position, swa in changes.items():
            mapping[self.slots[position]] = swa
        return self._replace(mapping=mapping)

    def swa(self, position: int) -> int:
        """Returns the SWA slot of a position."""
        return self.mapping[self.slots[position]]


def located(tokens: int, seed: int = 0, full_pages: int = FULL_PAGES) -> Located:
    """Makes a request on random pages of both pools; only the pages of the window are mapped."""
    generator = torch.Generator().manual_seed(seed)
    full = (torch.randperm(full_pages - 1, generator=generator) + 1).tolist()
    swa = (torch.randperm(SWA_PAGES - 1, generator=generator) + 1).tolist()
    slots = [full[p // PAGE] * PAGE + p % PAGE for p in range(tokens)]
    start = max(0, tokens - WINDOW)
    mapping = [0] * (full_pages * PAGE) + [-1]
    for position in range(start // PAGE * PAGE, -(-tokens // PAGE) * PAGE):
        number = position // PAGE
        mapping[full[number] * PAGE + position % PAGE] = swa[number - start // PAGE] * PAGE + position % PAGE
    return Located(slots, mapping, start, (full_pages, SWA_PAGES))


LOCATE_LENGTHS = (0, 1, 127, 128, 129, 255, 256, 257, 1024, 1025, *((130, 1000, 4097) if WIDE else ()))
REAL_LOCATED = (2_048, 65_536, 262_144)
