#!/usr/bin/env python3
"""Whether a decode step, or a chunk of a prefill, is slower where the layers of a page lie together.

    python3 -m benchmarks.packed.step --config CONFIG --layers 23 [--role decode prefill] [--pool-gb 60]

Two servers side by side, stock and page-major, each with a pool of --pool-gb, run in turn; one of them is suspended.
decode: a batch of long requests (fake transfer), which fill much of the pool, decodes while its server is awake.
prefill: pools are worn down (timed_transfers.churn), and a prompt that is new is prefilled in chunks. A group is four
blocks, stock, page-major, page-major, stock or the other way round, and gives one ratio: the time of its two blocks
with stock by that of the two others; above 1, page-major is faster. What a forward takes is read from events on its
stream (timed_steps). A prompt's first chunks run about as fast as the host launches them, which is slow for stretches;
in its later ones attention makes the card the slower one. So a prefill has two rows: all chunks, and the later half of
each prompt's. The interval is that of the median group. Arguments after -- go to the servers. Exit status 1 where
page-major may be more than 1 % slower.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.packed.pairs import CHECKOUT, PORTS_APART, ordering, prompt_of
from benchmarks.packed.timed_steps.clock import FILE
from benchmarks.packed.timed_transfers.switch import churned
from benchmarks.packed.transfer import PAGE_MAJOR, STOCK
from benchmarks.shapes import write_model
from benchmarks.steps.summary import CONFIDENCE, MARGIN, interval
from sglang_dsv4.bench import results
from sglang_dsv4.cache.families import families
from sglang_dsv4.cache.family import Group
from sglang_dsv4.cli.plan_config import Variant, read_model
from sglang_dsv4.livetest import servers

LAYOUTS = (STOCK, PAGE_MAJOR)
SETTLING = 8  # forwards after a server is woken that are not looked at: some were launched before it was suspended
FEWEST = 8  # groups that an interval is made from
Blocks = dict[str, list[list[float]]]  # of a group: milliseconds of each forward, by layout and block
WEARS = 100  # steps of the churn, in so large a pool
LONG = 1024  # tokens of what counts as a chunk of a prefill
LATER = "prefill, later half of each prompt"
SHARE = 0.8  # of a decode server's pool that its requests fill


@dataclass
class Subject:
    """One server, what it has noted, and how much of that was read."""

    layout: str
    server: servers.Server
    notes: Path
    read: int = 0
    rooms: Iterator[int] = field(default_factory=lambda: iter(range(1, 1 << 30)))

    def send(self, prompt: list[int], new_tokens: int, timeout: float, rid: str | None = None) -> None:
        """One request, answered at once when all of it is there."""
        body = {
            "input_ids": prompt, "bootstrap_host": servers.FAKE_HOST, "bootstrap_port": servers.BOOTSTRAP_PORT,
            "bootstrap_room": next(self.rooms), **({"rid": rid} if rid else {}),
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
        }  # fmt: skip
        servers.feed(self.server.url, body, timeout)

    def new_notes(self) -> list[dict[str, Any]]:
        """Forwards since the last look."""
        lines = self.notes.read_text().splitlines()
        found, self.read = lines[self.read :], len(lines)
        return [note for note in map(json.loads, found) if "ms" in note]


def tokens_in(log: Path) -> int:
    """Of the pool that the server has, which may be smaller than what it was asked for; 0 where it does not say."""
    return min(map(int, re.findall(r"max_total_num_tokens=(\d+)", log.read_text(errors="replace"))), default=0)


def facts_of(subject: Subject) -> dict[str, Any]:
    """What its notes say beside the times of forwards; the search for runs is a page-major server's alone."""
    notes = [json.loads(line) for line in subject.notes.read_text().splitlines()]
    host = [note["host_ms"] for note in notes if "host_ms" in note and (note["decode"] or note["tokens"] > LONG)]
    found = {f"{subject.layout}_host_ms": statistics.median(host)} if host else {}
    return found | (ordering(notes) if subject.layout != STOCK else {})


