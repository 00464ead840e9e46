#!/usr/bin/env python3
"""Nothing of HiSparse can be shown on a server that does not serve: which kinds of server do, on this release?

    python3 -m benchmarks.hisparse.gate --model-path MODEL --name hisparse-gate

Four servers beside each other on one GPU: plain, and decode with the fake transfer, each stock (DSV4_ENABLED=0) and
with this package. Each gets prompts longer than its device buffer, so that rows are missing there and come from the
host. A row says whether all were answered, else why not, and the end of that server's log is printed. With --interval
the engine also retracts, every so many steps: what it does with a HiSparse request then is part of the question.
Arguments after -- go to the servers. Exit status 1 where one with this package does not serve and stock does, or none
serves.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Load, Run
from sglang_dsv4.livetest.retract_stats import read_log

STOCK, PACKAGE = "stock", "with this package"
ENVIRONMENTS = {
    STOCK: {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models", "DSV4_ENABLED": "0"},
    PACKAGE: {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models", "DSV4_ENABLED": "1"},
}
KINDS = [(mode, whose) for mode in ("plain", "decode") for whose in (STOCK, PACKAGE)]
TAIL = 25  # lines of a log
# How the engine, and the libraries below it, end a traceback or an assertion.
ERROR = re.compile(r"^(?:\[[^\]]*\] )?(?:[\w.]+(?:Error|Exception)\b.*|sglang_dsv4\.errors\..*|.*CUDA error.*)$")


def server_arguments(buffer: int, ratio: int) -> list[str]:
    """What turns HiSparse on. buffer: rows of a request on the device. ratio: host rows by device rows."""
    config = {"top_k": min(512, buffer), "device_buffer_size": buffer, "host_to_device_ratio": ratio}
    return ["--enable-hisparse", "--disable-radix-cache", "--hisparse-config", json.dumps(config)]


def serve(mode: str, whose: str, apart: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of one server: started, asked, stopped."""
    started = time.monotonic()
    words = [*server_arguments(arguments.buffer, arguments.ratio), *arguments.server]
    environment = ENVIRONMENTS[whose] | servers.forced_retracts(arguments.interval)
    folder = arguments.logs / arguments.name / whose.replace(" ", "-")
    server = servers.launch(mode, arguments.model_path, words, environment, folder, apart=apart)
    row: dict[str, Any] = {"mode": mode, "server": whose, "up": False, "served": False, "finished": 0, "reason": ""}
    try:
        servers.wait_until_up([server], arguments.patience)
        row |= {"up": True, "up_seconds": time.monotonic() - started}
        room = time.time_ns() // 1000 if mode == "decode" else None
        said = Run(Load.of(arguments), arguments, server.url, None, room).execute(f"{mode}, {whose}").summary()
        row |= {name: said[name] for name in ("finished", "refused", "lost")}
        row["served"] = said["finished"] == arguments.requests and server.alive
        row["reason"] = "" if row["served"] else (why(server.log) or "; ".join(said["errors"]))
    except servers.ServerDied:
        row["reason"] = why(server.log) or "it did not come up in time"
    finally:
        server.stop()
    log = read_log(server.log)
    row |= {name: log[name] for name in ("saves", "loads", "fallbacks", "engine_retracts")}
    row["seconds"] = time.monotonic() - started
    return row


def why(log: Path) -> str:
    """The first and the last error that a server's log names; the lines around the first, and the tail, are printed.

    What ends a scheduler comes first; behind it come the errors of who waited for it.
    """
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [number for number, line in enumerate(lines) if ERROR.match(line.strip())]
    first = lines[max(0, errors[0] - TAIL) : errors[0] + 1] if errors and errors[0] < len(lines) - TAIL else []
    print("\n".join([f"--- {log}", *first, "...", *lines[-TAIL:]]), flush=True)
    named = dict.fromkeys(lines[number].strip()[:300] for number in (errors[0], errors[-1])) if errors else {}
    return "; then ".join(named)


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A server with this package serves where stock does, and some kind does at all."""
    served = {(row["mode"], row["server"]): row["served"] for row in rows}
    worse = [mode for mode, whose in served if served[mode, whose] and not served.get((mode, PACKAGE), True)]
    ours = sum(row["served"] for row in rows if row["server"] == PACKAGE)
    return [
        results.bound("kinds of server that stock serves, and this package does not", "<= 0", len(worse)),
        results.bound("kinds of server that serve with this package", ">= 1", ours),
    ]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for the servers."""
    parser = results.parser(__doc__, "hisparse-gate")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--prompt", type=int, nargs=2, default=(2100, 3800), metavar=("LOW", "HIGH"), help="tokens")
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(24, 40), metavar=("LOW", "HIGH"))
    parser.add_argument("--concurrency", type=int, default=3)
    parser.add_argument("--buffer", type=int, default=512, help="rows of a request on the device (512)")
    parser.add_argument("--ratio", type=int, default=4, help="host rows by device rows (4)")
    parser.add_argument("--interval", type=int, default=0, help="force a retract every so many steps (0: none)")
    parser.add_argument("--at-once", type=int, default=len(KINDS), help="servers beside each other")
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=150, help="seconds for a server to come up")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one request")
    return servers.parse(parser, argv)


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    servers.end_when_told()
    rows = []
    with ThreadPoolExecutor(arguments.at_once) as pool:
        asked = [pool.submit(serve, *kind, apart, arguments) for apart, kind in enumerate(KINDS)]
        for done in as_completed(asked):
            rows.append(done.result())
            results.show(rows[-1:])
            bounds = judge(rows)
            results.write(arguments.name, rows, bounds, arguments.out)  # what there is, should this be ended early
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
