"""The weights are updated while requests are retracted: their copies must not be used, and nothing may be lost.

    sglang-dsv4 drill weights --model-path MODEL [-- server arguments]

A prefill and a decode server on one GPU (NIXL), the decode cache too small for the load, DSV4_VERIFY=1. Whenever a copy
is alive, both servers are paused, both get another final norm, and both go on: a copy made before is stale, and the
engine's own recompute must serve its request.
Exit status 1 on any loss, mismatch or leak, or when no copy was stale.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_dsv4.bench import results
from sglang_dsv4.command_line import COUNT, SECONDS
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Load, Run
from sglang_dsv4.livetest.retract_stats import read_log

SMALL_CACHE = ["--max-total-tokens", "16384", "--swa-full-tokens-ratio", "0.5", "--num-reserved-decode-tokens", "16"]


def new_norm(width: int, value: float) -> str:
    """The final norm's weight, as the engine's endpoint takes tensors: pickled, in base64, one string a rank."""
    named = [("model.norm.weight", torch.full((width,), value, dtype=torch.bfloat16))]
    return base64.b64encode(pickle.dumps(named)).decode()


@contextlib.contextmanager
def session(server: servers.Server) -> Iterator[None]:
    """The engine takes weights between these two calls alone."""
    servers.post(server.url, "/begin_weight_update", {}, 60)
    yield
    servers.post(server.url, "/end_weight_update", {}, 60)


def update(started: list[servers.Server], tensors: str, decode_log: Path) -> bool:
    """Pause, change the weights, go on. Returns whether a copy was alive meanwhile."""
    for server in started:
        servers.post(server.url, "/pause_generation", {"mode": "in_place"}, 30)
    try:
        time.sleep(0.3)  # the pause takes effect between two batches
        alive = read_log(decode_log)["copies_alive_at_end"] > 0
        body = {"serialized_named_tensors": [tensors], "load_format": "direct", "flush_cache": False}
        for server in started if alive else ():
            with session(server):
                answer = servers.post(server.url, "/update_weights_from_tensor", body, 60)
            if not answer["success"]:
                raise RuntimeError(f"{server.role} did not update its weights: {answer['message']}")
    finally:
        for server in started:
            servers.post(server.url, "/continue_generation", {}, 30)
    return alive


def keep_updating(
    started: list[servers.Server], width: int, most: int, stop: threading.Event, done: list[bool]
) -> None:
    """Update whenever a copy is alive, ``most`` times; ``done`` gets one entry an update."""
    log = next(server.log for server in started if server.role == "decode")
    while len(done) < most and not stop.wait(0.05):
        if read_log(log)["copies_alive_at_end"] and update(started, new_norm(width, 1 + len(done) / 8), log):
            done.append(True)
            stop.wait(2)


def judge(updates: int, wanted: int, summary: dict[str, Any], log: dict[str, Any], alive: bool) -> list[dict[str, Any]]:
    """The bounds of the drill."""
    return [
        results.bound("updates while a copy was alive", f">= {wanted}", updates),
        results.bound("copies that were not used", ">= 1", log["saves"] - log["loads"]),
        results.bound("counted as stale weights", ">= 1", log["fallbacks"].get("StaleWeights", 0)),
        results.bound("requests lost or refused", "<= 0", summary["lost"] + summary["refused"]),
        results.bound("copies alive at the end", "<= 0", log["copies_alive_at_end"]),
        results.bound("trouble in the log", "<= 0", len(log["trouble"])),
        results.bound("servers alive at the end", ">= 1", int(alive)),
    ]


def main(argv: Sequence[str]) -> int:
    """Exit status 1 when a bound is missed."""
    parser = results.parser(__doc__, "drill-weights", prog="sglang-dsv4 drill weights")
    parser.add_argument("--model-path", type=servers.model_path, required=True)
    parser.add_argument("--requests", type=COUNT, default=150)
    parser.add_argument("--updates", type=COUNT, default=3)
    parser.add_argument("--patience", type=SECONDS, default=300)
    arguments = servers.parse(parser, argv)
    servers.end_when_told()
    arguments.prompt, arguments.new_tokens, arguments.vocabulary, arguments.seed = (200, 1500), (300, 800), 1500, 1
    arguments.concurrency, arguments.timeout = 16, 60
    environment = {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models", "DSV4_VERIFY": "1", "SGLANG_HOST_IP": "127.0.0.1",
    }  # fmt: skip
    width = servers.hidden_size(arguments.model_path)
    folder, started, done = arguments.logs / arguments.name, [], list[bool]()
    try:
        for role, extra in (("prefill", ["--chunked-prefill-size", "512"]), ("decode", SMALL_CACHE)):
            given = [*extra, *arguments.server]
            started.append(servers.launch(role, arguments.model_path, given, environment, folder, "nixl"))
        servers.wait_until_up(started, arguments.patience)
        run = Run(Load.of(arguments), arguments, started[1].url, started[0].url, 1)
        stop = threading.Event()
        updater = threading.Thread(
            target=keep_updating, args=(started, width, arguments.updates, stop, done), daemon=True
        )
        updater.start()
        run.execute(arguments.name)
        stop.set()
        updater.join()
        time.sleep(2)
        alive = all(server.alive for server in started)
    finally:
        statuses = servers.stop_all(started)
    log, summary = read_log(started[1].log), run.summary()
    bounds = judge(len(done), arguments.updates, summary, log, alive)
    rows = [{"run": "weights updated", "updates": len(done), **summary, **log, "exit": statuses}]
    results.show(rows)
    return results.finish(arguments, rows, bounds)
