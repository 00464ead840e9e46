"""Says what the ranks of an arena hear of a ticket of the store, each as one number on their board."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

NUMBERS = 2**31 - 1  # of tickets that may be told; far fewer are open at once


class What(IntEnum):
    """Says what happened to a ticket."""

    COPIED = 1  # all units of a write
    STORED = 2  # value: whether all of them were
    FOUND = 3  # value: pages up to the last stored point; 0: none
    LATE = 4
    LOADED = 5  # value: whether all units are right
    FAILED = 6


class Told(NamedTuple):
    """Tells one thing of a ticket; every rank hears the same."""

    number: int
    what: What
    value: int = 0

    def packed(self) -> int:
        """Returns it as one number."""
        return self.number << 32 | self.what << 28 | self.value

    @classmethod
    def unpacked(cls, packed: int) -> Told:
        """Returns the one whose number is ``packed``."""
        return cls(packed >> 32, What(packed >> 28 & 15), packed & (1 << 28) - 1)
