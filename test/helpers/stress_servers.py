"""Plays the servers of a stress, and judges a run by what its log would say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from fake_http import Decode, series

from sglang_dsv4.cli import stress
from sglang_dsv4.metrics import SessionCounters

SCORE = "mean log probability of a token, after retracts"


class Running(Decode):
    """A decode server: two tensor-parallel ranks of one replica, whose counters grow with each request."""

    served, held_by_rank = 0, (3, 3)
    dark, verifies, keeps = False, True, True
    word: Path | None = None  # the file of its switch
    sessions: SessionCounters | None = None
    rooms: ClassVar[list[int]] = []
    prompts: ClassVar[list[list[int]]] = []
    routed: ClassVar[list[int | None]] = []

    def body(self):
        found = super().body()
        self.rooms.append(found.get("bootstrap_room"))
        self.prompts.append(found["input_ids"])
        self.routed.append(found.get("routed_dp_rank"))
        return found

    def answer(self, prompt, count):
        return [token + (self.said() not in {"off", "choices"}) for token in super().answer(prompt, count)]

    def choices(self, tokens, prompt):
        """As the word says, a load has lost what was recorded until then."""
        found = super().choices(tokens, prompt)
        lost = prompt + 2 if self.said() == "choices" else 0
        return self.change([[0] * len(found[0])] * lost + found[lost:])

    @staticmethod
    def change(rows):
        return rows

    def said(self):
        return "off" if self.word is None else self.word.read_text()

    def do_POST(self) -> None:
        if self.path.startswith("/flush_cache"):
            self.flush()
            self.begin()
            return
        type(self).served += 1
        if self.sessions is not None and self.keeps:
            self.go_on(self.sessions)
        super().do_POST()

    def go_on(self, sessions: SessionCounters) -> None:
        """Each request goes on from a point, which is compared, and leaves one."""
        sessions.hits["pages"] += 1
        sessions.verified += 1
        sessions.points += 1
        sessions.held_bytes += 100

    def flush(self) -> None:
        if self.sessions is not None:
            self.sessions.points = self.sessions.held_bytes = 0

    def do_GET(self) -> None:
        if self.path == "/model_info":
            self.begin()
            return
        self.begin(404 if self.dark else 200)
        for rank in () if self.dark else range(2):
            copies = self.held_by_rank[rank] + self.served
            self.wfile.write(series(copies, rank, verified=self.verifies, sessions=self.sessions))


class Prefill(Running):
    """The prefill server of a pair: of both it alone keeps sessions."""

    rooms: ClassVar = []
    prompts: ClassVar = []
    keeps = True


def finds(share: float = 0.5, on_host: int = 3) -> property:
    """Makes what chunks tell of a server that has this share of each prompt in its cache."""
    details = {"device": 5, "host": on_host}
    return property(
        lambda self: {"cached_tokens": share * len(self.given["input_ids"]), "cached_tokens_details": details}
    )


def missed_by(result: dict) -> list[str]:
    return [bound["name"] for bound in result["bounds"] if not bound["ok"]]


GOOD = {
    "asked": 9, "whole": 9, "refused": 0, "alive": True, "trouble": [], "saves": 10, "loads": 10,
    "copies_alive_at_end": 0, "ranks": 2, "ranks_apart": 0, "fallbacks": {}, "verified": 10, "held_bytes_at_end": 0,
}  # fmt: skip


def judged(change: dict, **options: object) -> list[str]:
    """Bounds that a run with ``change`` misses."""
    asked = {"may_refuse": 0, "at_least": 10, "server": ["--tp", "2"], "falls_back": None, "attach": None}
    asked |= {"verify": 1, "stock": False, "plain": False, "sessions": False, **options}
    log = {name: value for name, value in (GOOD | change).items() if value is not None}  # what the metrics did not tell
    found = SimpleNamespace(log=log, run=SimpleNamespace(summary=lambda: log), alive=log["alive"])
    return [bound["name"] for bound in stress.judge(found, SimpleNamespace(**asked)) if not bound["ok"]]
