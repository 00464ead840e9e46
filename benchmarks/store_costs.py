"""Measures what the store costs where nobody gains: a server with one beside the same without, by turns.

    python3 -m benchmarks.store_costs --scene busy --config benchmarks/flash_config.json --experts 8 \\
        -- --mem-fraction-static 0.9

Both keep sessions. One is suspended while the other runs, and each round changes who is first. A round before the
first one is not counted.

idle: the device holds the sessions of all agents, so that the store is only written: turns a second.
busy: four requests decode while new prompts come, whose answers have one token. Behind each the store gets the cache of
that prompt, as fast as it takes it, and nobody prefills: the gaps of the four in --window seconds.
hangs: the same, while the store's process is suspended (SIGSTOP) whenever there is one. A request that asks it may wait
for half of its prefill.
Arguments after -- go to both servers. Exit status 1 when a bound is missed.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from benchmarks import store_servers as stores
from benchmarks.client import model_of
from benchmarks.session_agents import Agents
from benchmarks.session_agents import Talk as AgentsTalk
from benchmarks.session_costs import ALL, BESIDE, WARM_UP, Decodes, spread
from benchmarks.steps import CONFIDENCE, interval
from benchmarks.store_servers import OURS, bytes_of, in_files, ours, settle, start
from sglang_dsv4.bench import results
from sglang_dsv4.command_line import COUNT, SECONDS
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import Answer, Load, Run
from sglang_dsv4.livetest.retract_stats import read_log
from sglang_dsv4.livetest.store_process import store_processes

WITHOUT = "without"
IDLE, SLOWER, FOUND = 0.99, 1.02, 0.9  # of the rate without; of the step without; turns that the device answers
LATE = 1.6  # of the first token without: half of the prefill, and a tenth
WRITTEN = 0.5  # GB/s, or nothing was beside the steps
COMES_UP = 60  # seconds in which a store process starts again

Row = dict[str, Any]
Both = Sequence[tuple[stores.Way, servers.Server]]


def rounds(both: Both, count: int) -> Iterator[tuple[int, Both]]:
    """Yields the number of each round, and both servers in its order."""
    for round_ in range(WARM_UP, count):
        yield round_, both[:: -1 if round_ % 2 else 1]


# ---------------------------------------------------------------------- nothing but writes


def idle(both: Both, arguments: argparse.Namespace) -> list[Row]:
    """Has the turns of all agents on one server and then on the other; returns a row for each round and server."""
    rows = []
    for round_, order in rounds(both, arguments.rounds):
        written = {way.name: bytes_of(way.objects) for way, _ in order}
        talks = [
            AgentsTalk(server, way.name, arguments.tokens, round_, arguments.agents, arguments) for way, server in order
        ]
        for talk, (way, server) in zip(talks, order, strict=True):
            talk.begin()
            with server.awake():  # it is suspended for long now: its store would be taken for one that hangs
                settle(server, way.objects)
        for turn in range(arguments.turns):
            for talk in talks[:: -1 if turn % 2 else 1]:
                talk.turn()
        found = [talk.end() for talk in talks]
        for row, (way, _) in zip(found, order, strict=True):
            row["written"] = bytes_of(way.objects) - written[way.name]
        rows += found if round_ != WARM_UP else []
    return rows


def judge_idle(rows: Sequence[Row], seed: int) -> list[Row]:
    """Returns the bounds of turns that need no store."""
    mine, others = ([row for row in rows if row["run"] == name] for name in (OURS, WITHOUT))
    each = [(a["turn_seconds"], b["turn_seconds"]) for a, b in zip(mine, others, strict=True)]
    ratios = [[theirs / ours_ for ours_, theirs in zip(*turns, strict=True)] for turns in each]
    whole = sum(sum(theirs) for _, theirs in each) / sum(sum(ours_) for ours_, _ in each)
    typical, low, _ = interval(ratios, seed)
    limit = f">= {IDLE}"
    return [
        results.bound("turns found on the device, share", f">= {FOUND}", min(row["found"] for row in rows)),
        results.bound("bytes written, least round", ">= 1", min(row["written"] for row in mine)),
        results.bound("turns a second, by those without, median turn", limit, typical),
        results.bound("turns a second, by those without, all turns", limit, whole),
        results.bound(f"median turn, low end of the {CONFIDENCE:.0%} interval", limit, low),
    ]


# ---------------------------------------------------------------------- steps beside writes


class Processes:
    """Finds the store processes of a server, again and again: one that hangs is replaced."""

    def __init__(self, server: servers.Server, hang: bool) -> None:
        self.server, self.hang = server, hang
        self.stopped: dict[int, psutil.Process] = {}

    def wait(self) -> None:
        """Returns as soon as there is one, or after COMES_UP seconds."""
        deadline = time.monotonic() + COMES_UP
        while not self.found() and time.monotonic() < deadline:
            time.sleep(0.05)

    def found(self) -> list[psutil.Process]:
        """Returns them; they are suspended where they shall hang."""
        found = store_processes(self.server.process.pid)
        for process in found if self.hang else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
                self.stopped[process.pid] = process
        return found

    def resume(self) -> None:
        """Lets those go on that were not killed."""
        for process in self.stopped.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def watch(processes: Sequence[psutil.Process], seconds: float) -> tuple[int, float]:
    """Returns the bytes that processes write in so many seconds, and the seconds until the last of them."""

    def written() -> int:
        total = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                total += process.io_counters().write_chars
        return total

    start, first, found = time.monotonic(), written(), (0, 0.0)
    while (now := time.monotonic()) < start + seconds:
        if (so_far := written() - first) > found[0]:
            found = so_far, now - start
        time.sleep(0.01)
    return found


def part(server: servers.Server, name: str, round_: int, arguments: argparse.Namespace) -> tuple[Row, list[float]]:
    """Runs one server's part of a round; returns its row, and the gaps of those that decode."""
    prompts = Agents(arguments.prompts, arguments.tokens, round_, arguments).said
    client, answers = Run(Load([], []), arguments, server.url, None, None), list[Answer]()
    processes, start = Processes(server, arguments.scene == "hangs" and name == OURS), server.log.stat().st_size
    gaps, written = list[float](), list[tuple[int, float]]()
    servers.flush(server.url)
    if name == OURS:
        processes.wait()
    with Decodes(server.url, BESIDE, f"{arguments.seed}-{round_}", arguments) as decodes:
        for number, prompt in enumerate(prompts):
            working = processes.found()
            answers.append(client.ask(prompt, 1, number))
            since = time.monotonic()
            written.append(watch(working, arguments.window))
            pairs = itertools.chain.from_iterable(itertools.pairwise(list(times)) for times in decodes.arrived)
            gaps += [(b - a) * 1e3 for (a, _), (b, _) in pairs if since <= a and b <= since + arguments.window]
        counted = decodes.counted(len(answers), sum(answer.outcome == "whole" for answer in answers))
    processes.resume()
    total, seconds = (sum(each) for each in zip(*written, strict=True))
    row = {
        "run": name, "round": round_, **counted, **spread(gaps), "gaps": len(gaps), "stopped": len(processes.stopped),
        "written": total, "gb_a_second": total / max(seconds, 1e-6) / 1e9,
        "first_tokens_ms": [(one.arrived[0][0] - one.sent) * 1e3 for one in answers if one.arrived],
        "trouble": read_log(server.log, start)["trouble"],
    }  # fmt: skip
    return row, gaps