@contextlib.contextmanager
def two_servers(role: str, arguments: argparse.Namespace, model: Path, tokens: int) -> Iterator[list[Subject]]:
    """Both, up. Raises ServerDied."""
    started: list[Subject] = []
    try:
        for number, layout in enumerate(LAYOUTS):
            folder = arguments.logs / f"{arguments.name}-{role}" / layout
            folder.mkdir(parents=True, exist_ok=True)
            notes = folder.resolve() / "steps.jsonl"
            notes.write_text("")
            environment = {
                "SGLANG_HOST_IP": "127.0.0.1", "DSV4_LAYOUT": layout, "DSV4_HOST_GB": "1", FILE: str(notes),
                **servers.model_package("benchmarks.packed.timed_steps", CHECKOUT),
            }  # fmt: skip
            port = str(servers.BOOTSTRAP_PORT + PORTS_APART * number)
            given = [
                "--context-length", str(max(arguments.tokens, arguments.prompt) + (1 << 14)),
                "--max-total-tokens", str(tokens), "--swa-full-tokens-ratio", "0.004", "--mem-fraction-static", "0.99",
                "--max-running-requests", str(arguments.batch), "--cuda-graph-max-bs-decode", str(arguments.batch),
                "--disaggregation-bootstrap-port", port, "--disable-radix-cache",
            ]  # fmt: skip
            # With the fake backend a prefill server does not start; requests that name FAKE_HOST are sent nowhere.
            way = "nixl" if role == "prefill" else "fake"
            server = servers.launch(
                role, str(model), [*given, *arguments.server], environment, folder, way, PORTS_APART * number
            )
            started.append(Subject(layout, server, notes))
        servers.wait_until_up([subject.server for subject in started], arguments.patience)
        yield started
    finally:
        for subject in started:
            subject.server.kill()


