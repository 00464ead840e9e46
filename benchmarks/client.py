"""Retracts one long request of a live server again and again: the server, its client, and a request that stays."""

import argparse
import contextlib
import itertools
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import CHECKOUT
from sglang_dsv4.bench import results
from sglang_dsv4.command_line import SECONDS
from sglang_dsv4.livetest import servers
from sglang_dsv4.livetest.in_server import environment
from sglang_dsv4.livetest.load import VOCABULARY

KEEPER = 64  # prompt of the request that stays: the engine never retracts the last one


class Client:
    """Asks one server; remembers when each token arrived."""

    def __init__(self, role: str, url: str, vocabulary: int) -> None:
        self.role, self.url, self.vocabulary, self.number = role, url, vocabulary, 0
        self.beside: dict[int, float] = {}  # the wall clock by number of tokens, of the request that stays

    @property
    def rid(self) -> str:
        return f"timed-{self.number}"

    def stay(self, stop: threading.Event) -> None:
        """Asks for the request that stays, until ``stop`` is set."""
        self.generate(KEEPER, 1 << 14, stop, self.beside)

    def generate(
        self, tokens: int, new_tokens: int, stop: threading.Event | None = None, into: dict[int, float] | None = None
    ) -> dict[int, float]:
        """Returns the wall clock by number of tokens generated; leaves early when ``stop`` is set.

        into: the mapping to use.
        """
        self.number += 1
        room = {
            "bootstrap_host": servers.FAKE_HOST, "bootstrap_port": servers.BOOTSTRAP_PORT,
            "bootstrap_room": self.number,
        }  # fmt: skip
        body = {
            "input_ids": prompt(tokens, self.number, self.vocabulary), "rid": self.rid,
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
            **(room if self.role == "decode" else {}),
        }  # fmt: skip
        arrived: dict[int, float] = {} if into is None else into
        for chunk in servers.stream(self.url, body):
            if "error" in chunk:
                raise RuntimeError(f"the server answered {chunk['error']}")
            arrived.setdefault(chunk["meta_info"]["completion_tokens"], time.time())
            if stop is not None and stop.is_set():
                break
        return arrived


def prompt(tokens: int, seed: int, vocabulary: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, vocabulary) for _ in range(tokens)]


@contextlib.contextmanager
def retracting(module: str, arguments: argparse.Namespace) -> Iterator[tuple[Client, Path]]:
    """Runs a decode server with ``module`` and a request that stays; yields client and notes. Raises ServerDied."""
    model, facts = model_of(arguments)
    notes = arguments.logs / arguments.name / "notes.jsonl"
    variables = {
        **environment(f"{module}:install", notes, folder=CHECKOUT),
        **servers.forced_retracts(arguments.interval),
    }
    words = [*room(arguments), *arguments.server]
    server = servers.launch("decode", str(model), words, variables, notes.parent)
    try:
        servers.wait_until_up([server], arguments.patience)
        client, stop = Client("decode", server.url, facts["vocab_size"]), threading.Event()
        keeper = threading.Thread(target=client.stay, args=(stop,), daemon=True)
        keeper.start()
        time.sleep(2)
        yield client, notes
        stop.set()
        keeper.join()
    finally:
        server.stop()


def add_requests(parser: argparse.ArgumentParser) -> None:
    """Adds the options of seeded requests, and of how long servers and answers are waited for."""
    parser.add_argument("--vocabulary", type=VOCABULARY, default=2000, help="tokens of prompts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=SECONDS, default=servers.PATIENCE, help="seconds for the servers to come up")
    parser.add_argument("--timeout", type=SECONDS, default=300, help="seconds for one request")


def model_of(arguments: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Returns the folder and the facts of ``--config`` with ``--experts``."""
    return write_model(arguments.config, arguments.logs / "model", arguments.experts)


def write_model(config: Path, folder: Path, experts: int | None = None) -> tuple[Path, dict[str, Any]]:
    """Writes a model folder of ``config``; returns it with the facts of its config. experts: as many routed ones."""
    facts = json.loads(config.read_text())
    if experts:
        facts["n_routed_experts"] = experts
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(facts, indent=1))
    return folder, facts


def room(arguments: argparse.Namespace) -> list[str]:
    """Returns server arguments that make the longest request fit beside the one that stays."""
    context = max(arguments.tokens) + (1 << 15)
    return ["--context-length", str(context), "--max-total-tokens", str(2 * context)]


def typical_gap(arrived: dict[int, float]) -> float:
    times = sorted(arrived.values())
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times)) * 1e3


def parser(about: str | None, name: str, tokens: tuple[int, ...], interval: int) -> argparse.ArgumentParser:
    """Returns the options of a benchmark that retracts one request."""
    made = results.parser(about, name)
    made.add_argument("--config", type=Path, required=True, help="config.json of the model")
    made.add_argument("--experts", type=int, help="routed experts that fit the card")
    made.add_argument("--tokens", type=int, nargs="+", default=tokens)
    made.add_argument("--repeats", type=int, default=3, help="requests of a length, after one to warm up")
    made.add_argument("--new-tokens", type=int, default=130)
    made.add_argument("--interval", type=int, default=interval, help="forward steps between forced retracts")
    made.add_argument("--chunk", type=int, default=16384, help="--chunked-prefill-size of the plain server")
    made.add_argument("--patience", type=float, default=420, help="seconds for a server to come up")
    return made