def beside(both: Both, arguments: argparse.Namespace) -> list[Row]:
    """Runs all rounds; returns a row for each of them and server, and one for all rounds of a server."""
    rows, pooled = list[Row](), defaultdict[str, list[float]](list)
    for round_, order in rounds(both, arguments.rounds):
        for way, server in order:
            with server.awake():
                row, gaps = part(server, way.name, round_, arguments)
                settle(server, way.objects)
                servers.flush(server.url)
            results.show([row])
            if round_ != WARM_UP:
                rows.append(row)
                pooled[way.name] += gaps
    return rows + [{"run": ALL + name, **spread(gaps)} for name, gaps in pooled.items()]


def judge_beside(rows: Sequence[Row], hangs: bool) -> list[Row]:
    """Returns the bounds of steps beside writes, or beside a store that hangs."""
    of = {name: [row for row in rows if row["run"] == name] for name in (OURS, WITHOUT, ALL + OURS, ALL + WITHOUT)}
    mine, others = of[OURS], of[WITHOUT]
    step = of[ALL + OURS][0]["p99_ms"] / of[ALL + WITHOUT][0]["p99_ms"]
    latest, usual = (
        max((ms for row in rows for ms in row["first_tokens_ms"]), default=1e-6) for rows in (mine, others)
    )
    speed = statistics.median(row["gb_a_second"] for row in mine)
    if hangs:
        seen = [
            results.bound("store processes that hang, least round", ">= 1", min(row["stopped"] for row in mine)),
            results.bound("latest first token, by that without", f"<= {LATE}", latest / usual),
        ]
    else:
        seen = [results.bound("written beside the steps, GB/s, median round", f">= {WRITTEN}", speed)]
    return [*seen, results.bound("step of those that decode, p99, by that without", f"<= {SLOWER}", step)]


# ---------------------------------------------------------------------- the command


def judge(rows: Sequence[Row], arguments: argparse.Namespace) -> list[Row]:
    """Returns the bounds of a scene."""
    parts = [row for row in rows if not row["run"].startswith(ALL)]
    is_idle = arguments.scene == "idle"
    return [
        results.bound("requests without a whole answer", "<= 0", sum(row["asked"] - row["whole"] for row in parts)),
        results.bound("trouble in a log", "<= 0", sum(len(row["trouble"]) for row in parts)),
        *(judge_idle(rows, arguments.seed) if is_idle else judge_beside(rows, arguments.scene == "hangs")),
    ]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = stores.options(__doc__, ["idle", "busy", "hangs"])
    parser.add_argument("--rounds", type=COUNT, default=4)
    parser.add_argument("--turns", type=COUNT, default=8, help="of each agent in a round of idle")
    parser.add_argument("--prompts", type=COUNT, default=6, help="of a round of busy or hangs")
    parser.add_argument("--window", type=SECONDS, default=0.5, help="seconds behind each of them that are looked at")
    arguments = stores.read_options(parser, argv)
    arguments.server = ["--incremental-streaming-output", *arguments.server]  # long answers are read beside the others
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Returns exit status 1 when a bound is missed."""
    arguments = parse(argv)
    servers.end_when_told()
    arguments.model_path = str(model_of(arguments)[0])
    with contextlib.ExitStack() as stack:  # servers take half a minute to end: the result is written before
        off = ours(arguments, {"DSV4_STORE": "off"}, WITHOUT, score.APART)
        ways = [ours(arguments, in_files(stack, arguments, "ours")), off]
        both = list(zip(ways, start(stack, ways, arguments), strict=True))
        rows = idle(both, arguments) if arguments.scene == "idle" else beside(both, arguments)
        return results.finish(arguments, rows, judge(rows, arguments))


if __name__ == "__main__":
    sys.exit(main())
