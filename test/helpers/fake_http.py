"""Serves fake HTTP servers to the tests of live clients."""

from __future__ import annotations

import base64
import itertools
import json
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import prometheus_client
import pytest

from sglang_dsv4.livetest import servers
from sglang_dsv4.metrics import Counters, SessionCounters


class Handler(BaseHTTPRequestHandler):
    """Reads JSON bodies, writes the chunks of a stream, says nothing."""

    given: dict[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        """Returns the posted body; it may be asked for again."""
        if self.given is None:
            self.given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return self.given

    def begin(self, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()

    def chunk(self, content: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


LAYERS, EXPERTS = 6, 6  # of the tiny checkpoint; its first layer chooses by the token's id


def row_of(tokens: list[int]) -> list[int]:
    """Returns the experts that the last one of ``tokens`` chooses, layer by layer."""
    seeds = [tokens[-1], *(31 * sum(tokens) + 17 * layer for layer in range(1, LAYERS))]
    return [(seed + 40 * place) % 256 for seed in seeds for place in range(EXPERTS)]


class Decode(Handler):
    """Streams the answer, cumulatively or token by token; a room in ``bad`` is treated badly.

    A status is answered with it; "abort STATUS", "error STATUS" and "hang up" come behind the first token; "twice"
    sends that token twice, "short" leaves two out, "silent" sends none until ``over``.
    """

    cumulative = True
    over = threading.Event()
    facts: ClassVar[dict[str, Any]] = {}  # what each chunk tells besides
    bad: ClassVar[dict[int, str | int]] = {}

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """Returns these servers' answer behind ``prompt``."""
        return [sum(prompt) % 97 + i for i in range(count)]

    def choices(self, tokens: list[int], prompt: int) -> list[list[int]]:
        """Returns the recorded choices of ``tokens``. A decode server has seen no prompt: its rows are somebody's."""
        seen = prompt if "bootstrap_room" in self.body() else 0
        return [row_of(tokens[: end + 1]) if end >= seen else [1] * LAYERS * EXPERTS for end in range(len(tokens) - 1)]

    def encoded(self, tokens: list[int], prompt: int) -> str:
        """Returns ``choices`` as the engine sends them."""
        return base64.b64encode(array("i", itertools.chain(*self.choices(tokens, prompt)))).decode()

    def do_GET(self) -> None:
        self.begin()

    def do_POST(self) -> None:
        body = self.body()
        kind = self.bad.get(body.get("bootstrap_room", 0), "")
        self.begin(kind if isinstance(kind, int) else 200)
        if kind == "silent":
            self.over.wait(20)
        what, _, status = str(kind).partition(" ")
        count = body["sampling_params"]["max_new_tokens"] - (2 if kind == "short" else 0)
        tokens = self.answer(body["input_ids"], count)
        for end in range(1, count + 1):
            ids = tokens[:end] if self.cumulative else tokens[end - 1 : end]
            if kind == "twice" and (end == 2 or self.cumulative):
                ids = [tokens[0], *ids]
            meta = {"completion_tokens": end, "finish_reason": None, **self.facts}
            if end == 2 and what == "abort":
                meta["finish_reason"] = {"type": "abort", "message": "no host copy", "status_code": int(status)}
            if end == 2 and what == "error":
                self.chunk({"error": {"message": "no host copy", "code": int(status)}})
                return
            if end == 2 and what == "hang":
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if end == count and body.get("return_routed_experts"):
                meta["routed_experts"] = self.encoded([*body["input_ids"], *tokens], len(body["input_ids"]))
            self.chunk({"output_ids": ids, "meta_info": meta})
        self.wfile.write(b"data: [DONE]\n\n")


class Plain(Decode):
    """Answers as ``Decode`` does, and scores: -1 for a token of its own answer, -15 for another.

    What does not stream and asks for choices gets those of its prompt.
    """

    def do_POST(self) -> None:
        body = self.body()
        if body.get("return_routed_experts") and not body.get("stream"):
            self.begin()
            prompt, cached = body["input_ids"], 0 if body["extra_key"] else len(body["input_ids"])
            facts = {"routed_experts": self.encoded([*prompt, 0], len(prompt)), "cached_tokens": cached}
            self.wfile.write(json.dumps({"meta_info": facts}).encode())
            return
        if not body.get("return_logprob"):
            super().do_POST()
            return
        start = body["logprob_start_len"] + 1
        prompt, answer = body["input_ids"][:start], body["input_ids"][start:]
        values = self.scores(prompt, answer)
        self.begin()
        listed = [
            [None, prompt[-1], None],
            *([value, token, None] for value, token in zip(values, answer, strict=True)),
        ]
        facts = {"input_token_logprobs": listed, "cached_tokens": self.cached(prompt)}
        self.wfile.write(json.dumps({"meta_info": facts}).encode())

    def cached(self, prompt: list[int]) -> int:
        """Returns how many tokens of ``prompt`` the prefix cache has."""
        return 0

    def scores(self, prompt: list[int], answer: list[int]) -> list[float]:
        """Returns the log probability of each token of ``answer``."""
        return [-1.0 if a == b else -15.0 for a, b in zip(answer, self.answer(prompt, len(answer)), strict=True)]


# The log of a retract whose copy is loaded.
COPIED = """\
[t] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 9
[t] saved 700 tokens, 1.9 MB in 1.50 ms; copies alive 1, 0.30 of 1.00 GiB held
[t] loaded 700 tokens, 1.9 MB in 1.50 ms; copies alive 0, 0.00 of 1.00 GiB held
"""


def series(
    copies: int, rank: int = 0, held: int = 0, verified: bool = True, sessions: SessionCounters | None = None
) -> bytes:
    """Returns the metrics of one rank that made and loaded ``copies``; one more retract found stale weights.

    sessions: the counts of those that it keeps.
    """
    registry = prometheus_client.CollectorRegistry()
    labels = {"tp_rank": str(rank), "pp_rank": "0", "dp_rank": "0"}
    counters = Counters()
    counters.export(labels, registry)
    counters.set("arena_bytes", 2**30)
    for _ in range(copies):
        counters.saved(1000, 0.002)
        counters.loaded(1000, 0.004, verified)
    counters.add("fallbacks", 1, "StaleWeights")
    counters.holds(0, 2**29)
    counters.holds(0, held)
    if sessions is not None:
        told = SessionCounters()
        told.export(labels, registry)
        told.add("verified", sessions.verified)
        told.kept(sessions.saved_bytes, sessions.save_seconds)
        told.holds(sessions.points, sessions.held_bytes)
        for kind, hits in sessions.hits.items():
            for _ in range(hits):
                told.record_hit(kind, 900, 5000)
    return prometheus_client.generate_latest(registry)


@contextmanager
def running(handler: type[Handler]) -> Iterator[str]:
    """Yields the address of a server of ``handler``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def play_servers(monkeypatch: pytest.MonkeyPatch, launch: Callable[..., Any]) -> None:
    """Has ``launch`` start servers, each of which is up at once, and leaves signals as they are."""
    for name, played in (("launch", launch), ("wait_until_up", lambda *_: None), ("end_when_told", lambda: None)):
        monkeypatch.setattr(servers, name, played)
