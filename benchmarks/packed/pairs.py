"""Two starts differ by more than a layout saves: one pair of servers a layout, side by side, asked in turn.

A pair is a prefill and a decode server of one model, the cache moving over NIXL, with the notes of ``timed_transfers``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.packed.timed_transfers.switch import FILE, LAG_MS, churned
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Answer, Load, Run

CHECKOUT = Path(__file__).resolve().parents[2]
PORTS_APART = 50
# With these UCX says how it moves what.
UCX = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}
EARLY_SEND = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
WRITES = "remote memory write by ucp_put"  # the title of what UCX says of a transfer's way
IDLE = 20  # looks, half a second apart, until a server is idle and can be flushed


@dataclass
class Pair:
    """The servers of one layout, and what they have noted. room: of its next request."""

    layout: str
    prefill: servers.Server
    decode: servers.Server
    bootstrap_port: int
    notes: dict[str, Path]
    room: int = 2

    def ask(
        self, prompt: list[int], timeout: float, *, compared: bool = False, rid: str | None = None
    ) -> tuple[Answer, float]:
        """One request of a few tokens; its answer and the milliseconds to its first token."""
        self.room += 2
        room = self.room + compared
        given = argparse.Namespace(timeout=timeout)
        run = Run(Load([], []), given, self.decode.url, self.prefill.url, room, self.bootstrap_port)
        started = time.monotonic()
        answer = run.ask(prompt, 2, 0, {"rid": rid} if rid else None)
        if answer.outcome != "finished":
            raise servers.ServerDied(f"{self.layout}: {answer.error} (logs: {self.prefill.log}, {self.decode.log})")
        return answer, (answer.arrived[0][0] - started) * 1e3

    def wear_down(self, leave: int, timeout: float) -> None:
        """Both servers' pages, as hours of serving would, with ``leave`` of them free; what they knew is forgotten."""
        self.renew()
        self.ask([11] * 300, timeout, rid=churned(leave, f"{self.layout}-{self.room}"))

    def renew(self) -> None:
        """Both servers' pages as a fresh server's; what they knew is forgotten."""
        for server in (self.prefill, self.decode):
            flush(server)

    def noted(self, role: str) -> list[dict[str, Any]]:
        """All lines of one of the servers so far; those of a request are there before its first token."""
        return [json.loads(line) for line in self.notes[role].read_text().splitlines()]

    def transports(self) -> list[str]:
        """What UCX says of how it writes to another process's memory."""
        return ucx_writes(self.prefill.log.read_text(errors="replace"))


def flush(server: servers.Server) -> None:
    """Empty the server's prefix tree, which has its pages back. Raises ServerDied where it is never idle."""
    for _ in range(IDLE):
        with contextlib.suppress(urllib.error.HTTPError):
            servers.post(server.url, "/flush_cache", {}, 30)
            return
        time.sleep(0.5)
    raise servers.ServerDied(f"the {server.role} server is never idle: {server.log}")


def ucx_writes(log: str) -> list[str]:
    """Of each of its tables: a title in one cell, then rows of three, of which the last two are meant."""
    found, wanted = set(), False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1:
            wanted = WRITES in cells[0]
        elif wanted and len(cells) == 3 and cells[0] != "Range":
            found.add(f"{cells[1]} by {cells[2]}")
    return sorted(found)


@contextlib.contextmanager
def pairs_up(arguments: argparse.Namespace, model: Path) -> Iterator[list[Pair]]:
    """A pair for each of ``--layouts``, up; all end with the block. Raises ServerDied."""
    started: list[Pair] = []
    try:
        for number, layout in enumerate(arguments.layouts):
            started.append(_launch(number, layout, arguments, model))
        every = [server for pair in started for server in (pair.prefill, pair.decode)]
        servers.wait_until_up(every, arguments.patience)
        yield started
    finally:
        for server in (server for pair in started for server in (pair.prefill, pair.decode)):
            server.kill()


def _launch(number: int, layout: str, arguments: argparse.Namespace, model: Path) -> Pair:
    folder = arguments.logs / arguments.name / layout
    folder.mkdir(parents=True, exist_ok=True)
    port, found, notes = servers.BOOTSTRAP_PORT + PORTS_APART * number, {}, {}
    for role, device in zip(("prefill", "decode"), arguments.devices, strict=True):
        notes[role] = folder.resolve() / f"{role}.jsonl"
        notes[role].write_text("")
        environment = {
            "SGLANG_HOST_IP": "127.0.0.1", "DSV4_LAYOUT": layout, "DSV4_HOST_GB": "1", FILE: str(notes[role]),
            **servers.model_package("benchmarks.packed.timed_transfers", CHECKOUT), **UCX,
            **({EARLY_SEND: "0"} if arguments.no_early_send else {}),
            **({LAG_MS: str(arguments.lag)} if arguments.lag and role == "prefill" else {}),
        }  # fmt: skip
        given = [*room_for(arguments), "--base-gpu-id", str(device), "--disaggregation-bootstrap-port", str(port)]
        found[role] = servers.launch(
            role, str(model), [*given, *arguments.server], environment, folder, "nixl", PORTS_APART * number
        )
    return Pair(layout, found["prefill"], found["decode"], port, notes)


def ordering(notes: list[dict[str, Any]]) -> dict[str, float]:
    """What the search for runs takes of the scheduler's thread, and among how many free pages, at most."""
    times = [note["order_ms"] for note in notes if "order_ms" in note]
    if not times:
        return {"orders": 0}
    most = max(note["free"] for note in notes if "order_ms" in note)
    return {"orders": len(times), "order_ms": statistics.median(times), "free_pages": most}


def room_for(arguments: argparse.Namespace) -> list[str]:
    """Server arguments that make the longest request fit, with small graphs, which start fast."""
    return [
        "--context-length", str(max(arguments.tokens) + 1024), "--max-total-tokens", str(arguments.pool_tokens),
        "--max-running-requests", "4", "--cuda-graph-max-bs-decode", "4", "--mem-fraction-static", "0.9",
    ]  # fmt: skip


def prompt_of(tokens: int, seed: int, vocabulary: int) -> list[int]:
    """Seeded tokens."""
    draw = random.Random(f"{tokens}-{seed}")
    return [draw.randrange(10, vocabulary) for _ in range(tokens)]
