"""Describes the open work of a tier: writes of points, and questions with their reads."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.store.wire import Piece


class Patience(NamedTuple):
    """Says how many seconds a request waits for a store: base, and for each 1,024 tokens that it may spare."""

    base: float
    per_ki_token: float

    def seconds(self, tokens: int) -> float:
        """Returns the limit of a request that may spare ``tokens``."""
        return self.base + self.per_ki_token * tokens / 1024


@dataclass(eq=False)
class Write:
    """Holds one slice of a point. group: the key of that point, of the rank with the client, as ``pieces``."""

    copy: HostCopy
    is_last: bool
    group: bytes = b""
    pieces: list[Piece] = field(default_factory=list)


@dataclass(eq=False)
class Ask:
    """Holds the question of one prompt. waits: its request is not admitted meanwhile.

    have, count: pages of the last point that is here, and of the prompt. end: pages that the store has. copy: is being
    filled. ticket: of the client; sent: when it was sent what it has not answered; 0: nothing. limit: when it is late,
    on this rank's clock.
    """

    namespace: Hashable
    tokens: array[int]
    have: int
    count: int
    started: float
    limit: float
    waits: bool = True
    late: bool = False
    end: int = 0
    copy: HostCopy | None = None
    ticket: int | None = None
    sent: float = 0.0

    def covers(self, other: Ask, page: int) -> bool:
        """Returns whether the copy here is of all pages that ``other`` found."""
        tokens = other.end * page
        same = self.copy is not None and self.namespace == other.namespace and self.end >= other.end
        return same and self.tokens[:tokens] == other.tokens[:tokens]
