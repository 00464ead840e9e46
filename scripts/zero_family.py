#!/usr/bin/env python3
"""Every cache family matters, on a live server: zero one family's bytes in each loaded copy, and the text changes.

    python3 scripts/zero_family.py --model-path MODEL

A prefill and a decode server on one GPU, the cache moving over NIXL; one request at a time, so that its steps are the
same in every run. The same requests run without retracts twice (the control), with forced retracts and exact loads
(the tokens must be the control's, each one), then once for each family with that family zeroed (they must not be).
Prompts are longer than 2,048 tokens: below, the indexer's choice of 512 rows is all of them. Arguments after -- go to
the servers. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import results
import servers
import stress_retract as stress
from zeroing.switch import NONE, OFF, VARIABLE

from sglang_dsv4.cache.families import Geometry, families

FAMILIES = tuple(family.name for family in families(Geometry((0, 4, 128))))
CONTROL = "control"
# A prefix taken from an earlier run's cache would be computed in other chunks, and rounded otherwise.
SAME_STEPS = ("--disable-radix-cache",)
ZEROED = re.compile(r"zeroed (\d+) bytes of (\w+)")


def load_of(arguments: argparse.Namespace) -> stress.Load:
    """The requests: seeded, one for each length in ``--prompt``."""
    draw = random.Random(arguments.seed)
    prompts = [[draw.randrange(10, arguments.vocabulary) for _ in range(length)] for length in arguments.prompt]
    return stress.Load(prompts, [arguments.new_tokens] * len(prompts))


def start(arguments: argparse.Namespace, switch: Path) -> tuple[servers.Server, servers.Server]:
    """(prefill, decode), not yet up."""
    shared = {"SGLANG_HOST_IP": "127.0.0.1", "DSV4_VERIFY": "1"}
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    damaging = {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "zeroing",
        "PYTHONPATH": path,
        VARIABLE: str(switch),
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": str(arguments.interval),
    }
    options = [*SAME_STEPS, *arguments.server]
    honest = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models"}
    prefill = servers.launch("prefill", arguments.model_path, options, shared | honest, arguments.logs, "nixl")
    decode = servers.launch("decode", arguments.model_path, options, shared | damaging, arguments.logs, "nixl")
    return prefill, decode


def run_all(arguments: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What each run gave, by its name, and the trouble in the decode server's log. Starts and stops the servers."""
    arguments.logs.mkdir(parents=True, exist_ok=True)
    switch = (arguments.logs / "zero_family.txt").resolve()
    switch.write_text(OFF)
    load = load_of(arguments)
    found: dict[str, dict[str, Any]] = {}
    started: list[servers.Server] = []
    try:
        started += start(arguments, switch)
        servers.wait_until_up(started, arguments.patience)
        prefill, decode = started
        runs = [("warm-up", OFF), (CONTROL, OFF), ("control again", OFF), *((name, name) for name in (NONE, *FAMILIES))]
        for number, (name, word) in enumerate(runs):
            switch.write_text(word)
            before = decode.log.stat().st_size
            room = 1 + number * len(load.prompts)
            run = stress.Run(load, arguments, decode.url, prefill.url, room).execute(name)
            with decode.log.open("rb") as log:
                log.seek(before)
                said = log.read().decode(errors="replace")
            found[name] = {"answers": run.answers, **events(said, word), "seconds": run.seconds}
    finally:
        for server in started:
            server.stop()
    return found, stress.read_log(decode.log)["trouble"]


def events(log: str, family: str) -> dict[str, int]:
    """Loads in a part of the decode server's log, and those with ``family`` zeroed."""
    zeroed = [int(count) for count, name in ZEROED.findall(log) if name == family]
    return {"loads": len(stress.LOADED.findall(log)), "zeroed": len(zeroed), "zeroed_bytes": sum(zeroed)}


def compared(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a run: how many requests have other tokens than the control, and where they part."""
    control = [answer.tokens for answer in found[CONTROL]["answers"]]
    rows = []
    for name, run in found.items():
        tokens = [answer.tokens for answer in run["answers"]]
        parts = [
            next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
            for a, b in zip(control, tokens, strict=True)
        ]
        rows.append({
            "run": name,
            "finished": sum(answer.outcome == "finished" for answer in run["answers"]),
            "changed": sum(a != b for a, b in zip(control, tokens, strict=True)),
            "first_other_token": parts,
            **{key: run[key] for key in ("loads", "zeroed", "zeroed_bytes", "seconds")},
        })  # fmt: skip
    return rows


def judge(rows: list[dict[str, Any]], trouble: list[str]) -> list[dict[str, Any]]:
    """Unchanged without damage, changed by every family's, each load zeroed, every request finished."""
    by_name = {row["run"]: row for row in rows}
    requests = by_name[CONTROL]["finished"]
    bounds = [
        results.bound("requests finished in the control", ">= 1", requests),
        results.bound("requests lost in the other runs", "<= 0", sum(requests - row["finished"] for row in rows)),
        results.bound("trouble in the log", "<= 0", len(trouble)),
        results.bound("retracts in the control", "<= 0", by_name[CONTROL]["loads"]),
        results.bound("requests changed in the control's repetition", "<= 0", by_name["control again"]["changed"]),
        results.bound("retracts with exact loads", ">= 1", by_name[NONE]["loads"]),
        results.bound("requests changed by exact loads", "<= 0", by_name[NONE]["changed"]),
    ]
    for family in FAMILIES:
        row = by_name[family]
        bounds.append(results.bound(f"requests changed by zeroing {family}", ">= 1", row["changed"]))
        bounds.append(results.bound(f"loads of zeroed {family}", ">= 1", row["zeroed"]))
        bounds.append(results.bound(f"loads without zeroed {family}", "<= 0", row["loads"] - row["zeroed"]))
    return bounds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for the servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--prompt", type=int, nargs="+", default=[2600, 3400, 4200], help="tokens of each request")
    parser.add_argument("--new-tokens", type=int, default=128, help="128 close every open 128-token block once")
    parser.add_argument("--interval", type=int, default=5, help="forward steps between forced retracts")
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=420, help="seconds for the servers to come up")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one request")
    parser.add_argument("--name", default="zero-family")
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    given = list(sys.argv[1:] if argv is None else argv)
    mine, server = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    arguments = parser.parse_args(mine)
    arguments.server, arguments.concurrency = server, 1
    return arguments


def main() -> int:
    """Exit status 1 when a bound is missed."""
    arguments = parse()
    found, trouble = run_all(arguments)
    rows = compared({name: run for name, run in found.items() if name != "warm-up"})
    for row in rows:
        print(row, flush=True)
    bounds = judge(rows, trouble)
    for entry in bounds:
        print(f"{'ok  ' if entry['ok'] else 'MISS'} {entry['name']}: {entry['value']} ({entry['bound']})")
    results.write(arguments.name, rows, bounds, arguments.out)
    return 0 if all(entry["ok"] for entry in bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
