"""Runs a plain server that keeps sessions at random: as ``plain``, with turns, forks, hints, and losses of the device.

The tree hands out what was loaded, and its check reads every branch and every live window after each step.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from plain_world import SMALL, small_world

from sglang_dsv4.engine.plain.serving import plain_of
from stateful import plain
from stateful.plain import MOST_REQUESTS, WHICH, PlainLives

MOST = 2200  # tokens that a request may come to
FEWEST = 256  # tokens of a point here; the test sets it
HINTS = st.sampled_from((
    {}, {}, {}, {"kv.prefetch": {}}, {"kv.demote": {}}, {"kv.pin": {"ttl_seconds": 2}},
    {"kv.retain": {"ttl_seconds": 1, "priority": 3}, "kv.prefetch": {}},
))  # fmt: skip
MODELS: tuple[dict[str, Any], ...] = ({"ratios": SMALL}, {"ratios": SMALL}, {"ratios": SMALL, "drafts": 4})

done: Counter[str] = plain.done


class SessionLives(PlainLives):
    """Plays one server that keeps sessions, and its clients."""

    @initialize(
        pages=st.integers(12, 40),
        windows=st.integers(7, 14),
        host=st.sampled_from(("auto", "0.002", "0.004")),
        sessions=st.sampled_from(("auto", "auto", "0.0015")),
        verify=st.sampled_from(("0", "0", "1")),
        model=st.sampled_from(MODELS),
        chunk=st.sampled_from((256, 512, 8192)),
        mixed=st.booleans(),
        overlap=st.booleans(),
        priority=st.booleans(),
        rust=st.booleans(),
    )
    def start(  # type: ignore[override]
        self, windows: int, host: str, sessions: str, verify: str, model: dict[str, Any], mixed: bool, rust: bool,
        **server: Any,
    ) -> None:  # fmt: skip
        """Starts a server of any kind, with more or less memory for the sessions."""
        told = {"DSV4_HOST_GB": host, "DSV4_SESSIONS": sessions, "DSV4_VERIFY": verify}
        server |= {"tree": "rust" if rust else "python", "mixed": mixed}
        with mock.patch.dict(os.environ, told):
            self.world = small_world(swa_pages=windows, **server, **model)
        done["drafts"] += bool(model.get("drafts"))
        self.plain = plain_of(self.world.allocator)
        self.store = self.plain.sessions
        assert self.store is not None
        self.now, self.hits = 0.0, 0
        self.store.order.clock = lambda: self.now

    # ------------------------------------------------------------------------------------- what clients do

    def _turn(self, tokens: Any, answer: int, hints: dict[str, Any]) -> None:
        priority = 1 if self.world.spec.priority else None
        self.world.submit(tokens, max_new=answer, priority=priority, hints=hints)

    @precondition(lambda self: len(self.alive) < MOST_REQUESTS)
    @rule(family=st.integers(0, 1), length=st.integers(500, 1700), answer=st.integers(1, 40), hints=HINTS)
    def long_prompt(self, family: int, length: int, answer: int, hints: dict[str, Any]) -> None:
        self._turn(range(1000 * family, 1000 * family + length), answer, hints)
        done["submit"] += 1

    @precondition(lambda self: self.over and len(self.alive) < MOST_REQUESTS)
    @rule(
        which=WHICH, cut=st.integers(0, 3), more=st.integers(0, 400), answer=st.integers(1, 40),
        forks=st.integers(1, 3), hints=HINTS,
    )  # fmt: skip
    def turn(self, which: int, cut: int, more: int, answer: int, forks: int, hints: dict[str, Any]) -> None:
        """Goes on from an answer, or from all but its last tokens, once or in several ways."""
        first = self.over[which % len(self.over)]
        tokens = [*first.origin_input_ids, *first.output_ids]
        tokens = tokens[: max(1, len(tokens) - cut)]
        for fork in range(forks):
            if len(tokens) + more + answer <= MOST:
                self._turn([*tokens, *range(20_000 + 1000 * fork, 20_000 + 1000 * fork + more)], answer, hints)
                done["turn"] += 1

    @precondition(lambda self: self.over and len(self.alive) < MOST_REQUESTS)
    @rule(which=WHICH, more=st.integers(0, 400), answer=st.integers(1, 40), lost=st.sampled_from(("windows", "all")))
    def lose_and_turn(self, which: int, more: int, answer: int, lost: str) -> None:
        """Goes on where the device has lost its windows, or everything that nobody holds."""
        self._lose(lost)
        self.turn(which, 0, more, answer, 1, {})
        self.run_more(12)

    def _lose(self, lost: str) -> None:
        self.world.evict(1 << 20 if lost == "all" else 0, 1 << 20)
        done[f"lose {lost}"] += 1

    @rule(seconds=st.integers(1, 2))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    # ------------------------------------------------------------------------------------- what must hold

    def _step(self) -> None:
        super()._step()
        counters = self.store.counters
        done["hits"] += sum(counters.hits.values()) - self.hits
        self.hits = sum(counters.hits.values())
        done["windows alone"] = max(done["windows alone"], counters.hits["window"])

    @invariant()
    def sessions_are_accounted(self) -> None:
        if not hasattr(self, "world"):
            return
        self.store.check_integrity()
        fallbacks = self.plain.host.counters.fallbacks
        assert "PointNotMatched" not in fallbacks and "WindowNotMapped" not in fallbacks, dict(fallbacks)
        assert all(point.tokens >= FEWEST for point in self.store.order if point.tail is not None)
        done["most points"] = max(done["most points"], self.store.points)

    def teardown(self) -> None:
        for reason, count in self.store.counters.evicted.items() if hasattr(self, "world") else ():
            done[f"evicted by {reason}"] += count
        super().teardown()
