"""Reads the hints of a request: how long the host keeps its session, and whether to load it at arrival.

A hint has a type and a payload. It is an action of the engine's ``kv_hints``, or an entry of the sampling parameter
``custom_params``, which the OpenAI routes take too:

    "custom_params": {"kv.retain": {"ttl_seconds": 600, "priority": 5}, "kv.prefetch": {}}

    kv.retain    {ttl_seconds?, priority?}    evict it after plain sessions; those of low priority before those of high;
                                              an hour where no time is given
    kv.pin       {ttl_seconds}                evict it last
    kv.demote    {}                           evict it first
    kv.prefetch  {}                           load it when the request arrives
    kv.share     {}                           write its prompt to the store when it is prefilled, and not only when the
                                              request ends; refused without a store

Both have an end, so that none is forgotten, and together they hold at most half of the memory: one client's hints leave
the other half to all. Of several that set the rank the last one holds, and kv_hints come after custom_params. A hint
that cannot be used is counted and changes nothing; of more than MOST_HINTS none is used. Payloads lie at the top of
custom_params because the engine decodes no deeper objects there (with SGLANG_USE_PICKLE_IPC=0 one would end the
scheduler).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

PREFIX = "kv."  # of the keys of custom_params that are hints; all others belong to logit processors
SHARE = "kv.share"
OTHER = "other"  # counted for any unknown type: clients must not be able to add series
MOST_HINTS = 64  # of a request: the scheduler reads them, and 200,000 would stop it for a second
LONGEST_TTL = 1e9  # seconds, 31 years
RETAINED_TTL = 3600.0  # seconds, of a kv.retain that names none
LARGEST_PRIORITY = 1_000_000

Outcome = Literal["taken", "unknown", "bad", "refused"]


class Rank(enum.IntEnum):
    """Orders sessions for eviction: the lowest goes first."""

    EXPIRED = 0
    DEMOTED = 1
    PLAIN = 2
    RETAINED = 3
    PINNED = 4


@dataclass(frozen=True)
class Hints:
    """Holds the usable hints of one request. outcomes: type and outcome of each hint, for the counter.

    priority: orders retained sessions, the lowest goes first. ttl_seconds: of the rank; None: it has no end. prefetch,
    share: whether it is loaded at arrival, and written when its prompt is prefilled.
    """

    rank: Rank = Rank.PLAIN
    priority: int = 0
    ttl_seconds: float | None = None
    prefetch: bool = False
    share: bool = False
    outcomes: tuple[tuple[str, Outcome], ...] = ()


@dataclass(frozen=True)
class _Type:
    """Describes a type of hint: the rank it sets, the fields that its payload must have, and those that it may have."""

    rank: Rank | None
    needed: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


TYPES = {
    "kv.retain": _Type(Rank.RETAINED, optional=frozenset({"ttl_seconds", "priority"})),
    "kv.pin": _Type(Rank.PINNED, needed=frozenset({"ttl_seconds"})),
    "kv.demote": _Type(Rank.DEMOTED),
    "kv.prefetch": _Type(None),
    SHARE: _Type(None),
}
HELD = {Rank.RETAINED: "kv.retain", Rank.PINNED: "kv.pin"}  # ranks that keep memory from others, by their hint


def hints_of(kv_hints: Any, custom_params: Any, has_store: bool = False) -> Hints:
    """Returns the hints of a request. Raises for no input of a client.

    kv_hints: the engine's envelope of them, or None. custom_params: of its sampling parameters. has_store: whether
    sessions are written to one.
    """
    hints = Hints()
    outcomes: list[tuple[str, Outcome]] = []
    given = list(itertools.islice(_given(kv_hints, custom_params), MOST_HINTS + 1))
    if len(given) > MOST_HINTS:
        return Hints(outcomes=((OTHER, "refused"),))
    for name, payload in given:
        hints, outcome = _take(hints, name, payload, has_store)
        outcomes.append((OTHER if outcome == "unknown" else name, outcome))
    return replace(hints, outcomes=tuple(outcomes))


def _given(kv_hints: Any, custom_params: Any) -> Iterator[tuple[str, Any]]:
    """Yields type and payload of each hint, the strongest source last."""
    if isinstance(custom_params, dict):
        for name, payload in custom_params.items():
            if isinstance(name, str) and name.startswith(PREFIX):
                yield name, payload
    if kv_hints is not None:
        for action in kv_hints.actions:
            yield action.action_type, action.payload


def _take(hints: Hints, name: str, payload: Any, has_store: bool) -> tuple[Hints, Outcome]:
    """Returns ``hints`` with this one in it where it can be used, and its outcome."""
    if name == SHARE and not has_store:
        return hints, "refused"
    if name not in TYPES:
        return hints, "unknown"
    known = TYPES[name]
    if not _is_valid(known, payload):
        return hints, "bad"
    if known.rank is None:
        return replace(hints, share=True) if name == SHARE else replace(hints, prefetch=True), "taken"
    ttl = payload.get("ttl_seconds")
    if ttl is None and known.rank is Rank.RETAINED:
        ttl = RETAINED_TTL
    seconds = None if ttl is None else float(ttl)
    return replace(hints, rank=known.rank, priority=payload.get("priority", 0), ttl_seconds=seconds), "taken"


def _is_valid(known: _Type, payload: Any) -> bool:
    """Returns whether a payload has all needed fields, none but known ones, and a usable value in each.

    A field that is not known may narrow the hint (to some of the tokens, say): it must not be taken for the whole.
    """
    if not isinstance(payload, dict) or not known.needed <= payload.keys() <= known.needed | known.optional:
        return False
    return all(_is_usable(field, value) for field, value in payload.items())


def _is_usable(field: str, value: Any) -> bool:
    if isinstance(value, bool):  # an int too
        return False
    if field == "priority":
        return isinstance(value, int) and abs(value) <= LARGEST_PRIORITY
    return isinstance(value, (int, float)) and 0 <= value <= LONGEST_TTL
