#!/usr/bin/env python3
"""Forced (or real) retracts on a live server: nothing lost, every resume exact, tokens as without retracts.

    python3 scripts/stress_retract.py --model-path MODEL --transfer fake --requests 500 --interval 6
    python3 scripts/stress_retract.py --model-path MODEL --transfer nixl --compare      # real cache, tokens compared
    python3 scripts/stress_retract.py --attach URL [--prefill-url URL] [--log FILE]     # servers that run already

The servers are started and stopped here, with the package, DSV4_VERIFY=1 and metrics; arguments after -- go to them.
fake: one decode server; the transfer brings no cache, so tokens mean nothing. nixl: a prefill and a decode server on
one GPU. --compare: the same requests run three times, without retracts twice (the control: batches differ from run to
run, and rounding with them) and with retracts once.
--stock runs the engine as it is. --attach: a decode server that runs already is neither started nor stopped and keeps
its settings (DSV4_VERIFY; SGLANG_TEST_RETRACT, without which it retracts only under real pressure). What it did is read
from its metrics (--enable-metrics), its log, or both, so no other requests should be there; that loads are compared
(--verify 1) only the metrics tell.
Exit status 1 on any loss, mismatch or leak.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import results
import servers
from gsm8k.errors import Refused
from load import STALLED, Answer, Load, Run
from run_gsm8k import check_url
from witness import Witness, counted_at, read_log, together


def stall_ms(answers: list[Answer], retracts: int) -> float:
    """What a retract costs its request: the median of the longest gaps between two tokens, one for each retract."""
    longest = sorted((gap for answer in answers for gap in answer.gaps_ms), reverse=True)[:retracts]
    return statistics.median(longest) if longest else 0.0


def same_tokens(first: Run, second: Run) -> dict[str, Any]:
    """How many requests have identical tokens, and how long the common beginnings are."""
    same, shares = 0, []
    for a, b in zip(first.answers, second.answers, strict=True):
        same += a.tokens == b.tokens and a.outcome == b.outcome == "finished"
        common = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), len(a.tokens))
        shares.append(common / max(1, len(a.tokens)))
    return {"same": same, "of": len(shares), "common_beginning": statistics.mean(shares)}


def serve_and_run(arguments: argparse.Namespace, load: Load, name: str, interval: int, times: int) -> dict[str, Any]:
    """Start the servers, run the load ``times`` times, stop them; runs, summaries and the log's story."""
    folder = arguments.logs / name
    environment = {"SGLANG_HOST_IP": "127.0.0.1"}
    if arguments.stock:
        environment["DSV4_ENABLED"] = "0"
    else:
        environment |= {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models", "DSV4_VERIFY": str(arguments.verify)}
    decode_environment = dict(environment)
    if interval:
        decode_environment |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(interval)}
    started = []
    try:
        if arguments.transfer == "nixl":
            started.append(
                servers.launch("prefill", arguments.model_path, arguments.server, environment, folder, "nixl")
            )
        watched = arguments.server if arguments.stock else ["--enable-metrics", *arguments.server]
        decode = servers.launch("decode", arguments.model_path, watched, decode_environment, folder, arguments.transfer)
        started.append(decode)
        servers.wait_until_up(started, arguments.patience)
        prefill = started[0].url if arguments.transfer == "nixl" else None
        runs = []
        for number in range(times):
            room = 1 + number * len(load.prompts)
            runs.append(Run(load, arguments, decode.url, prefill, room).execute(f"{name} {number + 1}/{times}"))
        time.sleep(2)
        alive = all(server.alive for server in started)
        counted = counted_at(decode.url)
    finally:
        statuses = servers.stop_all(started)
    return {
        "runs": runs,
        "summaries": [run.summary() for run in runs],
        "log": together(counted, read_log(decode.log)),
        "alive": alive,
        "exit": statuses,
    }