def decode_blocks(subjects: list[Subject], arguments: argparse.Namespace, tokens: int) -> Iterator[Blocks]:
    """Groups of blocks, by layout; the requests of both servers run meanwhile."""
    length = min(arguments.tokens, int(tokens * SHARE) // arguments.batch)
    for subject in subjects:
        for _ in range(arguments.batch):
            given = ([11] * length, 1 << 13, arguments.seconds + arguments.patience)
            threading.Thread(target=subject.send, args=given, daemon=True).start()
    for subject in subjects:
        _until_all_run(subject, arguments)
        subject.server.suspend()

    def block(subject: Subject) -> list[float]:
        subject.new_notes()
        with subject.server.awake():
            time.sleep(arguments.block)
        return [note["ms"] for note in subject.new_notes()[SETTLING:] if note["requests"] == arguments.batch]

    yield from groups(subjects, block, arguments.seconds)


def _until_all_run(subject: Subject, arguments: argparse.Namespace) -> None:
    deadline = time.monotonic() + arguments.patience
    while not any(note["decode"] and note["requests"] == arguments.batch for note in subject.new_notes()):
        if time.monotonic() > deadline or not subject.server.alive:
            raise servers.ServerDied(f"{subject.layout}: {arguments.batch} requests never ran ({subject.server.log})")
        time.sleep(0.5)


def prefill_blocks(subjects: list[Subject], arguments: argparse.Namespace, tokens: int) -> Iterator[Blocks]:
    """Groups of blocks, by layout; each is one prompt."""
    leave = tokens // 256 // 10
    for subject in subjects:
        subject.send([11] * 300, 1, arguments.timeout, churned(leave, subject.layout, WEARS))
        subject.send(prompt_of(arguments.prompt, 0, 2000), 1, arguments.timeout)  # compiles
        time.sleep(1)
        subject.send([11] * 300, 1, arguments.timeout)
        subject.server.suspend()
    seeds = iter(range(1, 1 << 30))

    def block(subject: Subject) -> list[float]:
        with subject.server.awake():
            subject.new_notes()
            subject.send(prompt_of(arguments.prompt, next(seeds), 2000), 1, arguments.timeout)
            for _ in range(5):  # a forward is noted when others have followed
                subject.send([11] * 300, 1, arguments.timeout)
        return [note["ms"] for note in subject.new_notes() if note["tokens"] > LONG]

    yield from groups(subjects, block, arguments.seconds)


def groups(subjects: list[Subject], block: Any, seconds: float) -> Iterator[Blocks]:
    """Four blocks after the other, in turn begun by each, for so many seconds."""
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        first, second = subjects if number % 2 == 0 else subjects[::-1]
        found: Blocks = {layout: [] for layout in LAYOUTS}
        for subject in (first, second, second, first):
            found[subject.layout].append(block(subject))
            if not subject.server.alive:
                raise servers.ServerDied(f"{subject.layout}: {subject.server.log}")
        number += 1
        yield found


def ratio_of(group: Blocks) -> float | None:
    """Time with stock by time page-major, of as many forwards of each block; None where a block has none."""
    blocks = [block for found in group.values() for block in found]
    fewest = min(map(len, blocks))
    if not fewest:
        return None
    stock, packed = (sum(statistics.median(block[:fewest]) for block in group[layout]) for layout in LAYOUTS)
    return stock / packed


def rows_of(role: str, found: list[Blocks], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Of all groups so far: one row, and for a prefill one of the later chunks alone."""
    rows = [row_of(role, found, facts)]
    if role == "prefill":
        without_host = {name: fact for name, fact in facts.items() if not name.endswith("host_ms")}
        rows.append(row_of(LATER, [later_of(group) for group in found], without_host))
    return rows


def later_of(group: Blocks) -> Blocks:
    """Without the earlier half of each block."""
    return {layout: [block[len(block) // 2 :] for block in blocks] for layout, blocks in group.items()}


def row_of(role: str, found: list[Blocks], facts: dict[str, Any]) -> dict[str, Any]:
    """Of these groups."""
    ratios = [ratio for group in found if (ratio := ratio_of(group)) is not None]
    row = {"role": role, **facts, "groups": len(ratios)}
    for layout in LAYOUTS:
        times = [ms for group in found for block in group[layout] for ms in block]
        row |= {f"{layout}_forwards": len(times), f"{layout}_ms": statistics.median(times) if times else float("nan")}
    if ratios:
        row |= dict(zip(("ratio", "low", "high"), interval([ratios], len(ratios)), strict=True))
    return row


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Not slower, shown by enough groups, in a pool that is large enough."""
    bounds = []
    for row in rows:
        bounds += [
            results.bound(f"{row['role']}: groups", f">= {FEWEST}", row["groups"]),
            results.bound(f"{row['role']}: GB of history in each pool", ">= 60", row["pool_gb"]),
            results.bound(f"{row['role']}: stock / page-major, low end", f">= {MARGIN}", row.get("low", 0)),
        ]
    return bounds


def report(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write what there is; its bounds."""
    bounds = judge(rows)
    path = results.write(arguments.name, rows, bounds, arguments.out)
    names = ("role", "groups", "stock ms (host)", "page-major ms (host)", "stock / page-major (interval)")
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows:
        middle = f"{row['ratio']:.4f} ({row['low']:.4f} to {row['high']:.4f})" if "ratio" in row else "none"
        hosts = [f" ({row[f'{layout}_host_ms']:.3f})" if f"{layout}_host_ms" in row else "" for layout in LAYOUTS]
        times = [f"{row[f'{layout}_ms']:.3f}{host}" for layout, host in zip(LAYOUTS, hosts, strict=True)]
        lines.append(f"| {row['role']} | {row['groups']} | {' | '.join(times)} | {middle} |")
    note = (
        f"Two servers in turn; {CONFIDENCE:.0%} intervals of the median group. In brackets: what the host takes for "
        "its launch, or waits in it; where that is as long, the host was timed."
    )
    results.page(path, "Forwards with page-major pools, and with the engine's", note, lines)
    print("\n".join(lines), flush=True)
    return bounds


def history_bytes(model: Path) -> float:
    """Of a token, in all that grows with the tokens."""
    geometry = read_model(str(model), Variant()).geometry
    pages = [len(family.layers) * family.page_bytes for family in families(geometry) if family.group is Group.PAGED]
    return sum(pages) / geometry.page_size


BLOCKS = {"decode": decode_blocks, "prefill": prefill_blocks}


def measure(arguments: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    """One role after the other; the bounds."""
    token_bytes = history_bytes(model)
    tokens = int(arguments.pool_gb * 1e9 / token_bytes) // 256 * 256
    rows: list[dict[str, Any]] = []
    for role in arguments.role:
        found: list[Blocks] = []
        with two_servers(role, arguments, model, tokens) as subjects:
            smaller = min(tokens_in(subject.server.log) for subject in subjects)
            facts = {"pool_gb": smaller * token_bytes / 1e9, "pool_tokens": smaller, "batch": arguments.batch}
            for group in BLOCKS[role](subjects, arguments, smaller):
                found.append(group)
                for subject in subjects:
                    facts |= facts_of(subject)
                report(arguments, [*rows, *rows_of(role, found, facts)])
        rows += rows_of(role, found, facts)
    return report(arguments, rows)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for the servers."""
    parser = results.parser(__doc__, "packed-step")
    parser.add_argument("--config", type=Path, required=True, help="config.json of the model")
    parser.add_argument("--experts", type=int, default=8, help="routed experts, so that both servers fit the card")
    parser.add_argument("--layers", type=int, help="as many layers, with the config's ratios in turn")
    parser.add_argument("--role", nargs="+", choices=tuple(BLOCKS), default=tuple(BLOCKS))
    parser.add_argument("--pool-gb", type=float, default=60.1, help="of history (1e9 bytes) in each server's pool")
    parser.add_argument("--batch", type=int, default=64, help="requests that decode")
    parser.add_argument("--tokens", type=int, default=1 << 17, help="of each of them, at most")
    parser.add_argument("--prompt", type=int, default=1 << 15, help="tokens of a prompt that is prefilled")
    parser.add_argument("--block", type=float, default=1.0, help="seconds of a block of decode steps")
    parser.add_argument("--seconds", type=float, default=60, help="of measuring, for each role")
    parser.add_argument("--patience", type=float, default=420, help="seconds for the servers to come up")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one request")
    return servers.parse(parser, argv)


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    model, _ = write_model(arguments.config, arguments.logs / "model", arguments.experts, arguments.layers)
    bounds = measure(arguments, model)
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
