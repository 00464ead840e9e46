"""Plays conversations on the miniature plain server, which keeps the cache of finished requests on the host.

Used by ``sglang-dsv4 demo --sessions`` and ``drill``. The stand-in for a forward judges each byte that it reads.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from sglang_dsv4.engine import state
from sglang_dsv4.engine.plain.serving import PlainServing, plain_of
from sglang_dsv4.errors import SettingError, VerifyMismatch
from sglang_dsv4.sessions.store import SessionStore
from sglang_dsv4.testing.content import VOCABULARY
from sglang_dsv4.testing.demo_scheduler import damage
from sglang_dsv4.testing.forward import WrongRows
from sglang_dsv4.testing.server import PAGE
from sglang_dsv4.testing.world import PlainWorld

ALL = 1 << 20  # tokens to evict: every one that no request holds
FORKS = 3  # that go on from the same answer at once
FORKED = f"all; {FORKS} forks"
LOST = ("all", "windows", "nothing", FORKED)  # by the device, before the turns of a conversation
MOST_ANSWER, MOST_INPUT = 40, 400  # tokens


def least_pages(longest: int) -> int:
    """Counts the device pages that a conversation with a first prompt of ``longest`` tokens needs, with its forks."""
    return -(-(longest + len(LOST) * (MOST_INPUT + MOST_ANSWER)) // PAGE) + 2 * FORKS


def server(host_gb: str, verify: bool | None = None, **spec: Any) -> PlainWorld:
    """Starts a miniature server that keeps sessions. verify: DSV4_VERIFY; None: as the environment has it."""
    variables = {"DSV4_SESSIONS": "auto", "DSV4_HOST_GB": host_gb}
    if verify is not None:
        variables["DSV4_VERIFY"] = str(int(verify))
    state.server.weight_version = state.server.clean_version = 0  # as in a process that has just started
    with mock.patch.dict(os.environ, variables):
        return PlainWorld(**spec)


def parts_of(world: PlainWorld) -> tuple[SessionStore, PlainServing]:
    """Returns the sessions that ``world`` keeps, and their server's part. Raises SettingError where it keeps none."""
    plain = plain_of(world.allocator)
    if plain is None or plain.sessions is None:
        raise SettingError("the server keeps no sessions: DSV4_PLAIN=off, or a release of sglang that is not tested")
    return plain.sessions, plain


def left_behind(world: PlainWorld) -> int:
    """Empties a server; returns how many pages, slots, copies and host units stay behind."""
    store, plain = parts_of(world)
    spec, memory = world.spec, plain.host.memory
    world.evict(ALL, ALL)
    store.check_integrity()
    memory.check_integrity()
    totals = spec.pages, spec.swa_pages, spec.requests
    left = sum(total - free for total, free in zip(totals, world.totals(), strict=True))
    flushed = world.flush()  # no session stays behind a flush
    return int(left + memory.pool.held + memory.leaks + memory.copies + plain.count + (not flushed))


@dataclass
class Turns:
    """Counts turns before which the device lost the same. Tokens are of the prompts.

    cached: found in the prefix tree, those loaded there among them. loaded: from the host.
    """

    turns: int = 0
    by_window: int = 0
    by_pages: int = 0
    tokens: int = 0
    cached: int = 0
    loaded: int = 0


@dataclass
class Result:
    """Holds the turns by what was lost, and the faults. points: kept at the end."""

    lost: dict[str, Turns] = field(default_factory=lambda: {name: Turns() for name in LOST})
    points: int = 0
    leaks: int = 0
    mismatches: list[str] = field(default_factory=list)

    @property
    def turns(self) -> int:
        """Counts the turns."""
        return sum(row.turns for row in self.lost.values())


class Conversations:
    """Plays conversations one after the other; the device loses another part of its cache before each turn.

    shortest: tokens of a first prompt. corrupt: a byte of the first session changes on the host.
    """

    def __init__(self, world: PlainWorld, rng: random.Random, shortest: int, corrupt: bool) -> None:
        self.store, self._plain = parts_of(world)
        self.result = Result()
        self._world, self._rng, self._shortest, self._corrupt = world, rng, shortest, corrupt

    def play(self, turns: int, longest: int) -> None:
        """Plays so many turns, or a few more, then empties the server. It ends early where a byte is wrong.

        longest: tokens of a first prompt.
        """
        try:
            while self.result.turns < turns:
                self._converse(self._rng.randint(self._shortest, longest), turns)
        except (WrongRows, VerifyMismatch) as error:
            self.result.mismatches.append(f"{type(error).__name__}: {error}")
        else:
            self._empty()

    def _converse(self, prompt: int, turns: int) -> None:
        last = self._submit(self._tokens(prompt))
        self._world.run()
        if self._corrupt:
            damage(self._plain.host.memory, self.store.kept.units()[0])
        for lost in LOST:
            if self.result.turns < turns:
                last = self._turn(lost, last)

    def _turn(self, lost: str, last: Any) -> Any:
        """Plays the turn behind ``last``, in forks where these are asked for; returns one of its requests."""
        said = [*last.origin_input_ids, *last.output_ids]
        self._lose(lost, said)
        counters, row = self.store.counters, self.result.lost[lost]
        before = counters.tokens, counters.hits["window"], counters.hits["pages"]
        forks = FORKS if lost == FORKED else 1
        requests = [self._submit([*said, *self._tokens(self._rng.randint(1, MOST_INPUT))]) for _ in range(forks)]
        self._world.run()
        self.store.check_integrity()
        row.turns += forks
        row.tokens += sum(len(req.origin_input_ids) for req in requests)
        row.cached += sum(req.cached_tokens for req in requests)
        row.loaded += counters.tokens - before[0]
        row.by_window += counters.hits["window"] - before[1]
        row.by_pages += counters.hits["pages"] - before[2]
        return requests[0]

    def _lose(self, lost: str, said: list[int]) -> None:
        """Evicts everything from the prefix tree, or windows until it has no match for ``said``."""
        if lost in ("all", FORKED):
            self._world.evict(ALL, ALL)
        while lost == "windows" and self._world.match(said).numel():
            self._world.evict(0, PAGE)

    def _submit(self, tokens: list[int]) -> Any:
        return self._world.submit(tokens, max_new=self._rng.randint(1, MOST_ANSWER))

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(count)]

    def _empty(self) -> None:
        self.store.check_integrity()
        self.result.points = self.store.points
        self.result.leaks = left_behind(self._world)
