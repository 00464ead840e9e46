"""A retracted request waits in the engine's own queue, which has many ways out: who waits with a copy is kept here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.hostmem.memory import HostCopy
from sglang_dsv4.pools.copy_service import CopyService
from sglang_dsv4.pools.token_to_kv import TokenToKVPool

NAME = "dsv4_plain"  # attribute of the pool


@dataclass(eq=False)
class Saved:
    """A request and its copy, from its retract on.

    matched: tokens that the tree held at its admission, None before: a copy with them has its pages and a batch, and is
    loaded before that batch runs.
    """

    req: Any
    copy: HostCopy
    matched: int | None = None


class PlainServing:
    """What this package knows of one plain server. The scheduler thread owns it."""

    def __init__(self, pool: TokenToKVPool, host: CopyService, joins_decode: bool, publishes: bool) -> None:
        """joins_decode: restored requests may join the decode batch without a forward of their own.

        publishes: they may go to the prefix tree when they finish.
        """
        self.pool, self.host, self.joins_decode = pool, host, joins_decode
        self.publishes = publishes
        self._saved: dict[int, Saved] = {}  # by identity of the request, which is held here

    @property
    def count(self) -> int:
        """Requests with a copy that is not loaded yet."""
        return len(self._saved)

    def keep(self, req: Any, copy: HostCopy) -> None:
        """The request was just retracted."""
        self._saved[id(req)] = Saved(req, copy)

    def saved_of(self, req: Any) -> Saved | None:
        """The request's copy, if it waits with one."""
        return self._saved.get(id(req))

    def admitted(self, reqs: Iterable[Any]) -> list[Saved]:
        """The copies of those of ``reqs`` that were given their pages, and are not loaded yet."""
        found = [saved for req in reqs if (saved := self.saved_of(req)) is not None] if self.count else []
        return [saved for saved in found if saved.matched is not None]

    def all(self) -> list[Saved]:
        """Every copy."""
        return list(self._saved.values())

    def drop(self, saved: Saved, reason: str | None = None, message: str = "") -> None:
        """Forget and release a copy, loaded or not. reason: why its request is prefilled again, if it is."""
        del self._saved[id(saved.req)]
        saved.copy.release()
        if reason is not None:
            self.left_to_engine(reason, f"request {saved.req.rid!r} {message}")

    def left_to_engine(self, reason: str, message: str) -> None:
        """Count a request that the engine prefills again."""
        self.host.counters.fallback(reason, message)


def plain_of(allocator: Any) -> PlainServing | None:
    """What this package knows of the allocator's server; None unless its retracts go our way."""
    found: PlainServing | None = getattr(allocator.get_kvcache(), NAME, None)
    return found
