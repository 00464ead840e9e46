"""Takes retracted requests out of a plain server's queue in each way there is: their copies go too.

A plain server a kind, a retract forced every fourth step, DSV4_VERIFY=1, the engine's memory check at every step: an
ordinary one, one with a short queue and priorities, one with a waiting timeout. In each trial some requests run, the
retracted ones are kept in the queue (hold_resumes), and then it happens: an abort, a flush, a weight update, a pause
that retracts, the last request out of memory, a full queue, a request of higher priority, the timeout. All requests
finish but for those that were meant, which get an answer that says why; no host memory is held afterwards.
"""

from __future__ import annotations

import argparse
import random
import time
import urllib.error
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hold_resumes.switch import GO, HOLD, LAST_FAILS, new_switch
from weight_update import update as update_weights

from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Answer, Load, Run, warm_up
from sglang_dsv4.livetest.retract_stats import between, read_log, read_metrics

REQUESTS = 8
COPIES = 3  # that wait when it happens
INTERVAL = 4  # steps between forced retracts
QUEUE, TIMEOUT = 5, 2.0  # requests in the short queue; seconds until a waiting one is answered
APART = 0.1  # seconds between two requests: sent at once they would fill the short queue by themselves
SETTLES = 2.0
KINDS: dict[str, tuple[list[str], dict[str, str]]] = {  # of servers: arguments, environment
    "usual": ([], {}),
    "short-queue": (["--max-queued-requests", str(QUEUE), "--enable-priority-scheduling"], {}),
    "timeout": ([], {"SGLANG_REQ_WAITING_TIMEOUT": str(TIMEOUT)}),
}


class Stage:
    """One server and its switch, and the requests of the trial that is being played."""

    def __init__(self, server: servers.Server, switch: Path, arguments: argparse.Namespace) -> None:
        self.server, self.switch, self.arguments = server, switch, arguments
        self.run = Run(Load([], []), arguments, server.url, None, None)
        self.pool = ThreadPoolExecutor(REQUESTS + 1)
        self.asked: list[Future[Answer]] = []
        self.rids: list[str] = []

    def post(self, path: str, body: dict[str, Any]) -> None:
        """What an operator asks; a refusal is said."""
        try:
            servers.post(self.server.url, path, body, 60)
        except urllib.error.HTTPError as error:
            print(f"  {path}: answered {error.code}", flush=True)

    def ask(self, rid: str, number: int, priority: int | None = None) -> Answer:
        """One seeded request; ``priority`` only where it has one."""
        draw = random.Random(f"{self.arguments.seed} {number}")
        prompt = [draw.randrange(10, self.arguments.vocabulary) for _ in range(draw.randint(300, 900))]
        more = {"rid": rid} | ({} if priority is None else {"priority": priority})
        return self.run.ask(prompt, draw.randint(500, 700), number, more)

    def copies(self) -> int:
        """Copies that wait now, by the metrics."""
        return int(sum(series.get("copies", 0) for series in read_metrics(self.server.url).values()))

    def hold(self, copies: int) -> int:
        """Keep retracted requests away until so many wait with a copy; how many there are."""
        self.switch.write_text(HOLD)
        deadline = time.monotonic() + 20
        while (found := self.copies()) < copies and time.monotonic() < deadline:
            time.sleep(0.05)
        return found


def abort(stage: Stage) -> None:
    """Three by name; at most one of them runs."""
    for rid in stage.rids[:3]:
        stage.post("/abort_request", {"rid": rid})


def flush(stage: Stage) -> None:
    """The engine refuses while requests wait."""
    stage.post("/flush_cache", {})


def update(stage: Stage) -> None:
    """Another final norm: the copies are stale, their requests computed again."""
    width = servers.hidden_size(stage.arguments.model)
    update_weights([stage.server], width, 1.125, stage.server.log)


def pause(stage: Stage) -> None:
    """What runs is retracted without a copy."""
    stage.post("/pause_generation", {"mode": "retract"})
    time.sleep(0.3)
    stage.post("/continue_generation", {})


def last_fails(stage: Stage) -> None:
    """At the next retract the pool has no room for the last request either."""
    stage.switch.write_text(LAST_FAILS)
    deadline = time.monotonic() + 20
    while stage.switch.read_text() == LAST_FAILS and time.monotonic() < deadline:
        time.sleep(0.05)


def wait(stage: Stage) -> None:
    """The queue is full, or time passes, by itself."""
    time.sleep(TIMEOUT + 1.5)


def outrank(stage: Stage) -> None:
    """A request of higher priority comes to a full queue."""
    stage.asked.append(stage.pool.submit(stage.ask, "urgent", REQUESTS, 10))
    time.sleep(1)


