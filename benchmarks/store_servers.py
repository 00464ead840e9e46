"""Starts servers whose cache outlives them: in a folder, or in a Mooncake memory that is started here, too."""

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.client import add_requests
from benchmarks.session_agents import LONG, WITH_HICACHE, Agents, server_words
from sglang_dsv4.bench import results
from sglang_dsv4.command_line import CONCURRENCY, COUNT, folder, number, readable_file
from sglang_dsv4.livetest import score, servers
from sglang_dsv4.livetest.load import warm_up

OURS, PEER = "with a store", "stock with HiCache's files"
QUIET, WRITES = 2.0, 120  # seconds without a written byte that end all writes; most seconds that they take
READERS, MEASURED = 8, 500  # plain reads of a disk at a time, and files
WARM_UP_CONTEXT, TURNS = 16384, 4  # tokens; turns for which a context has room
SEGMENT = "16 GB"  # of a Mooncake store
HOST, WORD = "127.0.0.1", "P2PHANDSHAKE"
PACKAGE = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_dsv4.models"}

# ---------------------------------------------------------------------- the store


def files(objects: Path | None) -> list[Path]:
    """Returns the files of a store, none of one that is not in files."""
    return sorted(filter(Path.is_file, objects.rglob("*"))) if objects else []


def bytes_of(objects: Path | None) -> int:
    """Counts the bytes of a store's files."""
    total = 0
    for path in files(objects):
        with contextlib.suppress(FileNotFoundError):  # it was being written, and has its name by now
            total += path.stat().st_size
    return total


