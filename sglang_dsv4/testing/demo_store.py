"""Plays two lives of a miniature server over one store: what the first one computed, the second one reads.

Used by ``sglang-dsv4 demo --store`` and ``drill``. The stand-in for a forward judges each byte that it reads.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from sglang_dsv4.engine import store_start
from sglang_dsv4.errors import VerifyMismatch
from sglang_dsv4.testing import demo_sessions
from sglang_dsv4.testing.content import VOCABULARY
from sglang_dsv4.testing.demo_scheduler import damage
from sglang_dsv4.testing.demo_sessions import MOST_ANSWER, MOST_INPUT
from sglang_dsv4.testing.forward import WrongRows

COMMAND = (sys.executable, "-W", "ignore", "-m", "sglang_dsv4.testing.store_worker")
CONFIG = '{"prefetch_timeout_base": 60}'  # seconds that a request waits: a busy machine is to show hits, too
MODEL = "demo"
SHARED = 1024 + 100  # tokens that every other conversation begins with, as agents do
PATIENCE = 120.0  # seconds for a turn, or for what is open behind it
PAUSE = 0.002  # seconds between two passes in which nothing runs
WRONG = ("no_seal", "another", "wrong")


class Unanswered(RuntimeError):
    """Reports a turn that does not end."""


@dataclass(frozen=True)
class Said:
    """Holds a prompt, and how many tokens are answered."""

    tokens: list[int]
    answer: int


@dataclass
class Life:
    """Counts one life. tokens: of its prompts. cached: not computed. stored: read from the store."""

    turns: int = 0
    tokens: int = 0
    cached: int = 0
    stored: int = 0
    put: int = 0  # units
    got: int = 0
    wrong: int = 0
    points: int = 0
    leaks: int = 0
    seconds: float = 0.0
    mismatches: list[str] = field(default_factory=list)


def prompts(rng: random.Random, count: int, shortest: int, longest: int) -> list[Said]:
    """Makes the first prompts of conversations; every other one begins as the others of its kind."""
    shared = _tokens(rng, min(SHARED, shortest))
    made = []
    for number in range(count):
        tokens = _tokens(rng, rng.randint(shortest, longest))
        made.append(Said([*shared, *tokens[len(shared) :]] if number % 2 == 0 else tokens, rng.randint(1, MOST_ANSWER)))
    return made


def next_turns(rng: random.Random, answered: Sequence[Any]) -> list[Said]:
    """Makes the next turn of each conversation. answered: requests of the last one."""
    return [
        Said(
            [*req.origin_input_ids, *req.output_ids, *_tokens(rng, rng.randint(1, MOST_INPUT))],
            rng.randint(1, MOST_ANSWER),
        )
        for req in answered
    ]  # fmt: skip


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


@contextlib.contextmanager
def with_store(folder: Path | None) -> Iterator[None]:
    """Lets servers that start inside the block have a store of files; None: no store."""
    store = (
        {} if folder is None else {"DSV4_STORE": str(folder), "DSV4_STORE_CONFIG": CONFIG, "DSV4_STORE_MODEL": MODEL}
    )
    left = {name: text for name, text in os.environ.items() if name not in ("DSV4_STORE", "DSV4_STORE_CONFIG")}
    with mock.patch.dict(os.environ, left | store, clear=True), mock.patch.object(store_start, "COMMAND", COMMAND):
        yield


class Server:
    """Runs one life, from a start to an end; its store's process ends with it."""

    def __init__(self, folder: Path | None, host_gb: str, corrupt: bool = False, **spec: Any) -> None:
        """folder: of the store. corrupt: a byte of each point changes before it is written."""
        self.life, self.answered = Life(), list[Any]()
        self._started = time.monotonic()
        with with_store(folder):
            self._world = demo_sessions.server(host_gb, **spec)
        self.sessions, self.plain = demo_sessions.parts_of(self._world)
        if corrupt and self.plain.tier is not None:
            self._corrupt(self.plain.tier)

    def _corrupt(self, tier: Any) -> None:
        write = tier.write

        def damaged(point: Any) -> None:
            damage(self.plain.host.memory, point.page)
            write(point)

        tier.write = damaged

    def play(self, turns: Sequence[Said]) -> Life:
        """Plays turns, one after the other, and ends. A wrong byte ends it at once."""
        try:
            for said in turns:
                self.answered.append(self._turn(said))
            self._until(lambda: not self._busy())
        except (WrongRows, VerifyMismatch, Unanswered) as error:
            self.life.mismatches.append(f"{type(error).__name__}: {error}")
        else:
            self._count()
            self.life.leaks = demo_sessions.left_behind(self._world)
        finally:
            if self.plain.tier is not None:
                self.plain.tier.close(PATIENCE)
        self.life.seconds = time.monotonic() - self._started
        return self.life

    def _turn(self, said: Said) -> Any:
        req = self._world.submit(said.tokens, max_new=said.answer)
        self._until(lambda: not (self._world.running or self._world.waiting))
        self.sessions.check_integrity()
        self.life.turns += 1
        self.life.tokens += len(said.tokens)
        self.life.cached += int(req.cached_tokens)
        return req

    def _until(self, over: Callable[[], bool]) -> None:
        """Runs passes until ``over``. Raises Unanswered."""
        end = time.monotonic() + PATIENCE
        while self._pass() or not over():
            if time.monotonic() > end:
                raise Unanswered(f"nothing ends within {PATIENCE:.0f} s: {len(self._world.waiting)} requests wait")

    def _pass(self) -> bool:
        """Returns whether anything ran."""
        ran = self._world.step() is not None
        if ran:
            self._world.check_integrity()
        else:
            if self.plain.tier is not None:
                self.plain.tier.end_pass()
            time.sleep(PAUSE)
        return ran

    def _busy(self) -> bool:
        """Returns whether anything is on its way to the store or from it."""
        return self.plain.tier is not None and bool(self.plain.tier._open)

    def _count(self) -> None:
        if self.plain.tier is None:
            return
        counters, life = self.plain.tier.counters, self.life
        life.stored, life.points = counters.tokens, counters.points["sent"]
        life.put, life.got = counters.units["put", "ok"], counters.units["get", "ok"]
        life.wrong = sum(counters.units["get", outcome] for outcome in WRONG)


def flip_bits(folder: Path) -> list[Path]:
    """Changes a bit of every third file of a store; returns those files."""
    files = sorted(folder.glob("*.bin"))[::3]
    for path in files:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 3)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))
    return files