@dataclass(frozen=True)
class Trial:
    """act: what happens while copies wait. answered: how many requests may be answered otherwise, and with what."""

    kind: str
    act: Callable[[Stage], None]
    answered: tuple[int, int] = (0, 0)
    message: str = ""
    reason: str | None = None  # of a fallback that must be counted
    copies: int = COPIES


TRIALS = {
    "abort": Trial("usual", abort, (3, 3)),
    "flush": Trial("usual", flush),
    "weights": Trial("usual", update, reason="StaleWeights"),
    "pause": Trial("usual", pause),
    "last-request": Trial("usual", last_fails, (1, 1), "Out of memory", copies=0),
    "queue-limit": Trial("short-queue", wait, (1, REQUESTS - 1), "queue is full"),
    "priority": Trial("short-queue", outrank, (1, REQUESTS - 1), "higher priority"),
    "timeout": Trial("timeout", wait, (COPIES, REQUESTS), "waiting timeout"),
}


def play(name: str, trial: Trial, stage: Stage) -> dict[str, Any]:
    """One trial; its row."""
    stage.switch.write_text(GO)
    stage.rids = [f"{name}-{number:02d}" for number in range(REQUESTS)]
    start, before = stage.server.log.stat().st_size, read_metrics(stage.server.url)
    with stage.pool:
        for number, rid in enumerate(stage.rids):
            stage.asked.append(stage.pool.submit(stage.ask, rid, number))
            time.sleep(APART)
        copies = stage.hold(trial.copies) if trial.copies else 0
        try:
            trial.act(stage)
        finally:
            stage.switch.write_text(GO)
    answers = [future.result() for future in stage.asked]
    time.sleep(SETTLES)
    counted = between(before, read_metrics(stage.server.url))
    outcomes = [answer.outcome for answer in answers]
    row = {
        "run": name, "copies_when_it_happened": copies,
        **{outcome: outcomes.count(outcome) for outcome in ("finished", "refused", "lost")},
        "meant": sum(answer.outcome == "refused" and trial.message in answer.error for answer in answers),
        "errors": sorted({answer.error for answer in answers if answer.error})[:5],
        **{key: counted[key] for key in ("saves", "loads", "verified", "fallbacks", "held_bytes_at_end")},
        "copies_after": counted["copies_alive_at_end"],
        "trouble": read_log(stage.server.log, start)["trouble"], "alive": int(stage.server.alive),
    }  # fmt: skip
    return row


def judge(row: dict[str, Any], trial: Trial) -> list[dict[str, Any]]:
    """Nothing lost, every answer as meant, every load compared, nothing held."""
    least, most = trial.answered
    bounds = [
        results.bound("requests lost", "<= 0", row["lost"]),
        results.bound("requests answered as meant", f">= {least}", row["meant"]),
        results.bound("requests answered otherwise than with tokens", f"<= {most}", row["refused"]),
        results.bound("copies when it happened", f">= {trial.copies}", row["copies_when_it_happened"]),
        results.bound("copies afterwards", "<= 0", row["copies_after"]),
        results.bound("host memory held afterwards, bytes", "<= 0", row["held_bytes_at_end"]),
        results.bound("loads not compared with their copy", "<= 0", row["loads"] - row["verified"]),
        results.bound("trouble in the log", "<= 0", len(row["trouble"])),
        results.bound("server alive", ">= 1", row["alive"]),
    ]
    if trial.reason:
        bounds.append(results.bound(f"counted as {trial.reason}", ">= 1", row["fallbacks"].get(trial.reason, 0)))
    return bounds


@pytest.mark.parametrize("kind", KINDS)
def test_each_way_out_of_the_queue(start, arguments, require, kind):
    given, more = KINDS[kind]
    switch, environment = new_switch(arguments.logs)
    environment |= servers.forced_retracts(INTERVAL) | {
        "DSV4_VERIFY": "1", "SGLANG_RADIX_FORCE_MISS": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", **more,
    }  # fmt: skip
    server = start("plain", ["--enable-metrics", *given], environment)
    servers.wait_until_up([server], servers.PATIENCE)
    warm_up([server.url], arguments.vocabulary, arguments.timeout)
    trials = {name: trial for name, trial in TRIALS.items() if trial.kind == kind}
    rows = {name: play(name, trial, Stage(server, switch, arguments)) for name, trial in trials.items()}
    require(
        list(rows.values()),
        [bound | {"trial": name} for name, trial in trials.items() for bound in judge(rows[name], trial)],
    )