def attach_and_run(arguments: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Run the load once over servers that run already; as ``serve_and_run``. Raises LookupError as ``Witness`` does."""
    witness = Witness(arguments.attach, arguments.log)
    room = time.time_ns() // 1000  # no run before has used these
    given = (arguments.attach, arguments.prefill_url, room, arguments.bootstrap_port or servers.BOOTSTRAP_PORT)
    run = Run(load, arguments, *given).execute(arguments.name)
    time.sleep(2)
    alive = servers.answers(arguments.attach, STALLED)
    return {"runs": [run], "summaries": [run.summary()], "log": witness.tell(), "alive": alive, "exit": {}}


def judge(found: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The bounds of a run with retracts."""
    log, summary = found["log"], found["summaries"][0]
    bounds = [
        results.bound("requests lost", "<= 0", summary["lost"]),
        results.bound("requests refused", f"<= {arguments.may_refuse}", summary["refused"]),
        results.bound("server alive at the end", ">= 1", int(found["alive"])),
        results.bound("retracts with a copy", f">= {arguments.at_least}", log["saves"]),
        results.bound("copies alive at the end", "<= 0", log["copies_alive_at_end"]),
        results.bound("ranks that said what they decided", f">= {servers.ranks(arguments.server)}", log["ranks"]),
        results.bound("ranks that decided otherwise than the first", "<= 0", log["ranks_apart"]),
    ]
    if arguments.falls_back:
        reason = arguments.falls_back
        number = log["fallbacks"].get(reason, 0)
        bounds.append(results.bound(f"retracts without a copy because of {reason}", ">= 1", number))
    if not arguments.stock and not arguments.attach:
        bounds.append(results.bound("metrics of this package", ">= 1", int("held_bytes_at_end" in log)))
    if "held_bytes_at_end" in log:
        bounds.append(results.bound("host memory held at the end, bytes", "<= 0", log["held_bytes_at_end"]))
    if "trouble" in log:  # only a log tells
        bounds.append(results.bound("trouble in the log", "<= 0", len(log["trouble"])))
    if arguments.verify and not arguments.stock:
        not_compared = log["loads"] - log.get("verified", 0)
        bounds.append(results.bound("loads not compared with their copy", "<= 0", not_compared))
    if os.environ.get("DSV4_PREP") == "stream" and not (arguments.attach or arguments.stock):
        bounds.append(results.bound("eager steps prepared here", ">= 1", sum(log.get("prep_steps", {}).values())))
    if not arguments.may_refuse:
        bounds.append(results.bound("saves without a load", "<= 0", abs(log["saves"] - log["loads"])))
    return bounds


def judge_tokens(with_retracts: dict[str, Any], control: dict[str, Any]) -> list[dict[str, Any]]:
    """Retracts change no more answers than a repetition does; and the repetition repeats enough to tell."""
    slack = 2 * (control["of"] * 0.25) ** 0.5  # two standard deviations of a count, at most
    return [
        results.bound("requests that the control repeats, enough to compare", f">= {3 * slack:.0f}", control["same"]),
        results.bound("requests with the tokens of the control", f">= {control['same'] - slack:.0f}",
                      with_retracts["same"]),
    ]  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what follows ``--`` is for the servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model-path", help="start servers of this model")
    where.add_argument("--attach", metavar="URL", help="a decode server that runs, with the fake transfer")
    parser.add_argument("--prefill-url", metavar="URL", help="with --attach: the prefill server beside it")
    parser.add_argument("--bootstrap-port", type=int, help=f"that server's (default: {servers.BOOTSTRAP_PORT})")
    parser.add_argument("--log", type=Path, metavar="FILE", help="with --attach: the log that the decode server writes")
    parser.add_argument("--transfer", choices=("fake", "nixl"), default="fake")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument(
        "--interval", type=int, default=20, help="forward steps between forced retracts; 0: none forced"
    )
    parser.add_argument("--prompt", type=int, nargs=2, default=(30, 2500), help="shortest and longest prompt")
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(40, 200))
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verify", type=int, choices=(0, 1), default=1)
    parser.add_argument("--compare", action="store_true", help="also run without retracts, twice, and compare tokens")
    parser.add_argument("--stock", action="store_true", help="the engine without this package")
    parser.add_argument("--may-refuse", type=int, default=0, help="requests that may be answered with an error")
    parser.add_argument("--falls-back", metavar="REASON", help="some retract must find no host copy for this reason")
    parser.add_argument("--at-least", type=int, default=1, help="retracts that there must be")
    parser.add_argument("--patience", type=float, default=420, help="seconds for the servers to come up")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one request")
    parser.add_argument("--name", default="stress")
    arguments = servers.parse(parser, argv)
    if arguments.attach and (arguments.compare or arguments.stock or arguments.server):
        parser.error("--compare, --stock and arguments after -- are for servers started here, not for --attach")
    if not arguments.attach and (arguments.prefill_url or arguments.log or arguments.bootstrap_port):
        parser.error("--prefill-url, --bootstrap-port and --log belong to --attach")
    try:
        arguments.attach = check_url(arguments.attach, "--attach")
        arguments.prefill_url = check_url(arguments.prefill_url, "--prefill-url")
    except Refused as error:
        parser.error(str(error))
    return arguments


def main() -> int:
    """Exit status 1 when a bound is missed, 2 when a server to attach to says nothing of retracts."""
    arguments = parse()
    servers.end_when_told()
    load = Load.of(arguments)
    rows: list[dict[str, Any]] = []
    if arguments.attach:
        try:
            found = attach_and_run(arguments, load)
        except LookupError as error:
            print(error, file=sys.stderr)
            return 2
    else:
        found = serve_and_run(arguments, load, f"{arguments.name}-retracts", arguments.interval, 1)
    stall = stall_ms(found["runs"][0].answers, found["log"]["engine_retracts"])
    rows.append(
        {"run": "retracts", **found["summaries"][0], "stall_p50_ms": stall, **found["log"], "exit": found["exit"]}
    )
    bounds = judge(found, arguments)
    if arguments.compare:
        control = serve_and_run(arguments, load, f"{arguments.name}-control", 0, 2)
        rows += [{"run": f"control {i + 1}", **summary} for i, summary in enumerate(control["summaries"])]
        with_retracts = same_tokens(control["runs"][0], found["runs"][0])
        without = same_tokens(*control["runs"])
        rows.append({"run": "tokens", "with_retracts": with_retracts, "control": without})
        bounds += judge_tokens(with_retracts, without)
    for row in rows:
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    results.write(arguments.name, rows, bounds, arguments.out)
    return results.status(bounds)


if __name__ == "__main__":
    sys.exit(main())
