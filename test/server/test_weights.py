"""Updates the weights while requests are retracted: their copies are not used, and nothing is lost.

A prefill and a decode server on one GPU (NIXL), the decode cache too small for the load, DSV4_VERIFY=1. Whenever a copy
is alive, both servers are paused, both get another final norm, and both go on: a copy made before is stale, and the
engine's own recompute must serve its request.
"""

import base64
import contextlib
import pickle
import threading
import time
import urllib.error
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch

from sglang_dsv4.bench import results
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.load import Load, Run
from sglang_dsv4.livetest.retract_stats import read_log

UPDATES = 3
SMALL_CACHE = ["--max-total-tokens", "16384", "--swa-full-tokens-ratio", "0.5", "--num-reserved-decode-tokens", "16"]


def new_norm(width: int, value: float) -> str:
    """The final norm's weight, as the engine's endpoint takes tensors: pickled, in base64, one string a rank."""
    named = [("model.norm.weight", torch.full((width,), value, dtype=torch.bfloat16))]
    return base64.b64encode(pickle.dumps(named)).decode()


@contextlib.contextmanager
def session(server: servers.Server) -> Iterator[None]:
    """The newest release takes weights between these two calls alone; an older one may not have them."""
    try:
        servers.post(server.url, "/begin_weight_update", {}, 60)
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise
        yield
        return
    yield
    servers.post(server.url, "/end_weight_update", {}, 60)


def update(started: list[servers.Server], width: int, value: float, decode_log: Path) -> bool:
    """Pause, give each final norm weight ``value``, go on. Returns whether a copy was alive meanwhile."""
    for server in started:
        servers.post(server.url, "/pause_generation", {"mode": "in_place"}, 30)
    try:
        time.sleep(0.3)  # the pause takes effect between two batches
        alive = read_log(decode_log)["copies_alive_at_end"] > 0
        body = {"serialized_named_tensors": [new_norm(width, value)], "load_format": "direct", "flush_cache": False}
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
    """Updates whenever a copy is alive, ``most`` times; ``done`` gets one entry an update."""
    log = next(server.log for server in started if server.role == "decode")
    while len(done) < most and not stop.wait(0.05):
        if read_log(log)["copies_alive_at_end"] and update(started, width, 1 + len(done) / 8, log):
            done.append(True)
            stop.wait(2)


def judge(updates: int, wanted: int, summary: dict[str, Any], log: dict[str, Any], alive: bool) -> list[dict[str, Any]]:
    return [
        results.bound("updates while a copy was alive", f">= {wanted}", updates),
        results.bound("copies that were not used", ">= 1", log["saves"] - log["loads"]),
        results.bound("counted as stale weights", ">= 1", log["fallbacks"].get("StaleWeights", 0)),
        results.bound("requests without a whole answer", "<= 0", summary["asked"] - summary["whole"]),
        results.bound("copies alive at the end", "<= 0", log["copies_alive_at_end"]),
        results.bound("trouble in the log", "<= 0", len(log["trouble"])),
        results.bound("servers alive at the end", ">= 1", int(alive)),
    ]


def test_stale_copies_are_computed_again(start, arguments, require):
    environment = {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models",
        "DSV4_VERIFY": "1",
        "SGLANG_HOST_IP": "127.0.0.1",
    }
    started = [
        start("prefill", ["--chunked-prefill-size", "512"], environment, transfer="nixl"),
        start("decode", SMALL_CACHE, environment, transfer="nixl"),
    ]
    servers.wait_until_up(started, servers.PATIENCE)
    prefill, decode = started
    run = Run(Load.of(arguments), arguments, decode.url, prefill.url, 1)
    stop, done, width = threading.Event(), list[bool](), servers.of_config(arguments.model, "hidden_size")[0]
    updater = threading.Thread(target=keep_updating, args=(started, width, UPDATES, stop, done), daemon=True)
    updater.start()
    run.execute("weights")
    stop.set()
    updater.join()
    time.sleep(2)
    alive, log, summary = all(server.alive for server in started), read_log(decode.log), run.summary()
    rows = [{"run": "weights updated", "updates": len(done), **summary, **log}]
    require(rows, judge(len(done), UPDATES, summary, log, alive))
