"""Starts live servers, watches them, and ends them in every case.

A decode server with the fake transfer, or a prefill and a decode server on one GPU with the cache moving over NIXL, or
one plain server. Beside them the few requests that these servers take.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_dsv4 import command_line
from sglang_dsv4.bench import results
from sglang_dsv4.command_line import CommandError, folder

# Another first port for each set of servers on one machine; ``parse`` refuses one outside of PORTS_FREE.
GIVEN_BASE, USUAL_BASE, PORTS_FREE = os.environ.get("SERVERS_PORT", "30000"), 30000, range(23000, 65001)
BASE = int(GIVEN_BASE) if GIVEN_BASE.isdecimal() and int(GIVEN_BASE) in PORTS_FREE else USUAL_BASE
PATIENCE = 420  # seconds for servers to come up
HICACHE = "--enable-hierarchical-cache"
BOOTSTRAP_PORT = BASE - USUAL_BASE + 8998
FAKE_HOST = "2.2.2.2"  # the engine's name for a transfer that brings nothing
PORTS = {"plain": BASE, "decode": BASE + 10, "prefill": BASE + 20}
# What the reference machine's servers ran with; anything given on the command line comes later and wins.
DEFAULTS = (  # noqa: SIM905
    "--load-format dummy --skip-tokenizer-init --grammar-backend none --sampling-backend pytorch "
    "--attention-backend dsv4 --moe-runner-backend triton --kv-cache-dtype fp8_e4m3 --context-length 65536 "
    "--max-total-tokens 131072 --max-running-requests 16 --cuda-graph-max-bs-decode 16 --chunked-prefill-size 4096 "
    "--mem-fraction-static 0.4 --disable-shared-experts-fusion --mm-feature-transport cpu --skip-server-warmup"
).split()
PLAIN = ("--chunked-prefill-size", "512")  # the shapes of longer prefills compile for 20 s each


def defaults_for(model: str) -> list[str]:
    """Returns DEFAULTS; a folder with weights, or with a tokenizer, is served with them."""
    words = list(DEFAULTS)
    if any(Path(model).glob("*.safetensors")):
        at = words.index("--load-format")
        del words[at : at + 2]
    if (Path(model) / "tokenizer.json").is_file():
        words.remove("--skip-tokenizer-init")
    return words


end_when_told = command_line.end_when_told  # for programs that start servers


class ServerDied(CommandError):
    """Reports a server that ended, or did not come up; shows the end of its log."""

    status = 1


@dataclass
class Server:
    """Runs one launched server; ``log`` holds all it printed."""

    role: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def url(self) -> str:
        """Returns its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Returns whether the process runs."""
        return self.process.poll() is None

    def stop(self) -> int | None:
        """Sends SIGTERM, then SIGKILL for the whole group after 30 seconds; returns the exit status (None: killed)."""
        return stop_all([self])[self.role]

    def ended(self, patience: float) -> int | None:
        """Sends SIGKILL to the whole group after ``patience`` seconds; returns the exit status."""
        try:
            status = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            status = None
        self.kill()
        return status

    def suspend(self) -> None:
        """Suspends all its processes with their state: an idle server polls, which costs the others a core."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Resumes after ``suspend``; nothing to one that runs."""
        self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def awake(self) -> Iterator[Server]:
        """Wakes the server inside and suspends it outside."""
        self.wake()
        try:
            yield self
        finally:
            self.suspend()

    def kill(self) -> None:
        """Sends SIGKILL to the whole group, which outlives its first process."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, which: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, which)


def launch(
    role: str,
    model: str,
    arguments: Sequence[str],
    environment: dict[str, str],
    folder: Path,
    transfer: str = "fake",
    apart: int = 0,
) -> Server:
    """Starts one server: role plain, decode or prefill. ``environment`` comes on top of this process's.

    apart: added to the role's port, for several servers of one role.
    Raises ServerDied where another server has its port: the other would answer in its place.
    """
    port = PORTS[role] + apart
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ServerDied(f"port {port} has a server already: end it (suspended: SIGKILL), or set SERVERS_PORT")
    if importlib.util.find_spec("sglang") is None:
        raise ModuleNotFoundError("No module named 'sglang'", name="sglang")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, *defaults_for(model)]
    if role == "plain":
        command += PLAIN
    else:
        command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", transfer]
    if role == "prefill":
        command += ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT)]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    log = folder / f"{role}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ, **environment), start_new_session=True
        )
    return Server(role, port, process, log)


def forced_retracts(interval: int) -> dict[str, str]:
    """Returns the environment of a server that retracts every ``interval`` forward steps; 0: none forced."""
    return {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(interval)} if interval else {}


def stop_all(servers: Sequence[Server], patience: float = 30) -> dict[str, int | None]:
    """Stops them as ``Server.stop`` does, all at once, for each takes its time to drain; the exit status by role."""
    try:
        for server in servers:
            server.process.send_signal(signal.SIGTERM)
            server.wake()
        return {server.role: server.ended(patience) for server in servers}
    finally:  # an interrupted stop leaves none behind either
        for server in servers:
            server.kill()


def wait_until_up(servers: Sequence[Server], patience: float) -> None:
    """Waits until every server answers. Raises ServerDied when one ends or time is over."""
    deadline = time.monotonic() + patience
    waiting = list(servers)
    while waiting:
        if any(not server.alive for server in servers) or time.monotonic() > deadline:
            tails = "\n".join(
                f"--- {s.log}\n" + "\n".join(s.log.read_text(errors="replace").splitlines()[-25:]) for s in servers
            )
            raise ServerDied(f"{waiting[0].role} server is not up\n{tails}")
        waiting = [server for server in waiting if not answers(server.url)]
        time.sleep(1)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line by ``parser``, and where logs and results go; ``server``: the arguments behind ``--``,
    for servers.
    """
    parser.add_argument("--logs", type=folder, default="logs", help="folder of the servers' logs (logs)")
    results.add_out(parser)
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    arguments = parser.parse_args(given[:end], argparse.Namespace(server=given[end + 1 :]))
    if str(BASE) != GIVEN_BASE:
        parser.error(f"SERVERS_PORT={GIVEN_BASE!r}: needed: a port from {PORTS_FREE[0]} to {PORTS_FREE[-1]}")
    return arguments