def store_lines(url: str) -> list[str]:
    """Returns what a server's metrics say of its store."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        return [line for line in answer.read().decode().splitlines() if line.startswith("sglang_dsv4_store_")]


def settle(server: servers.Server, objects: Path | None) -> None:
    """Returns when the store has written nothing for a while. Raises ServerDied where it never ends."""
    before, since, deadline = None, time.monotonic(), time.monotonic() + WRITES
    while True:
        state, now = bytes_of(objects) if objects else store_lines(server.url), time.monotonic()
        if state != before:
            before, since = state, now
        elif now > since + QUIET:
            return
        if now > deadline:
            raise servers.ServerDied(f"{server.log}: the store still writes after {WRITES} s")
        time.sleep(QUIET / 10)


def drop_cache(objects: Path | None) -> None:
    """Drops the files from the page cache. Only what is on the disk leaves it, so they are written before."""
    for path in files(objects):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_rate(objects: Path | None) -> float:
    """Returns GB/s of plain reads of the files, several at a time, none of them in the page cache."""
    drop_cache(objects)
    paths = list(itertools.islice(files(objects), MEASURED))
    start = time.perf_counter()
    with ThreadPoolExecutor(READERS) as readers:
        nbytes = sum(readers.map(lambda path: len(path.read_bytes()), paths))
    rate = nbytes / (time.perf_counter() - start) / 1e9
    drop_cache(objects)
    return rate


def spoil(objects: Path, seed: int) -> int:
    """Damages a third of the files: a bit flipped, cut in half, or another's content; returns how many."""
    paths, draw = files(objects), random.Random(seed)
    bad = draw.sample(paths, len(paths) // 3)
    good = sorted({*paths} - {*bad})
    for path, how in zip(bad, itertools.cycle(("flip", "cut", "swap")), strict=False):
        content = bytearray(path.read_bytes())
        if how == "flip":
            content[draw.randrange(len(content) // 2)] ^= 1  # of the payload: what proves it lies behind
        elif how == "cut":
            del content[len(content) // 2 :]
        else:
            content[:] = draw.choice(good).read_bytes()
        path.write_bytes(content)
    return len(bad)


def in_files(stack: contextlib.ExitStack, arguments: argparse.Namespace, name: str) -> Path:
    """Returns an empty folder for objects, which is removed at the end."""
    objects: Path = (arguments.folder or arguments.logs / arguments.name / "objects").resolve() / name
    shutil.rmtree(objects, ignore_errors=True)
    objects.mkdir(mode=0o700, parents=True)
    stack.callback(shutil.rmtree, objects, ignore_errors=True)
    return objects


def in_mooncake(stack: contextlib.ExitStack, arguments: argparse.Namespace) -> dict[str, str]:
    """Starts a master, and the process that has the memory: a server's would die with it. Returns the settings."""
    port, logs = servers.BASE - servers.USUAL_BASE + 50051, arguments.logs / arguments.name
    master = f"{HOST}:{port}"
    commands = (  # a suspended server must not be taken for one that is gone
        ["mooncake_master", f"--rpc_port={port}", f"--metrics_port={port + 1}", "--client_ttl=600"],
        ["mooncake_client", f"--host={HOST}", f"--port={port + 2}", f"--master_server_address={master}",
         f"--metadata_server={WORD}", f"--global_segment_size={SEGMENT}"],
    )  # fmt: skip
    logs.mkdir(parents=True, exist_ok=True)
    for name, *words in commands:
        program = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if program is None:
            raise servers.ServerDied(f"no {name}: pip install mooncake-transfer-engine")
        with (logs / f"{name}.log").open("wb") as log:
            command = [program, *words, "-logtostderr"]
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        stack.callback(process.wait)
        stack.callback(os.killpg, process.pid, signal.SIGKILL)  # it may be a script, whose child does the work
        time.sleep(QUIET)  # the second one needs the first
    config = {"master_server_address": master, "metadata_server": WORD, "protocol": "tcp",
              "local_hostname": HOST, "global_segment_size": 0}  # fmt: skip
    return {"DSV4_STORE": "mooncake", "DSV4_STORE_CONFIG": json.dumps(config)}


# ---------------------------------------------------------------------- servers


class Way(NamedTuple):
    """Describes how a server is started."""

    name: str
    words: Sequence[str]
    variables: Mapping[str, str]
    objects: Path | None  # the folder of its store; None: it is not in files
    apart: int  # of its port


def ours(
    arguments: argparse.Namespace, store: Mapping[str, str] | Path, name: str = OURS, apart: int = 0, **more: str
) -> Way:
    """Returns a server that keeps sessions, with a store in a folder or by settings. more: its environment."""
    objects = store if isinstance(store, Path) else None
    settings = {"DSV4_STORE": str(store)} if isinstance(store, Path) else store
    keeps = {"DSV4_ENABLED": "1", "DSV4_SESSIONS": "auto", "DSV4_HOST_GB": str(arguments.host_gb)}
    words = [*server_words(arguments), *arguments.server]
    return Way(name, words, {**PACKAGE, **keeps, **settings, **more}, objects, apart)


def hicache(arguments: argparse.Namespace, objects: Path) -> Way:
    """Returns stock with HiCache over the engine's file backend."""
    words = [*server_words(arguments), *WITH_HICACHE, "--hicache-storage-backend", "file", *arguments.server]
    variables = {**PACKAGE, "DSV4_ENABLED": "0", "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(objects)}
    return Way(PEER, words, variables, objects, score.APART)


def start(
    stack: contextlib.ExitStack, ways: Sequence[Way], arguments: argparse.Namespace, life: int = 0
) -> list[servers.Server]:
    """Starts a server of each way, warm and suspended. life: which one of theirs; each is warmed up by new prompts."""
    up = []
    for way in ways:
        logs = arguments.logs / f"{arguments.name}-{way.apart}-{life}"
        up.append(servers.launch("plain", arguments.model_path, way.words, way.variables, logs, apart=way.apart))
        stack.callback(up[-1].stop)
    servers.wait_until_up(up, arguments.patience)
    warm_up([server.url for server in up], arguments.vocabulary, arguments.timeout)
    for way, server in zip(ways, up, strict=True):  # some shapes of later turns compile here
        agents = Agents(2, min(arguments.tokens, WARM_UP_CONTEXT), -1 - life - way.apart, arguments)
        for _ in range(2):
            agents.turn(server.url, agents.order(), f"{way.name}, warm-up")
        settle(server, way.objects)
        server.suspend()
    return up


# ---------------------------------------------------------------------- the command line


def options(about: str | None, scenes: Sequence[str] = (), name: str = "store-SCENE") -> argparse.ArgumentParser:
    """Returns the options of the benchmarks of a store. scenes: of one with several."""
    parser = results.parser(about, name)
    if scenes:
        parser.add_argument("--scene", choices=scenes, required=True)
    parser.add_argument("--config", type=readable_file, required=True, help="config.json of the model")
    parser.add_argument("--experts", type=COUNT, help="routed experts, so that two servers fit the card")
    parser.add_argument("--folder", type=folder, help="where the folders of stores are made (below --logs)")
    parser.add_argument("--tokens", type=number(int, 1024, 1 << 20), default=LONG, help="of a context")
    parser.add_argument("--agents", type=COUNT, default=8)
    parser.add_argument("--turn", type=COUNT, default=2500, help="tokens that a turn adds")
    parser.add_argument("--answer", type=COUNT, default=32, help="of them, the answer's")
    parser.add_argument("--concurrency", type=CONCURRENCY, default=2, help="agents at a time")
    parser.add_argument("--device-tokens", type=number(int, 1, 1 << 24), default=200_000, help="--max-total-tokens")
    parser.add_argument("--chunk", type=COUNT, default=8192, help="--chunked-prefill-size")
    parser.add_argument("--host-gb", type=number(float, 0.1), default=16, help="DSV4_HOST_GB")
    add_requests(parser)
    return parser


def read_options(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line; the arguments behind ``--`` are for all servers."""
    given = servers.parse(parser, argv)
    if given.answer >= given.turn:
        parser.error(f"--answer {given.answer} --turn {given.turn}: the answer is a part of the turn")
    given.name = given.name.replace("SCENE", getattr(given, "scene", ""))
    given.turns = getattr(given, "turns", TURNS)
    given.contexts, given.idle, given.worn = (given.tokens,), True, None  # of session_agents: its servers log no saves
    return given
