"""Servers: one alone, or a decode server with its prefill server; one request to them, and what they state."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import socket
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gsm8k.errors import Refused, RequestFailed
from gsm8k.questions import STOP, digest

PROBE_SECONDS = 10.0
SERVER_FACTS = ("model_path", "version", "disaggregation_mode")
# Straight to the server: a proxy from the environment has no business between the two.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Endpoint:
    """A server, or a decode server with the prefill server that feeds it. ``flag`` is what named it."""

    flag: str
    url: str
    prefill_url: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None


@dataclass(frozen=True)
class Asking:
    """How each question is asked; ``timeout`` is in seconds."""

    api: str
    model: str
    max_new_tokens: int
    timeout: float
    keep_text: bool


def reach(url: str, flag: str) -> None:
    """Refuse a server that takes no connection."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), PROBE_SECONDS).close()
    except OSError as error:
        raise Refused(f"{flag} {url}: not reachable: {error}") from error


def facts(endpoint: Endpoint) -> dict[str, Any]:
    """What the server states about itself; nothing where it does not."""
    try:
        stated = call(f"{endpoint.url}/server_info", None, PROBE_SECONDS)
    except RequestFailed:
        return {}
    if not isinstance(stated, dict):
        return {}
    found = {name: stated[name] for name in SERVER_FACTS if name in stated}
    return found | ({"model_path": Path(found["model_path"]).name} if "model_path" in found else {})


def call(url: str, body: dict[str, Any] | None, timeout: float) -> Any:
    """The decoded JSON reply to ``body``, or to a GET without one; ``timeout`` in seconds."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with OPENER.open(request, timeout=timeout) as reply:
            return json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            detail = error.read(300).decode(errors="replace")
            raise RequestFailed(f"HTTP {error.code}: {detail}") from error
        raise RequestFailed(f"HTTP {error.code}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error


def native_body(prompt: str, asking: Asking) -> dict[str, Any]:
    """What /generate takes."""
    sampling = {"temperature": 0, "max_new_tokens": asking.max_new_tokens, "stop": [STOP]}
    return {"text": prompt, "sampling_params": sampling}


def openai_body(prompt: str, asking: Asking) -> dict[str, Any]:
    """What /v1/completions takes."""
    return {
        "model": asking.model, "prompt": prompt, "temperature": 0, "max_tokens": asking.max_new_tokens, "stop": [STOP],
    }  # fmt: skip


def parse_native(reply: Any) -> tuple[str, str | None, int | None]:
    """Text, why it ended, completion tokens."""
    meta = reply.get("meta_info") or {}
    return reply["text"], (meta.get("finish_reason") or {}).get("type"), meta.get("completion_tokens")


def parse_openai(reply: Any) -> tuple[str, str | None, int | None]:
    """Text, why it ended, completion tokens."""
    choice = reply["choices"][0]
    return choice["text"], choice.get("finish_reason"), (reply.get("usage") or {}).get("completion_tokens")


APIS = {
    "native": ("/generate", native_body, parse_native),
    "openai": ("/v1/completions", openai_body, parse_openai),
}


def generate(endpoint: Endpoint, prompt: str, asking: Asking) -> dict[str, Any]:
    """Text, finish and completion_tokens of one prompt; raises RequestFailed."""
    path, body_of, parse = APIS[asking.api]
    body = body_of(prompt, asking)
    found: dict[str, Any] = {}
    prefill = None
    if endpoint.prefill_url:
        body |= {"bootstrap_host": endpoint.bootstrap_host, "bootstrap_port": endpoint.bootstrap_port}
        body["bootstrap_room"] = secrets.randbelow(2**63)

        def feed() -> None:
            try:
                call(f"{endpoint.prefill_url}{path}", body, asking.timeout)
            except RequestFailed as error:
                found["prefill_error"] = str(error)

        prefill = threading.Thread(target=feed, daemon=True)
        prefill.start()
    try:
        reply = call(f"{endpoint.url}{path}", body, asking.timeout)
    except RequestFailed as error:
        if prefill:
            prefill.join(1.0)
        if "prefill_error" in found:
            raise RequestFailed(f"{error}; prefill: {found['prefill_error']}") from error
        raise
    if prefill:
        prefill.join(asking.timeout)
    try:
        text, finish, tokens = parse(reply)
        digest(text)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise RequestFailed(f"the reply holds no text: {json.dumps(reply)[:300]}") from error
    if finish == "abort":
        raise RequestFailed(f"aborted by the server: {json.dumps(reply)[-300:]}")
    found |= {"completion_tokens": tokens} if isinstance(tokens, int) else {}
    return {"text": text, "finish": finish, **found}