def model_path(text: str) -> str:
    """Checks an argument that is a model for a server. A path must hold a config; else it is a name of a hub's."""
    path = Path(text).expanduser()
    if not (path / "config.json").is_file() and (path.is_absolute() or path.exists() or text.startswith(".")):
        raise argparse.ArgumentTypeError(f"{text[:200]}: no folder with a config.json")
    return text


def of_config(model: str, *names: str) -> list[int]:
    """Returns numbers of the config of the model in a folder here. Raises CommandError where it does not say them."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
        return [int(config[name]) for name in names]
    except (OSError, ValueError, LookupError, TypeError) as error:
        said = f"a folder with a config.json and its {', '.join(names)} is needed here ({error!r})"
        raise CommandError(f"--model-path {model}: {said}") from error


def ranks(given: Sequence[str]) -> int:
    """Returns the ranks of a server with these arguments that decide alike: those of one data-parallel rank."""
    known = parallel(given)
    return int(known.tp * known.pp // (known.dp if known.enable_dp_attention else 1))


def parallel(given: Sequence[str]) -> argparse.Namespace:
    """Returns ``tp``, ``pp``, ``dp`` and ``enable_dp_attention`` of a server with these arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", type=int, default=1, dest="tp")
    parser.add_argument("--pipeline-parallel-size", "--pp-size", "--pp", type=int, default=1, dest="pp")
    parser.add_argument("--data-parallel-size", "--dp-size", "--dp", type=int, default=1, dest="dp")
    parser.add_argument("--enable-dp-attention", action="store_true")  # they share the tensor-parallel ranks
    return parser.parse_known_args(list(given))[0]


def answers(url: str, timeout: float = 3) -> bool:
    """Returns whether a server is ready for requests."""
    return unreachable(url, timeout) is None


def unreachable(url: str, timeout: float = 3) -> str | None:
    """Returns why nothing at ``url`` is ready for requests; None where a server is."""
    try:
        urllib.request.urlopen(f"{url}/model_info", timeout=timeout).read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"no server answers there ({getattr(error, 'reason', error)})"
    return None


def checked_url(text: str) -> str:
    """Returns ``text`` without a slash at its end. Raises argparse.ArgumentTypeError where it is not http://HOST:PORT."""
    try:
        parts = urlsplit(text)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        fine = fine and text.isprintable() and not (parts.path.strip("/") or parts.query or parts.fragment)
    except ValueError:
        fine = False
    if not fine:
        raise argparse.ArgumentTypeError(f"{text}: not http://HOST:PORT")
    return text.rstrip("/")


def post(url: str, path: str, body: dict[str, Any], timeout: float = 600) -> Any:
    """Returns the JSON answer of one POST."""
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        text = answer.read().decode()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def flush(url: str, patience: float = 60) -> None:
    """Empties the prefix cache of an idle server, that on the host and its sessions too."""
    post(url, "/flush_cache?timeout=30", {}, patience)


def feed(url: str, body: dict[str, Any], timeout: float) -> None:
    """Sends a prefill server's part of a request; its errors are said, and show in the decode server's answer."""
    try:
        post(url, "/generate", body, timeout)
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"  prefill: {error}", flush=True)


def stream(
    url: str, body: dict[str, Any], timeout: float = 600, silence: float | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the chunks of one streamed /generate. With ``silence``, TimeoutError when a later one does not come in
    that time.

    Ending the iteration closes the connection, as a client that leaves does.
    """
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
    with contextlib.closing(connection):
        connection.request(
            "POST", "/generate", json.dumps(dict(body, stream=True)), {"Content-Type": "application/json"}
        )
        socket = connection.sock
        answer = connection.getresponse()
        if answer.status != HTTPStatus.OK:
            raise urllib.error.HTTPError(url, answer.status, answer.reason, answer.headers, answer)
        for line in answer:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                yield json.loads(line[6:])
                if silence is not None:
                    socket.settimeout(silence)
