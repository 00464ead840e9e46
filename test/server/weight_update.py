"""Updates the weights of running servers while they are paused."""

from __future__ import annotations

import base64
import contextlib
import pickle
import time
import urllib.error
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import torch

from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.retract_stats import read_log


def new_norm(width: int, value: float) -> str:
    """The final norm's weight, as the engine's endpoint takes tensors: pickled, in base64, one string a rank."""
    named = [("model.norm.weight", torch.full((width,), value, dtype=torch.bfloat16))]
    return base64.b64encode(pickle.dumps(named)).decode()


@contextlib.contextmanager
def session(server: servers.Server) -> Iterator[None]:
    """0.5.23 takes weights between these two calls alone; 0.5.17 does not have them."""
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
